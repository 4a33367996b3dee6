package engine_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/journal/journaltest"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
	"cocoonstack.io/cocoon/internal/vm"
)

// The crash test runs this binary again as a daemon that kills itself at the n-th point of an operation: before and
// after each change of the journal and each act of the driver, the network, the image store and the agent.
const (
	crashDir = "ENGINE_TEST_CRASH_DIR"
	crashOp  = "ENGINE_TEST_CRASH_OP"
	crashAt  = "ENGINE_TEST_CRASH_AT"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(crashDir); dir != "" {
		at, _ := strconv.ParseInt(os.Getenv(crashAt), 10, 64)
		if err := crash(dir, os.Getenv(crashOp), at); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// crash is the daemon: it does op and kills itself at the given point.
func crash(dir, op string, at int64) error {
	ctx := context.Background()
	w, err := enginetest.New(dir + "/world")
	if err != nil {
		return err
	}
	var armed atomic.Bool
	var points atomic.Int64
	point := func(name string) error {
		if armed.Load() && points.Add(1) == at {
			fmt.Println(name)
			return errors.Join(syscall.Kill(os.Getpid(), syscall.SIGKILL), syscall.Pause())
		}
		return nil
	}
	if scripts()[op].raw {
		if err := w.RawOnly(); err != nil {
			return err
		}
	}
	var gate sync.RWMutex // held while the trigger runs
	w.Fault = func(call string) error {
		gate.RLock()
		defer gate.RUnlock()
		return point(call)
	}
	var before atomic.Int64 // changes in progress that began while armed: the end of an earlier one is no point of the operation
	e, _, err := build(ctx, dir, w, w.Driver(), func(j journal.Journal) journal.Journal {
		return journaltest.Faulty{Journal: j, Hook: func(p journaltest.Point) error {
			gate.RLock()
			defer gate.RUnlock()
			if armed.Load() {
				if !p.After {
					before.Add(1)
				} else if before.Add(-1) < 0 {
					before.Store(0)
					return nil
				}
			}
			return point(fmt.Sprintf("%s %s%s after=%v", p.Method, p.Op, p.Step, p.After))
		}}
	}, nil, engine.Config{PoolSize: scripts()[op].pool}, nil, sqlite.Config{})
	if err != nil {
		return err
	}
	r := &rig{Engine: e, world: w, dir: dir}
	s := scripts()[op]
	armed.Store(s.before == nil)
	go func() { _ = e.Run(ctx) }()
	<-e.Recovered()
	if s.before != nil {
		if err := s.before(ctx, r); err != nil {
			return err
		}
		gate.Lock()
		if s.trigger != nil {
			err = s.trigger(ctx, r)
		}
		armed.Store(true)
		gate.Unlock()
		if err != nil {
			return err
		}
	}
	return s.act(ctx, r)
}

// child runs crash in its own process. It returns the point at which it was killed, "" if it reached the end.
func child(t *testing.T, dir, op string, at int) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), crashDir+"="+dir, crashOp+"="+op, fmt.Sprint(crashAt, "=", at),
		"GORACE=atexit_sleep_ms=0") // otherwise each child takes a second under the race detector
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err == nil {
		return ""
	}
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signal() == syscall.SIGKILL {
		return strings.TrimSpace(string(out))
	}
	t.Fatalf("%s, point %d: %v\n%s", op, at, err, stderr.String())
	return ""
}

// TestKilledAtEveryStep kills the engine at every point of every script. Together, the scripts are killed in every step
// of every operation of the engine. With the race detector, which makes each child slow, it does so at every few points only;
// `make test-crash` goes without.
func TestKilledAtEveryStep(t *testing.T) {
	var seen interrupted
	var ran atomic.Int64
	t.Cleanup(func() {
		if t.Failed() || pointStride > 1 || int(ran.Load()) < len(scripts()) { // some were not asked for
			return
		}
		for op, words := range engine.Steps() {
			for _, word := range words {
				if !seen.has(op, word) {
					t.Errorf("no script is killed in the step %s of the operation %s: give crashscripts_test.go one", word, op)
				}
			}
		}
	})
	for op, s := range scripts() {
		if s.after == nil {
			ran.Add(1)
			continue
		}
		t.Run(op, func(t *testing.T) {
			ran.Add(1)
			t.Parallel()
			var last atomic.Bool // some point was after the end of the operation
			var points atomic.Int32
			for first := 1; !last.Load(); first += abreast * pointStride {
				var wg sync.WaitGroup
				for at := first; at < first+abreast*pointStride; at += pointStride {
					wg.Go(func() {
						t.Run(fmt.Sprint(at), func(t *testing.T) {
							if killedAt(t, op, s, at, &seen) {
								points.Add(1)
							} else {
								last.Store(true)
							}
						})
					})
				}
				wg.Wait()
			}
			if n := points.Load(); n < 3 && pointStride == 1 {
				t.Errorf("there are hardly any points: %d", n)
			}
		})
	}
}

// interrupted are the steps in which an engine was killed.
type interrupted struct{ steps sync.Map }

func (i *interrupted) has(op, word string) bool {
	_, ok := i.steps.Load(op + " " + word)
	return ok
}

// note looks in the journal of a killed engine.
func (i *interrupted) note(t *testing.T, dir string) {
	t.Helper()
	j, err := sqlite.Open(t.Context(), sqlite.Config{Path: dir + "/state/journal.db"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = j.Close() }()
	_, intents, err := j.Load(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, in := range intents {
		i.steps.Store(in.Op+" "+in.Step, true)
	}
}

// abreast is how many crashes run in parallel: they mostly wait for the disk.
const abreast = 8

// killedAt makes a child do op, killed at one point, and recovers. It returns false if the operation has fewer
// points.
func killedAt(t *testing.T, op string, s script, at int, seen *interrupted) bool {
	dir := t.TempDir()
	where := child(t, dir, op, at)
	if where == "" {
		return false
	}
	seen.note(t, dir)
	if at%3 == 0 { // and kill it again while it recovers
		where += ", then " + child(t, dir, "recover", at/3)
	}
	settled(t, dir, s, where)
	return true
}

// settled starts an engine on what a killed one left and checks that the world is consistent.
func settled(t *testing.T, dir string, s script, where string) {
	t.Helper()
	r := &rig{t: t, dir: dir, wrap: func(j journal.Journal) journal.Journal { return j }}
	r.world = r.newWorld()
	r.start()
	defer r.stopQuietly()
	idle(t, r)
	name := cmp.Or(s.name, "web")
	if slices.Equal(s.after, []vm.State{vm.StateStopped}) && s.disk == nil { // the exit code of a process arrives a little later
		rec := r.await("web", "stopped", stopped)
		if rec.ExitCode == nil || *rec.ExitCode != 5 || rec.Reason != vm.ReasonExited {
			t.Errorf("killed at %s: the exit is lost: %+v", where, rec)
		}
	}
	rec, err := r.Inspect(t.Context(), name)
	if err != nil && !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	if !slices.Contains(s.after, rec.State) {
		t.Errorf("killed at %s: state %q (%s)", where, rec.State, rec.Message)
	}
	all, err := r.List(t.Context())
	if err != nil {
		t.Error(err)
	}
	var want []string
	for _, rec := range all {
		want = append(want, r.has(rec, where)...)
	}
	slices.Sort(want)
	want = slices.Compact(want)
	made, err := r.world.Volumes().Made(t.Context())
	if err != nil {
		t.Error(err)
	}
	left := append(leftovers(t, dir, r.world), made...)
	slices.Sort(left)
	if !slices.Equal(left, want) {
		t.Errorf("killed at %s: there is %v, want %v", where, left, want)
	}
	for _, rec := range all {
		if s.disk != nil {
			r.alive(rec, s.disk, where)
		}
	}
	if _, err := r.world.Snapshots().Get(t.Context(), "gold"); err == nil {
		if err := r.RemoveSnapshot(t.Context(), "gold"); err != nil {
			t.Errorf("killed at %s: %v", where, err)
		}
	}
	if err := r.Reset(t.Context()); err != nil {
		t.Errorf("killed at %s: %v", where, err)
	}
	r.clean()
}

// has lists what must exist of a VM.
func (r *rig) has(rec vm.Record, where string) []string {
	want := []string{"leases/" + rec.NICs[0].IP, "run/vms/" + string(rec.ID), "state/vms/" + string(rec.ID)}
	for _, id := range rec.SnapshotIDs {
		want = append(want, "snapshots/"+id)
		if x, err := r.world.Snapshots().Get(r.t.Context(), id); err == nil && len(x.Volumes) > 0 {
			want = append(want, "parts/"+id)
		}
	}
	if rec.State == vm.StateHibernated {
		want = append(want, "snapshots/"+rec.Snapshot)
	}
	for _, nic := range rec.NICs[1:] {
		want = append(want, "leases/"+nic.IP)
		if rec.State == vm.StateRunning {
			want = append(want, "taps/"+nic.Tap)
		}
	}
	if rec.State == vm.StateRunning {
		want = append(want, "procs/"+string(rec.ID), "cgroups/"+string(rec.ID), "taps/"+rec.NICs[0].Tap)
		g := r.world.Guest(rec.ID)
		if g == nil || g.PID() != rec.PID {
			r.t.Errorf("killed at %s: the record has PID %d, the guest another", where, rec.PID)
		} else if paused := rec.Paused != ""; g.Self().Paused != paused {
			r.t.Errorf("killed at %s: on record the guest is paused: %v; it is not so", where, paused)
		}
	}
	for _, a := range rec.Attached {
		want = append(want, "attachments/"+string(rec.ID))
		if v, err := r.world.Volumes().Get(r.t.Context(), string(a.ID)); err != nil {
			r.t.Errorf("killed at %s: volume %s: %v", where, a.Volume, err)
		} else if v.For != "" {
			want = append(want, "copies/"+string(rec.ID))
		}
	}
	all, err := r.world.Volumes().List(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, v := range all {
		if on := attachedAs(rec, v.ID); v.AttachedTo(rec.ID) != on {
			r.t.Errorf("killed at %s: volume %s: in the store attached %v, on record %v", where, v.Name, !on, on)
		}
	}
	r.hasVolumes(rec, where)
	r.hasContainers(rec, where)
	r.hasSize(rec, where)
	r.hasNICs(rec, where)
	r.hasLinks(rec, where)
	used := map[string]bool{}
	for _, d := range rec.Disks {
		for at := &d; at != nil; at = at.Backing {
			used[strings.SplitN(strings.TrimPrefix(at.Path, r.dir+"/state/vms/"+string(rec.ID)+"/"), "/", 2)[0]] = true
		}
	}
	for _, name := range r.overlays(rec.ID) {
		if !used[name] {
			r.t.Errorf("killed at %s: %s has a disk %s that it does not use", where, rec.Spec.Name, name)
		}
	}
	return want
}

func attachedAs(rec vm.Record, id vm.ID) bool {
	return slices.ContainsFunc(rec.Attached, func(a vm.AttachedVolume) bool { return a.ID == id })
}

// alive starts a VM, if necessary, and checks its disk: neither lost nor older than its memory.
func (r *rig) alive(rec vm.Record, disks []string, where string) {
	r.t.Helper()
	if _, err := r.Start(r.t.Context(), string(rec.ID)); err != nil {
		r.t.Errorf("killed at %s: start vm %s, which is %s: %v", where, rec.Spec.Name, rec.State, err)
		return
	}
	if got := r.disk(rec.ID); !slices.Contains(disks, got) {
		r.t.Errorf("killed at %s: the disk of %s holds %q, not one of %q", where, rec.Spec.Name, got, disks)
	}
	if rec.ImageType != vm.ImageOCI {
		return
	}
	now := r.await(string(rec.ID), "ready", ready)
	if self := r.world.Guest(rec.ID).Self(); self.Hostname != rec.Spec.Name || self.MAC != now.NICs[0].MAC || self.Down {
		r.t.Errorf("killed at %s: %s is %+v", where, rec.Spec.Name, self)
	}
	want := vm.ResourcesOf(now.Spec.Containers)
	r.eventually("the resources on record after it was killed at "+where, func() bool {
		return maps.Equal(r.world.Guest(rec.ID).Sized(), want)
	})
}

// idle waits until no operation is unfinished and the engine knows it: the journal knows a moment earlier.
func idle(t *testing.T, r *rig) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		changed := r.journal.Changed()
		records, intents, err := r.journal.Load(ctx)
		if err != nil {
			t.Fatal(err)
		}
		all, err := r.List(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if len(intents) == 0 && maps.Equal(revisions(records), revisions(all)) {
			return
		}
		if len(intents) == 0 && ctx.Err() == nil {
			runtime.Gosched() // the next check may find both
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("unfinished: %+v", intents)
		}
	}
}

func revisions(all []vm.Record) map[vm.ID]int64 {
	out := map[vm.ID]int64{}
	for _, r := range all {
		out[r.ID] = r.Revision
	}
	return out
}

// stopQuietly is stop for tests that run in parallel with others, whose goroutines must not be counted.
func (r *rig) stopQuietly() {
	r.parallel = true
	r.stop()
}

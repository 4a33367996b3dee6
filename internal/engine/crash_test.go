package engine_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/journal/journaltest"
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

// script is an operation with what comes before it. Each part returns when its outcome is in the journal.
type script struct {
	before  func(context.Context, *rig) error
	trigger func(context.Context, *rig) error // what sets it off from outside; no point is passed before it is done
	act     func(context.Context, *rig) error
	only    func(context.Context, *rig) error // act alone, without waiting for the guest; nil: act
	// after lists the states the VM may be in once all is recovered; "" is gone.
	after []vm.State
	// disk lists what the disks of VMs that run, or can be started, may hold; nil: not looked at.
	disk []string
	name string // of the VM; "": web
	pool int    // clones kept ready
}

func cloud() vm.Spec {
	s := spec("web")
	s.Image = "cloud"
	return s
}

func launched(ctx context.Context, r *rig) error {
	if _, err := r.Launch(ctx, withVolumes()); err != nil {
		return err
	}
	return until(ctx, r, ready)
}

var errFound = errors.New("found")

func until(ctx context.Context, r *rig, ok func(vm.Record) bool) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	err := r.Watch(ctx, -1, func(e vm.Event) error {
		if ok(e.Record) {
			return errFound
		}
		return nil
	})
	if errors.Is(err, errFound) {
		return nil
	}
	return err
}

// written launches the VM and has it write to its disk.
func written(ctx context.Context, r *rig) error {
	return errors.Join(launched(ctx, r), write(ctx, r, "one."))
}

func write(ctx context.Context, r *rig, text string) error {
	rec, err := r.Inspect(ctx, "web")
	if err != nil {
		return err
	}
	return r.world.Guest(rec.ID).Write(text)
}

func halt(ctx context.Context, r *rig) error {
	_, err := r.Stop(ctx, "web", 0)
	return err
}

func save(ctx context.Context, r *rig) error {
	_, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})
	return err
}

// saved is written, saved, and written to once more.
func saved(ctx context.Context, r *rig) error {
	return errors.Join(written(ctx, r), save(ctx, r), write(ctx, r, "two."))
}

func clone(ctx context.Context, r *rig) error {
	_, err := r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a"})
	return err
}

func second(ctx context.Context, r *rig) error {
	_, err := r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "b"})
	return err
}

// filled waits until a clone is in the pool.
func filled(ctx context.Context, r *rig) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for r.Pool().Entries == 0 {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

func restore(ctx context.Context, r *rig) error {
	_, err := r.Restore(ctx, "web", "gold")
	return err
}

func scripts() map[string]script {
	all := map[string]script{
		"create": {
			act:   func(ctx context.Context, r *rig) error { _, err := r.Create(ctx, spec("web")); return err },
			after: []vm.State{"", vm.StateCreated},
		},
		"launch": {act: launched, after: []vm.State{"", vm.StateRunning}},
		"start": {
			before: func(ctx context.Context, r *rig) error { _, err := r.Create(ctx, spec("web")); return err },
			act:    func(ctx context.Context, r *rig) error { _, err := r.Start(ctx, "web"); return err },
			after:  []vm.State{vm.StateCreated, vm.StateRunning},
		},
		"launch disk": {
			act: func(ctx context.Context, r *rig) error {
				if _, err := r.Launch(ctx, cloud()); err != nil {
					return err
				}
				return until(ctx, r, ready)
			},
			after: []vm.State{"", vm.StateRunning},
		},
		"start disk": {
			before: func(ctx context.Context, r *rig) error { _, err := r.Create(ctx, cloud()); return err },
			act:    func(ctx context.Context, r *rig) error { _, err := r.Start(ctx, "web"); return err },
			after:  []vm.State{vm.StateCreated, vm.StateRunning},
		},
		"stop": {
			before: launched,
			act:    func(ctx context.Context, r *rig) error { _, err := r.Stop(ctx, "web", -1); return err },
			after:  []vm.State{vm.StateRunning, vm.StateStopped},
		},
		"restart": {
			before: launched,
			act:    func(ctx context.Context, r *rig) error { _, err := r.Restart(ctx, "web", -1); return err },
			after:  []vm.State{vm.StateRunning},
		},
		"remove": {
			before: launched,
			act:    func(ctx context.Context, r *rig) error { return r.Remove(ctx, "web", true) },
			after:  []vm.State{vm.StateRunning, ""},
		},
		"exit": {
			before: launched,
			trigger: func(ctx context.Context, r *rig) error {
				rec, err := r.Inspect(ctx, "web")
				if err != nil {
					return err
				}
				r.world.Guest(rec.ID).Exit(5)
				return nil
			},
			act:   func(ctx context.Context, r *rig) error { return until(ctx, r, stopped) },
			after: []vm.State{vm.StateStopped},
		},
		"update": {
			before: launched,
			act: func(ctx context.Context, r *rig) error {
				for range 2 * abreast { // each has one point only
					if err := r.UpdateVolume(ctx, "web", "conf", content("two")); err != nil {
						return err
					}
				}
				return nil
			},
			after: []vm.State{vm.StateRunning},
		},
		"save": {
			before: written,
			act:    func(ctx context.Context, r *rig) error { return save(ctx, r) },
			after:  []vm.State{vm.StateRunning},
			disk:   []string{"one."},
		},
		"save stopped": {
			before: func(ctx context.Context, r *rig) error { return errors.Join(written(ctx, r), halt(ctx, r)) },
			act:    func(ctx context.Context, r *rig) error { return save(ctx, r) },
			after:  []vm.State{vm.StateStopped},
			disk:   []string{"one."},
		},
		"clone": {
			before: saved,
			act: func(ctx context.Context, r *rig) error {
				if err := clone(ctx, r); err != nil {
					return err
				}
				return until(ctx, r, func(v vm.Record) bool { return v.Spec.Name == "a" && v.AgentReady })
			},
			only:  clone,
			after: []vm.State{"", vm.StateRunning},
			disk:  []string{"one.two.", "one."}, // of the source and of the clone
			name:  "a",
		},
		"clone pooled": {
			before: func(ctx context.Context, r *rig) error {
				return errors.Join(saved(ctx, r), clone(ctx, r), filled(ctx, r))
			},
			act: func(ctx context.Context, r *rig) error {
				if err := second(ctx, r); err != nil {
					return err
				}
				return errors.Join(until(ctx, r, func(v vm.Record) bool { return v.Spec.Name == "b" && v.AgentReady }), filled(ctx, r))
			},
			only:  second,
			after: []vm.State{"", vm.StateRunning},
			disk:  []string{"one.two.", "one."},
			name:  "b",
			pool:  1,
		},
		"clone disk": {
			before: func(ctx context.Context, r *rig) error {
				if _, err := r.Launch(ctx, cloud()); err != nil {
					return err
				}
				return errors.Join(until(ctx, r, ready), write(ctx, r, "one."), save(ctx, r))
			},
			act: func(ctx context.Context, r *rig) error {
				if err := clone(ctx, r); err != nil {
					return err
				}
				return until(ctx, r, func(v vm.Record) bool { return v.Spec.Name == "a" && v.Itself() })
			},
			only:  clone,
			after: []vm.State{"", vm.StateRunning},
			disk:  []string{"one."},
			name:  "a",
		},
		"hibernate": {
			before: written,
			act:    func(ctx context.Context, r *rig) error { _, err := r.Hibernate(ctx, "web", ""); return err },
			after:  []vm.State{vm.StateRunning, vm.StateHibernated},
			disk:   []string{"one."},
		},
		"wake": {
			before: func(ctx context.Context, r *rig) error {
				if err := written(ctx, r); err != nil {
					return err
				}
				_, err := r.Hibernate(ctx, "web", "")
				return err
			},
			act: func(ctx context.Context, r *rig) error {
				if _, err := r.Wake(ctx, "web"); err != nil {
					return err
				}
				return until(ctx, r, ready)
			},
			only:  func(ctx context.Context, r *rig) error { _, err := r.Wake(ctx, "web"); return err },
			after: []vm.State{vm.StateRunning, vm.StateHibernated},
			disk:  []string{"one."},
		},
		"restore": {
			before: saved,
			act:    restore,
			after:  []vm.State{vm.StateRunning},
			disk:   []string{"one.", "one.two."},
		},
		"restore hibernated": {
			before: func(ctx context.Context, r *rig) error {
				if err := saved(ctx, r); err != nil {
					return err
				}
				_, err := r.Hibernate(ctx, "web", "night")
				return err
			},
			act:   restore,
			after: []vm.State{vm.StateRunning, vm.StateHibernated},
			disk:  []string{"one.", "one.two."},
		},
		"remove hibernated": {
			before: func(ctx context.Context, r *rig) error {
				if err := written(ctx, r); err != nil {
					return err
				}
				_, err := r.Hibernate(ctx, "web", "night")
				return err
			},
			act:   func(ctx context.Context, r *rig) error { return r.Remove(ctx, "web", false) },
			after: []vm.State{vm.StateHibernated, ""},
		},
		"recover": {act: func(context.Context, *rig) error { return nil }},
	}
	maps.Copy(all, severalScripts())
	return all
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
	var gate sync.RWMutex // held while the trigger is pulled
	w.Fault = func(call string) error {
		gate.RLock()
		defer gate.RUnlock()
		return point(call)
	}
	var before atomic.Int64 // changes under way that began while armed: the end of an earlier one is no point of the operation
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
	}, nil, scripts()[op].pool, 0)
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

// child runs crash in a process of its own. It returns the point at which it was killed, "" when it came to the end.
func child(t *testing.T, dir, op string, at int) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), crashDir+"="+dir, crashOp+"="+op, fmt.Sprint(crashAt, "=", at),
		"GORACE=atexit_sleep_ms=0") // or each child takes a second under the race detector
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

func TestKilledAtEveryStep(t *testing.T) {
	for op, s := range scripts() {
		if s.after == nil {
			continue
		}
		t.Run(op, func(t *testing.T) {
			t.Parallel()
			var last atomic.Bool // some point was beyond the end of the operation
			for first := 1; !last.Load(); first += abreast {
				var wg sync.WaitGroup
				for at := first; at < first+abreast; at++ {
					wg.Go(func() {
						t.Run(fmt.Sprint(at), func(t *testing.T) {
							if !killedAt(t, op, s, at) {
								last.Store(true)
							}
						})
					})
				}
				wg.Wait()
				if last.Load() && first == 1 {
					t.Error("there are hardly any points")
				}
			}
		})
	}
}

// abreast is how many crashes are tried at a time: they mostly wait for the disk.
const abreast = 8

// killedAt has a child do op, killed at one point, and recovers. It returns false when the operation has fewer points.
func killedAt(t *testing.T, op string, s script, at int) bool {
	dir := t.TempDir()
	where := child(t, dir, op, at)
	if where == "" {
		return false
	}
	if at%3 == 0 { // and once more, while it recovers
		where += ", then " + child(t, dir, "recover", at/3)
	}
	settled(t, dir, s, where)
	return true
}

// settled starts an engine on what a killed one left and checks that the world is whole.
func settled(t *testing.T, dir string, s script, where string) {
	t.Helper()
	r := &rig{t: t, dir: dir, wrap: func(j journal.Journal) journal.Journal { return j }}
	r.world = r.newWorld()
	r.start()
	defer r.stopQuietly()
	idle(t, r)
	name := cmp.Or(s.name, "web")
	if slices.Equal(s.after, []vm.State{vm.StateStopped}) && s.disk == nil { // the code of an exited process arrives a little later
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
	if left := leftovers(t, dir, r.world); !slices.Equal(left, want) {
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

// has lists what there must be of a VM.
func (r *rig) has(rec vm.Record, where string) []string {
	want := []string{"leases/" + rec.NICs[0].IP, "run/vms/" + string(rec.ID), "state/vms/" + string(rec.ID)}
	for _, id := range rec.SnapshotIDs {
		want = append(want, "snapshots/"+id)
	}
	if rec.State == vm.StateHibernated {
		want = append(want, "snapshots/"+rec.Snapshot)
	}
	if rec.State == vm.StateRunning {
		want = append(want, "procs/"+string(rec.ID), "cgroups/"+string(rec.ID), "taps/"+rec.NICs[0].Tap)
		g := r.world.Guest(rec.ID)
		if g == nil || g.PID() != rec.PID {
			r.t.Errorf("killed at %s: the record has PID %d, the guest another", where, rec.PID)
		} else if g.Self().Paused {
			r.t.Errorf("killed at %s: the guest is paused", where)
		}
	}
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

// alive brings a VM up, if need be, and looks at its disk: neither lost nor older than its memory.
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
}

// idle waits until no operation is unfinished.
func idle(t *testing.T, r *rig) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for {
		changed := r.journal.Changed()
		_, intents, err := r.journal.Load(ctx)
		switch {
		case err != nil:
			t.Fatal(err)
		case len(intents) == 0:
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("unfinished: %+v", intents)
		}
	}
}

// stopQuietly is stop for tests that run beside others, whose goroutines are not ours to count.
func (r *rig) stopQuietly() {
	r.parallel = true
	r.stop()
}

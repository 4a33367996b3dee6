package engine_test

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// What a journal may say about an operation, true or not.
var (
	fuzzOps   = []string{"create", "launch", "start", "stop", "restart", "remove", "save", "clone", "hibernate", "wake", "restore", "", "dance"}
	fuzzSteps = []string{"disks", "network", "launch", "shutdown", "kill", "save", "undo", "clean", "", "elsewhere"}
	// State of the victim before the journal is changed: its real state.
	fuzzTruths = []string{"running", "stopped", "hibernated", "saved"}
	fuzzStates = []vm.State{"", vm.StateCreating, vm.StateCreated, vm.StateRunning, vm.StateStopped, vm.StateHibernated, vm.StateError, "lost"}
	// Arguments in which SELF and OTHER are IDs of snapshots, the victim's and another VM's.
	fuzzArgs = []string{
		``, `{}`, `null`, `[1]`, `{"grace":0}`, `{"grace":-1}`, `{"grace":9223372036854775807}`, `{"snapshot":"SELF"}`, `{"snapshot":"OTHER"}`,
		`{"snapshot":"OTHER","slept":"OTHER"}`, `{"snapshot":"SELF","slept":"OTHER","files":["../OTHER","/etc/passwd",".."]}`, `{"snapshot":"../x"}`, `{"snapshot":"none"}`,
	}
)

// FuzzRecover makes the engine recover from a journal that says anything about one VM: an operation at any step with
// any arguments, in any state, with or without a process. Whatever it says, recovery and the operation end. What
// belongs to another VM (its process, disks, NICs, snapshots and record) does not change. The VM itself can be
// removed without a trace.
func FuzzRecover(f *testing.F) {
	const launch, undo, running = 2, 6, 3
	for op := range fuzzOps {
		f.Add(uint8(op), uint8(op), uint8(op), uint8(op+1), uint8(op*3), op%2 == 0, "")
	}
	for op := 6; op <= 10; op++ { // those with snapshots
		f.Add(uint8(op), uint8(undo), uint8(0), uint8(running), uint8(8), true, "")
		f.Add(uint8(op), uint8(launch), uint8(op), uint8(running), uint8(9), true, "")
		f.Add(uint8(op), uint8(launch+1), uint8(0), uint8(255), uint8(10), true, "")
	}
	f.Add(uint8(3), uint8(3), uint8(0), uint8(running), uint8(255), true, `{"grace":1e9`)
	f.Fuzz(func(t *testing.T, op, step, truth, state, args uint8, handle bool, raw string) {
		r := newRig(t)
		runner, sleeper := neighbours(t, r)
		victim := victimOf(t, r, fuzzTruths[int(truth)%len(fuzzTruths)])
		r.stop()

		text, other := raw, snapshotOf(sleeper)
		if step%2 == 0 {
			other = snapshotOf(runner)
		}
		if int(args) < len(fuzzArgs) {
			text = strings.NewReplacer("SELF", snapshotOf(victim), "OTHER", other).Replace(fuzzArgs[args])
		}
		in := journal.Intent{
			ID: victim.ID, Op: fuzzOps[int(op)%len(fuzzOps)], Step: fuzzSteps[int(step)%len(fuzzSteps)], Args: json.RawMessage(text), Began: time.Now(),
		}
		if text == "" {
			in.Args = nil
		}
		lie := victim
		if int(state) < len(fuzzStates) {
			lie.State = fuzzStates[state]
		}
		if !handle {
			lie.Handle, lie.PID = nil, 0
		}
		if !rewrite(t, r, in, lie) {
			t.Skip("the journal itself refuses it")
		}
		t.Logf("%s at %s of a VM that is %s, in state %q, with %s", in.Op, in.Step, victim.State, lie.State, text)
		before := belongings(t, r, runner, sleeper)
		r.start()
		idle(t, r)
		unharmed(t, r, before, runner, sleeper)

		rec, err := r.Inspect(t.Context(), string(victim.ID))
		switch {
		case errdefs.IsNotFound(err):
		case err != nil:
			t.Fatal(err)
		case rec.State == vm.StateError && rec.Message == "":
			t.Error("the VM is in error without a reason")
		default:
			if err := r.Remove(t.Context(), string(victim.ID), true); err != nil {
				t.Errorf("it cannot be removed: %v", err)
			}
		}
		unharmed(t, r, before, runner, sleeper)
		r.restart() // nothing of it comes back
		unharmed(t, r, before, runner, sleeper)
		if _, err := r.Inspect(t.Context(), string(victim.ID)); !errdefs.IsNotFound(err) {
			t.Errorf("the VM that was removed: %v", err)
		}
	})
}

// neighbours returns a VM that runs, with its own snapshot, and a hibernated VM.
func neighbours(t *testing.T, r *rig) (running, asleep vm.Record) {
	t.Helper()
	ctx := t.Context()
	for _, name := range []string{"runner", "sleeper"} {
		r.must(r.Launch(ctx, spec(name)))
		r.await(name, "ready", ready)
	}
	if _, err := r.SaveSnapshot(ctx, "runner", vm.SaveSpec{Name: "kept"}); err != nil {
		t.Fatal(err)
	}
	asleep = r.must(r.Hibernate(ctx, "sleeper", ""))
	return r.must(r.Inspect(ctx, "runner")), asleep
}

// victimOf creates the VM about which the journal will be wrong, in one of fuzzTruths.
func victimOf(t *testing.T, r *rig, truth string) vm.Record {
	t.Helper()
	ctx := t.Context()
	r.must(r.Launch(ctx, spec("victim")))
	r.await("victim", "ready", ready)
	switch truth {
	case "stopped":
		r.must(r.Stop(ctx, "victim", 0))
	case "hibernated":
		r.must(r.Hibernate(ctx, "victim", ""))
	case "saved":
		if _, err := r.SaveSnapshot(ctx, "victim", vm.SaveSpec{Name: "mine"}); err != nil {
			t.Fatal(err)
		}
	}
	return r.must(r.Inspect(ctx, "victim"))
}

// snapshotOf returns a snapshot of rec, or an ID that no snapshot has.
func snapshotOf(rec vm.Record) string {
	if rec.Snapshot != "" {
		return rec.Snapshot
	}
	if len(rec.SnapshotIDs) > 0 {
		return rec.SnapshotIDs[0]
	}
	return string(rec.ID)
}

// rewrite puts in and rec into the journal of r, which is stopped. It returns false if the journal refuses them.
func rewrite(t *testing.T, r *rig, in journal.Intent, rec vm.Record) bool {
	t.Helper()
	j, err := sqlite.Open(t.Context(), sqlite.Config{Path: filepath.Join(r.dir, "state", "journal.db")})
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	_, err = j.Begin(t.Context(), in, rec)
	return err == nil
}

// belongings returns everything in the world of r that belongs to one of the VMs, with its content.
func belongings(t *testing.T, r *rig, of ...vm.Record) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(r.dir, func(path string, d os.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) { // engine and guests keep running meanwhile
			return nil
		}
		if err != nil || d.IsDir() || strings.HasSuffix(path, "console.log") || strings.HasPrefix(path, filepath.Join(r.dir, "world", "tmp")) {
			return err
		}
		mine := slices.ContainsFunc(of, func(rec vm.Record) bool {
			names := append([]string{string(rec.ID), rec.Snapshot, rec.NICs[0].IP}, rec.SnapshotIDs...)
			return slices.ContainsFunc(names, func(n string) bool { return n != "" && strings.Contains(path, "/"+n) })
		})
		if !mine {
			return nil
		}
		text, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		out[strings.TrimPrefix(path, r.dir)] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// unharmed fails if anything that the neighbours have, or their state, has changed.
func unharmed(t *testing.T, r *rig, before map[string]string, of ...vm.Record) {
	t.Helper()
	after := belongings(t, r, of...)
	for path, text := range before {
		if now, ok := after[path]; !ok {
			t.Errorf("%s is gone", path)
		} else if now != text && !strings.Contains(path, "/log/") && !strings.Contains(path, "/procs/") {
			t.Errorf("%s has changed from %q to %q", path, text, now)
		}
	}
	for _, rec := range of {
		now, err := r.Inspect(t.Context(), string(rec.ID))
		if err != nil || now.State != rec.State || now.PID != rec.PID || now.Snapshot != rec.Snapshot || !slices.Equal(now.SnapshotIDs, rec.SnapshotIDs) {
			t.Errorf("%s, compared with before: %v, %s", rec.Spec.Name, err, diff.Of(rec, now))
		}
		if g := r.world.Guest(rec.ID); rec.State == vm.StateRunning && (g == nil || g.PID() != rec.PID || g.Self().Paused) {
			t.Errorf("the guest of %s does not run as it did", rec.Spec.Name)
		}
	}
}

package engine_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/journal/journaltest"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestFaultAtEveryStep makes the n-th act of an operation fail: of the journal, the driver, the network, the image
// store or the agent, before the act did anything or after it did everything. Whatever the operation returns, the VM
// can be removed and nothing remains; a creation that fails leaves nothing behind.
func TestFaultAtEveryStep(t *testing.T) {
	for op, s := range scripts() {
		if s.after == nil || op == "exit" {
			continue
		}
		t.Run(op, func(t *testing.T) {
			t.Parallel()
			for at := int64(1); ; at++ {
				if !faultAt(t, op, s, at) {
					return
				}
			}
		})
	}
}

// faultAt reports whether the operation has that many points.
func faultAt(t *testing.T, op string, s script, at int64) bool {
	t.Helper()
	ctx := t.Context()
	var armed atomic.Bool
	var points atomic.Int64
	where := ""
	point := func(name string) error {
		if armed.Load() && points.Add(1) == at {
			where = name
			return errdefs.Exhaustedf("fault at %s", name)
		}
		return nil
	}
	r := newRig(t, func(r *rig) {
		r.world.Fault, r.parallel, r.cfg.PoolSize = point, true, s.pool
		if s.raw {
			if err := r.world.RawOnly(); err != nil {
				t.Fatal(err)
			}
		}
		r.wrap = func(j journal.Journal) journal.Journal {
			return journaltest.Faulty{Journal: j, Hook: func(p journaltest.Point) error {
				return point(fmt.Sprintf("%s %s%s after=%v", p.Method, p.Op, p.Step, p.After))
			}}
		}
	})
	defer r.stop()
	if s.before != nil {
		if err := s.before(ctx, r); err != nil {
			t.Fatal(err)
		}
	}
	armed.Store(true)
	err := act(ctx, r, op)
	armed.Store(false)
	if points.Load() < at {
		return false
	}
	if (op == "create" || op == "launch" || op == "launch attached") && err != nil {
		wantClass(t, where, err, errdefs.ResourceExhausted)
		if rec, err := r.Inspect(ctx, "web"); err == nil && rec.State != vm.StateError {
			t.Errorf("%s: the VM is there, in state %s", where, rec.State)
		} else if err != nil {
			if left := leftovers(t, r.dir, r.world); len(left) > 0 {
				t.Errorf("%s: left behind: %v", where, left)
			}
		}
	}
	if at%2 == 0 { // a restart of the daemon must be able to clean up as well
		r.restart()
		idle(t, r)
	}
	for _, name := range []string{"web", "a", "b"} {
		if err := r.Remove(ctx, name, true); err != nil && !errdefs.IsNotFound(err) {
			t.Errorf("%s: remove: %v", where, err)
		}
	}
	all, err := r.world.Snapshots().List(ctx)
	if err != nil {
		t.Error(err)
	}
	for _, x := range all {
		// What cannot be removed is logged; anybody who knows its name can remove it.
		if x.Name != "gold" && !strings.HasPrefix(where, "snapshots.") && !strings.HasPrefix(where, "Sync") {
			t.Errorf("%s: snapshot %s is left", where, x.Name)
		}
		if err := r.RemoveSnapshot(ctx, x.ID); err != nil {
			t.Errorf("%s: %v", where, err)
		}
	}
	r.clean()
	if _, err := r.Create(ctx, spec("web")); err != nil { // its name is free again
		t.Errorf("%s: %v", where, err)
	}
	return true
}

// act is the operation alone, without waiting for the guest.
func act(ctx context.Context, r *rig, op string) error {
	if op == "launch" {
		_, err := r.Launch(ctx, spec("web"))
		return err
	}
	if s := scripts()[op]; s.only != nil {
		return s.only(ctx, r)
	}
	return scripts()[op].act(ctx, r)
}

// TestFaultOfAgents has agents that fail and recover: in the end the guest is set up.
func TestFaultOfAgents(t *testing.T) {
	for _, call := range []string{"agent.Connect", "driver.DialGuest", "agent.Setup", "agent.Logs", "agent.Wait", "agent.AckExit"} {
		t.Run(call, func(t *testing.T) {
			var left atomic.Int64
			left.Store(3)
			r := newRig(t, func(r *rig) {
				r.world.Fault = func(name string) error {
					if name == call && left.Add(-1) >= 0 {
						return errdefs.Unavailablef("fault at %s", name)
					}
					return nil
				}
			})
			rec := r.must(r.Launch(t.Context(), spec("web")))
			r.await("web", "ready", ready)
			r.world.Guest(rec.ID).Print(2)
			r.world.Guest(rec.ID).Exit(4)
			if got := r.await("web", "stopped", stopped); got.ExitCode == nil || *got.ExitCode != 4 || got.Reason != vm.ReasonExited {
				t.Errorf("got %+v", got)
			}
		})
	}
}

// TestUndoFails keeps a VM in StateError while its remains cannot be removed.
func TestUndoFails(t *testing.T) {
	var broken atomic.Bool
	r := newRig(t, func(r *rig) {
		r.world.Fault = func(name string) error {
			if broken.Load() && (name == "driver.Launch" || name == "network.Detach") {
				return errdefs.New(errdefs.Internal, "fault at %s", name)
			}
			return nil
		}
	})
	ctx := t.Context()
	broken.Store(true)
	if _, err := r.Launch(ctx, spec("web")); err == nil {
		t.Fatal("no error")
	}
	rec := r.must(r.Inspect(ctx, "web"))
	if rec.State != vm.StateError || rec.Reason != vm.ReasonCreateFailed || rec.Message == "" {
		t.Errorf("got %+v", rec)
	}
	_, err := r.Start(ctx, "web")
	wantClass(t, "start of a broken VM", err, errdefs.FailedPrecondition)
	if err := r.Remove(ctx, "web", false); err == nil {
		t.Error("it was removed all the same")
	}
	broken.Store(false)
	if err := r.Remove(ctx, "web", false); err != nil {
		t.Error(err)
	}
	r.clean()
}

// TestAdoptionFails keeps what cannot be adopted, for a daemon that can adopt it.
func TestAdoptionFails(t *testing.T) {
	r := newRig(t)
	rec := r.must(r.Launch(t.Context(), spec("web")))
	r.stop()
	r.world.Fault = func(name string) error {
		if name == "driver.Adopt" {
			return errdefs.Unavailablef("fault at %s", name)
		}
		return nil
	}
	r.start()
	if got := r.must(r.Inspect(t.Context(), "web")); got.State != vm.StateError || got.PID != rec.PID || got.Message == "" {
		t.Errorf("got %+v", got)
	}
	r.stop()
	r.world.Fault = func(string) error { return nil }
	r.start()
	if got := r.must(r.Inspect(t.Context(), "web")); got.State != vm.StateRunning || got.PID != rec.PID {
		t.Errorf("adopted, compared with before: %s", diff.Of(rec, got))
	}
	if err := r.Remove(t.Context(), "web", true); err != nil {
		t.Error(err)
	}
	r.clean()
}

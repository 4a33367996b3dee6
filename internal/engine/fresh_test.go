package engine_test

import (
	"sync/atomic"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestSavedBeforeSetUp saves a VM whose guest has not begun yet: what goes on from it has to be set up.
func TestSavedBeforeSetUp(t *testing.T) {
	var early atomic.Bool
	early.Store(true)
	r := newRig(t, func(r *rig) {
		r.world.Fault = func(call string) error {
			if call == "agent.Setup" && early.Load() {
				return errdefs.Unavailablef("fault at %s", call)
			}
			return nil
		}
	})
	ctx := t.Context()
	begun := func(ref, what string) {
		t.Helper()
		rec := r.await(ref, "ready "+what, ready)
		if told := r.world.Guest(rec.ID).Identity(); told.Process == nil || told.Hostname != ref {
			t.Errorf("%s was not set up as itself %s: %+v", ref, what, told)
		}
	}
	web := r.must(r.Launch(ctx, spec("web")))
	if x := r.saved("base"); !x.Fresh {
		t.Error("the snapshot does not say that its guest had not begun")
	}
	r.must(r.Launch(ctx, spec("sleeper")))
	r.must(r.Hibernate(ctx, "sleeper", ""))
	r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "base", Name: "early"}))
	if _, err := r.SaveSnapshot(ctx, "early", vm.SaveSpec{Name: "again"}); err != nil { // not itself, and not set up
		t.Fatal(err)
	}
	early.Store(false)
	begun("early", "once it could be")
	begun("web", "once it could be")
	r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "base", Name: "a"}))
	begun("a", "as a clone")
	r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "again", Name: "b"}))
	begun("b", "as a clone of a clone")
	r.must(r.Wake(ctx, "sleeper"))
	begun("sleeper", "when it woke")
	r.must(r.Restore(ctx, "web", "base"))
	begun("web", "when it went back")
	if x := r.saved("later"); x.Fresh {
		t.Error("the snapshot of a guest that was set up says otherwise")
	}
	r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "later", Name: "c"}))
	c := r.await("c", "ready", ready)
	if told := r.world.Guest(c.ID).Identity(); told.Process != nil {
		t.Errorf("a clone of %s was set up again: %+v", web.ID, told)
	}
	r.clearAll("base", "again", "later")
}

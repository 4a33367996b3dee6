package engine_test

import (
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// A guest stays frozen until somebody thaws it, until its time is over, or until an engine comes after one that was killed.
func TestFreeze(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	id := r.must(r.Launch(ctx, cloud())).ID
	r.await("web", "ready", ready)
	frozen := func() bool { return r.world.Guest(id).Self().Frozen }
	recorded := func(how string, want bool) {
		t.Helper()
		r.await("web", "recorded "+how, func(rec vm.Record) bool { return rec.Frozen == want })
	}
	thawed := func(how string) {
		t.Helper()
		defer recorded("as thawed "+how, false)
		for end := time.Now().Add(time.Minute); frozen(); <-time.After(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("the guest is not thawed %s", how)
			}
		}
	}
	for range 2 { // the second only changes the time
		if err := r.Freeze(ctx, "web", time.Minute); err != nil || !frozen() {
			t.Fatal(err, frozen())
		}
		recorded("as frozen", true)
	}
	if held, err := r.Thaw(ctx, "web"); err != nil || !held || frozen() {
		t.Error(held, err, frozen())
	}
	recorded("as thawed", false)
	if held, err := r.Thaw(ctx, "web"); err != nil || held {
		t.Error(held, err)
	}

	if err := r.Freeze(ctx, "web", time.Millisecond); err != nil {
		t.Fatal(err)
	}
	thawed("in time")
	if held, err := r.Thaw(ctx, "web"); err != nil || held {
		t.Error(held, err)
	}

	if err := r.Freeze(ctx, "web", time.Minute); err != nil {
		t.Fatal(err)
	}
	r.restart()
	thawed("by the next engine")

	r.refused("for too long", errdefs.InvalidArgument, r.Freeze(ctx, "web", 6*time.Minute))
	r.must(r.Launch(ctx, spec("ours")))
	r.await("ours", "ready", ready)
	r.refused("our own agent", errdefs.Unsupported, r.Freeze(ctx, "ours", time.Minute))
}

package engine_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestSavedBeforeSetUp saves a VM whose guest has not started yet: a guest that resumes from it must be set up.
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
	if _, err := r.SaveSnapshot(ctx, "early", vm.SaveSpec{Name: "again"}); err != nil { // it has no identity yet and is not set up
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

// TestSavedWhileItBecomesItself saves a clone when its guest and its record could disagree about its identity: after
// the guest was told and before that is recorded, and also when it is told before the snapshot is described.
func TestSavedWhileItBecomesItself(t *testing.T) {
	const told, saved = "agent.Resumed done", "driver.Save done"
	for name, moment := range map[string]string{"told, not recorded": told, "saved, not described": saved} {
		t.Run(name, func(t *testing.T) {
			var on atomic.Bool // there is a clone that must be told its identity
			var once sync.Once
			at, capture := make(chan struct{}), make(chan struct{}, 9)
			r := newRig(t, func(r *rig) {
				r.world.Fault = func(call string) error {
					if !on.Load() {
						return nil
					}
					if call == "agent.Resumed" && moment == saved {
						select {
						case <-at:
						default:
							return errdefs.Unavailablef("fault at %s", call)
						}
					}
					switch call {
					case moment:
						once.Do(func() { close(at); r.meanwhile(moment == saved, capture) })
					case saved:
						capture <- struct{}{}
					}
					return nil
				}
			})
			ctx := t.Context()
			r.source()
			r.saved("base")
			on.Store(true)
			r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "base", Name: "a"}))
			if moment == told {
				<-at
			}
			if _, err := r.SaveSnapshot(ctx, "a", vm.SaveSpec{Name: "half"}); err != nil {
				t.Fatal(err)
			}
			on.Store(false)
			r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "half", Name: "b"}))
			r.await("b", "ready", ready)
			r.must(r.Restore(ctx, "a", "half"))
			r.await("a", "ready", ready)
			r.clearAll("base", "half")
		})
	}
}

// meanwhile waits a while for what must not happen now: the clone a gets its identity, or its memory is captured.
func (r *rig) meanwhile(itself bool, captured <-chan struct{}) {
	limit, tick := time.After(100*time.Millisecond), time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-limit:
			return
		case <-captured:
			return
		case <-tick.C:
			if rec, err := r.Inspect(r.t.Context(), "a"); itself && err == nil && rec.Resume == nil {
				return
			}
		}
	}
}

package engine_test

import (
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// TestGuestWithWrongClock: a clock that runs too fast is set and recorded, until it is right or the VM ends.
func TestGuestWithWrongClock(t *testing.T) {
	r := newRig(t, func(r *rig) { r.cfg.Silence = 100 * time.Millisecond })
	rec := r.must(r.Launch(t.Context(), spec("web")))
	r.await("web", "ready", ready)
	g := r.world.Guest(rec.ID)
	wrong := func(rec vm.Record) bool { return rec.Reason == vm.ReasonClockWrong }
	right := func(rec vm.Record) bool { return rec.Reason == "" }
	g.Clock(1000)
	if rec := r.await("web", "known to have a wrong clock", wrong); !strings.Contains(rec.Message, "restart the VM") {
		t.Errorf("message %q", rec.Message)
	}
	if g.ClockSets() == 0 {
		t.Error("the clock was not set")
	}
	g.Clock(1)
	if rec := r.await("web", "right again", right); rec.Message != "" {
		t.Errorf("message %q", rec.Message)
	}
	sets := g.ClockSets()
	g.Clock(1000)
	r.await("web", "wrong again", wrong)
	if g.ClockSets() == sets {
		t.Error("the clock was not set again")
	}
	if rec := r.must(r.Stop(t.Context(), "web", time.Second)); rec.Reason == vm.ReasonClockWrong || rec.Message != "" {
		t.Errorf("stopped: %s, %q", rec.Reason, rec.Message)
	}
}

// TestCloudImageWithWrongClock: the agent of the image tells the time, and sets it.
func TestCloudImageWithWrongClock(t *testing.T) {
	r := newRig(t, func(r *rig) { r.cfg.Silence = 100 * time.Millisecond })
	rec := r.must(r.Launch(t.Context(), cloud()))
	r.await("web", "ready", ready)
	g := r.world.Guest(rec.ID)
	g.Clock(1000)
	r.await("web", "known to have a wrong clock", func(rec vm.Record) bool { return rec.Reason == vm.ReasonClockWrong })
	if g.ClockSets() == 0 {
		t.Error("the clock was not set")
	}
	g.Clock(1)
	r.await("web", "right again", func(rec vm.Record) bool { return rec.Reason == "" })
}

package engine_test

import (
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestReboot: the guest starts again in its process, by its agent, by ACPI and by a reset, and its agent is found again. A stop after it
// is a stop.
func TestReboot(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	for _, hard := range []bool{false, true} {
		_, err := r.Reboot(ctx, "web", hard)
		wantClass(t, "of no VM", err, errdefs.NotFound)
	}
	r.must(r.Launch(ctx, cloud()))
	was := r.await("web", "ready", ready)
	g := r.world.Guest(was.ID)
	for i, c := range []struct {
		hard bool
		with func() // before it
	}{
		{false, func() {}}, // by the agent
		{true, func() {}},
		{false, g.Drop}, // by the agent or by ACPI: its session may be lost
	} {
		c.with()
		r.must(r.Reboot(ctx, "web", c.hard))
		r.eventually("the guest has started again", func() bool { return g.Resets() == i+1 })
		r.eventually("its agent answers", func() bool {
			_, err := r.Stats(ctx, "web")
			return err == nil
		})
		if now := r.must(r.Inspect(ctx, "web")); now.PID != was.PID || now.State != vm.StateRunning || now.Restarts != was.Restarts || !now.StartedAt.Equal(was.StartedAt) {
			t.Errorf("%d: it is %+v", i, now)
		}
	}

	// A guest that ignores the request goes on. When it is stopped later, it does not start again.
	g.ACPI, g.Stubborn = false, true
	r.must(r.Reboot(ctx, "web", false))
	g.ACPI, g.Stubborn = true, false
	if now := r.must(r.Stop(ctx, "web", time.Minute)); now.State != vm.StateStopped || now.Reason != vm.ReasonStopped || g.Resets() != 3 {
		t.Errorf("stopped after it ignored a reboot: %+v, %d resets", now, g.Resets())
	}
	_, err := r.Reboot(ctx, "web", true)
	wantClass(t, "of a VM that does not run", err, errdefs.FailedPrecondition)
}

func TestRebootRefused(t *testing.T) {
	r, fail := failing(t)
	ctx := t.Context()
	r.must(r.Launch(ctx, spec("web")))
	r.await("web", "ready", ready)
	_, err := r.Reboot(ctx, "web", false)
	wantClass(t, "of the guest of a container image", err, errdefs.Unsupported)
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	was := r.must(r.Launch(ctx, cloud()))
	r.must(r.Pause(ctx, "web"))
	for _, hard := range []bool{false, true} {
		_, err := r.Reboot(ctx, "web", hard)
		wantClass(t, "of a paused VM", err, errdefs.FailedPrecondition)
	}
	r.must(r.Unpause(ctx, "web"))
	r.await("web", "ready", ready)
	fail("driver.Shutdown", "agent.Poweroff")
	_, err = r.Reboot(ctx, "web", false)
	wantClass(t, "that cannot be asked for", err, errdefs.Unavailable)
	fail()
	if now := r.must(r.Stop(ctx, "web", time.Minute)); now.State != vm.StateStopped || r.world.Guest(was.ID).Resets() != 0 {
		t.Errorf("it started again after a reboot that failed: %+v", now)
	}
}

package engine

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// opReboot is the name of the operation in messages. The journal has nothing of it: the process stays, and the record is the same
// before and after it.
const opReboot = "reboot"

// rebootLimit is how long after a request to reboot a guest that powers itself off starts again. After that, it ends.
const rebootLimit = 5 * time.Minute

// Reboot starts the guest of a running VM again, in the same process, with its disks and addresses. It returns when that has begun. The
// guest shuts down in order first, by its agent or ACPI; if it does not within rebootLimit, it goes on. With hard it is reset at once,
// which loses what it has not written. If the engine ends while the guest shuts down, the VM stops instead.
// Errors: NotFound, FailedPrecondition when the VM does not run or is paused, Unsupported for the guest of a container image, which ends
// when it resets, and by its driver.
func (e *Engine) Reboot(caller context.Context, ref string, hard bool) (vm.Record, error) {
	return e.operate(caller, opReboot, ref, func(m *machine, ctx context.Context) (vm.Record, error) { return m.reboot(ctx, hard) })
}

func (m *machine) reboot(ctx context.Context, hard bool) (vm.Record, error) {
	r := m.record()
	run := m.run.Load()
	switch {
	case r.State != vm.StateRunning:
		return r, errdefs.Preconditionf("it does not run (%s); start it first", r.State)
	case run == nil || run.Over():
		return r, errdefs.Preconditionf("its process has just ended; start it first")
	case r.ImageType == vm.ImageOCI:
		return r, errdefs.Unsupportedf("the guest of a container image ends when it resets; restart the VM")
	}
	if err := awake(r); err != nil {
		return r, err
	}
	resetter, ok := hypervisor.As[hypervisor.Resetter](run.Inst)
	if !ok {
		return r, errdefs.Unsupportedf("driver %s cannot reset a guest; restart the VM", r.Driver)
	}
	agent, ready, _ := run.link.Peek()
	if hard {
		err := resetter.Reset(ctx)
		if err == nil && agent != nil { // nothing answers in this session any more; another one begins when the guest has booted
			_ = agent.Close()
		}
		return r, err
	}
	if err := resetter.ResetOnPoweroff(ctx, time.Now().Add(rebootLimit)); err != nil {
		return r, err
	}
	if ready && agent.Poweroff(ctx, r.Spec.StopGrace) == nil {
		return r, nil
	}
	if err := run.Inst.Shutdown(ctx); err != nil {
		_ = resetter.ResetOnPoweroff(context.WithoutCancel(ctx), time.Time{}) // otherwise a later power-off is a reboot
		return r, err
	}
	return r, nil
}

// noReboot makes the guest of r end when it powers itself off, although it was asked to reboot before.
func (m *machine) noReboot(ctx context.Context, r *run) {
	resetter, ok := hypervisor.As[hypervisor.Resetter](r.Inst)
	if !ok || m.record().ImageType == vm.ImageOCI {
		return
	}
	if err := resetter.ResetOnPoweroff(ctx, time.Time{}); err != nil && !errdefs.Is(err, errdefs.Unsupported) {
		m.log.Debug("reboot of guest not cancelled", "vm", m.id, "err", err)
	}
}

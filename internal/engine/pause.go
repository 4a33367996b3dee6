package engine

import (
	"context"
	"errors"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Names of the operations in messages. The journal has no intent for them. The engine writes the wanted state into the record first, and
// then pauses or resumes the guest. Recovery does the same again; see settlePause.
const (
	opPause   = "pause"
	opUnpause = "unpause"
)

// Pause stops the CPUs of a running VM's guest until Unpause, over restarts of the engine. Its memory, disks and addresses stay.
// Calls into a paused guest are refused, and it is neither saved nor counted as silent. Pausing a paused VM is no error.
// Errors: NotFound, FailedPrecondition when the VM does not run, Unsupported by its driver. After an error the guest runs.
func (e *Engine) Pause(caller context.Context, ref string) (vm.Record, error) {
	return e.operate(caller, opPause, ref, (*machine).pause)
}

// Unpause resumes the guest of a paused VM. A guest that was started paused boots. Unpausing a VM that is not paused is no error.
// Errors: as for Pause. After an error the guest is paused.
func (e *Engine) Unpause(caller context.Context, ref string) (vm.Record, error) {
	return e.operate(caller, opUnpause, ref, (*machine).unpause)
}

func (m *machine) pause(ctx context.Context) (vm.Record, error) {
	r := m.record()
	run, pauser, err := m.pauser()
	if err != nil || r.Paused != "" {
		return r, err
	}
	if r, err = m.update(ctx, func(r *vm.Record) { r.Paused = vm.PausedOnRequest }); err != nil {
		return r, err
	}
	run.Held.Store(true)
	if err := pauser.Pause(ctx); err != nil {
		return m.record(), errors.Join(err, m.unpauseAfter(ctx, run, pauser))
	}
	return r, nil
}

// unpauseAfter makes the guest run after an attempt to pause it has failed, which it may have reached nevertheless.
func (m *machine) unpauseAfter(ctx context.Context, run *run, pauser hypervisor.Pauser) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
	defer cancel()
	if _, err := m.update(ctx, func(r *vm.Record) { r.Paused = "" }); err != nil {
		return err
	}
	run.Held.Store(false)
	if err := pauser.Resume(ctx); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return nil
}

func (m *machine) unpause(ctx context.Context) (vm.Record, error) {
	r := m.record()
	run, pauser, err := m.pauser()
	if err != nil || r.Paused == "" {
		return r, err
	}
	was := r.Paused
	if r, err = m.update(ctx, func(r *vm.Record) { r.Paused = "" }); err != nil {
		return r, err
	}
	if err := pauser.Resume(ctx); err != nil {
		if run.Over() || errdefs.IsNotFound(err) {
			return r, errdefs.Preconditionf("its process has ended")
		}
		if _, failed := m.update(ctx, func(r *vm.Record) { r.Paused = was }); failed != nil { // the next recovery resumes it
			err = errors.Join(err, failed)
		}
		return m.record(), err
	}
	run.Held.Store(false)
	if was == vm.PausedOnRequest { // its clock stood still
		m.life.spawn(func(ctx context.Context) { run.link.SetClock(ctx) })
	}
	return r, nil
}

// pauser returns the process of m and its ability to pause.
func (m *machine) pauser() (*run, hypervisor.Pauser, error) {
	r := m.record()
	if r.State != vm.StateRunning {
		return nil, nil, errdefs.Preconditionf("it does not run (%s); start it first", r.State)
	}
	run := m.run.Load()
	if run == nil || run.Over() {
		return nil, nil, errdefs.Preconditionf("its process has just ended; start it first")
	}
	pauser, ok := hypervisor.As[hypervisor.Pauser](run.Inst)
	if !ok {
		return nil, nil, errdefs.Unsupportedf("driver %s cannot pause a guest", r.Driver)
	}
	return run, pauser, nil
}

// settlePause makes the guest of an adopted process run, or not, as the record says. An earlier engine may have been killed between
// the record and the guest, or while it saved the guest.
func (m *machine) settlePause(ctx context.Context, run *run) error {
	if m.record().Paused == "" {
		return run.Unpause(ctx)
	}
	return run.Pause(ctx)
}

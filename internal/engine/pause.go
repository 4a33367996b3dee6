package engine

import (
	"context"
	"errors"
	"time"

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
		return m.record(), errors.Join(err, m.unpauseAfter(context.WithoutCancel(ctx), run))
	}
	return r, nil
}

// unpauseAfter makes the guest run after an attempt to pause it has failed, which it may have reached nevertheless.
func (m *machine) unpauseAfter(ctx context.Context, run *run) error {
	if _, err := m.update(ctx, func(r *vm.Record) { r.Paused = "" }); err != nil {
		return err
	}
	return m.settlePause(ctx, run)
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
	// The caller may go away: then nobody would know whether the guest runs.
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
	defer cancel()
	if err := pauser.Resume(limited); err != nil {
		if run.Over() || errdefs.IsNotFound(err) {
			return r, errdefs.Preconditionf("its process has ended")
		}
		if _, failed := m.update(ctx, func(r *vm.Record) { r.Paused = was }); failed != nil { // the next recovery resumes it
			return m.record(), errors.Join(err, failed)
		}
		return m.record(), errors.Join(err, m.settlePause(context.WithoutCancel(ctx), run)) // it may run nevertheless
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

// settlePause makes the guest of a process run, or not, as the record says: an earlier engine may have been killed between the record and
// the guest, or while it saved the guest, and a save may have failed before it let the guest go on. If the process does not answer, which a guest can
// bring about, a worker does it later: no other VM, and no other operation on this one, waits for that.
func (m *machine) settlePause(ctx context.Context, run *run) error {
	late, err := m.settleNow(ctx, run)
	if !late {
		return err
	}
	m.log.Warn("hypervisor does not answer, its guest is paused or resumed later", "vm", m.id, "err", err)
	run.Held.Store(true)
	if !run.settling.Swap(true) {
		m.life.spawn(func(ctx context.Context) { m.settleLater(ctx, run) })
	}
	return nil
}

// settleNow is settlePause without the worker. It reports whether the process has not answered: it may be busy with an earlier request, and then accepts no
// further one when the queue of its socket is full.
func (m *machine) settleNow(ctx context.Context, run *run) (late bool, err error) {
	limited, cancel := context.WithTimeout(ctx, m.cfg.AnswerTimeout)
	defer cancel()
	paused := m.record().Paused != ""
	if paused {
		err = run.Pause(limited)
	} else {
		err = run.Unpause(limited)
	}
	late = err != nil && ctx.Err() == nil && (errdefs.IsUnavailable(err) || limited.Err() != nil)
	if !late {
		run.Held.Store(paused)
	}
	return late, err
}

// settleLater tries settlePause until the process answers or has ended.
func (m *machine) settleLater(ctx context.Context, run *run) {
	tick := time.NewTicker(m.cfg.AnswerTimeout)
	defer tick.Stop()
	for late := true; late; {
		select {
		case <-tick.C:
		case <-run.Ended():
			return
		case <-ctx.Done():
			return
		}
		release, err := m.vms.queue.Lock(ctx, m.id)
		if err != nil {
			return
		}
		late, err = m.settleNow(ctx, run)
		run.settling.Store(late)
		release()
		switch {
		case late:
		case err != nil:
			m.log.Error("guest not paused or resumed", "vm", m.id, "err", err)
		default:
			m.log.Info("hypervisor answers again", "vm", m.id)
		}
	}
}

package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Wake makes a hibernated VM go on. Waking one that runs is no error. When it fails the VM is hibernated still and can be
// woken again. It returns, and its snapshot goes, when the guest has answered, or has run for a while if it has no agent.
// Errors: FailedPrecondition (not hibernated, another kind of machine), DataLoss (its snapshot is gone or damaged).
func (e *Engine) Wake(caller context.Context, ref string) (vm.Record, error) {
	return e.operate(caller, opWake, ref, e.wake)
}

func (e *Engine) wake(ctx context.Context, m *machine) (vm.Record, error) {
	r := m.record()
	switch r.State {
	case vm.StateRunning:
		return r, nil
	case vm.StateHibernated:
	case vm.StateError:
		return r, broken(r)
	default:
		return r, errdefs.Preconditionf("it is not hibernated (%s); start it", r.State)
	}
	store, err := e.store()
	if err != nil {
		return r, err
	}
	h, err := store.Hold(ctx, r.Snapshot)
	if errdefs.IsNotFound(err) {
		return r, errdefs.DataLossf("the snapshot %s with its memory is gone; bring it back, or remove the VM", r.Snapshot)
	}
	if err != nil {
		return e.unusable(ctx, m, err)
	}
	defer h.Release()
	if err := h.Verify(ctx); err != nil {
		return e.unusable(ctx, m, err)
	}
	accel, err := e.resumable(ctx, h.Snapshot(), r.Spec.Accel)
	if err != nil {
		return r, err
	}
	if err := e.open(ctx, m, opWake, stepLaunch, snapshotArgs{Snapshot: r.Snapshot}.json()); err != nil {
		return r, err
	}
	var back undo.Stack
	if _, err := e.resumeSleeping(ctx, m, h, accel, &back); err != nil {
		return e.undoWake(ctx, m, r, &back, damaged(h.Snapshot(), err))
	}
	return e.settleWoken(ctx, m, h, r)
}

// settleWoken waits for the guest of m, which has just gone on from h, and settles: it is awake, and what it slept in goes; or it
// is as it was, was, again.
func (e *Engine) settleWoken(ctx context.Context, m *machine, h snapshot.Held, was vm.Record) (vm.Record, error) {
	ctx = context.WithoutCancel(ctx) // whoever asked may go: it is awake or asleep in the end
	if err := e.proven(m, h.Snapshot()); err != nil {
		if e.life.serving.Err() != nil {
			return m.record(), err // the next daemon goes on waiting
		}
		if err := e.endUnproven(ctx, m); err != nil {
			e.fail(ctx, m, vm.ReasonWakeFailed, err)
			return m.record(), err
		}
		return e.undoWake(ctx, m, was, &undo.Stack{}, err)
	}
	h.Release()
	if err := e.conclude(ctx, m, was.Snapshot); err != nil {
		return m.record(), err
	}
	e.shorten(ctx, m)
	return m.record(), nil
}

// conclude removes what m, whose guest has gone on and answered, was before: the snapshot id that it was hibernated in, ""
// for none, and files in its folder; and settles. What the journal does not take the next operation or recovery does.
func (e *Engine) conclude(ctx context.Context, m *machine, id string, files ...string) error {
	settled := false
	if _, err := e.commit(ctx, m, e.step(stepClean), func(*vm.Record) {}); err != nil {
		// It is settled first then: a crash before the rest leaves something behind, and loses nothing.
		if _, err := e.commit(ctx, m, e.journal.Settle, func(*vm.Record) {}); err != nil {
			e.log.Error("vm has gone on, and the journal does not take it", "vm", m.id, "err", err)
			return nil
		}
		settled = true
	}
	if err := e.durable(ctx); err != nil { // until then what it was may be what it is
		return err
	}
	e.tidy(m, files...)
	e.dropSlept(ctx, m, id)
	if !settled {
		e.settleGone(ctx, m)
	}
	return nil
}

// settleGone settles the operation of m, which has gone on and says so in its record. What is left to do when the journal does
// not take it the next operation or recovery does.
func (e *Engine) settleGone(ctx context.Context, m *machine) {
	if _, err := e.commit(ctx, m, e.journal.Settle, func(*vm.Record) {}); err != nil {
		e.log.Error("vm runs again, and its operation is not settled", "vm", m.id, "err", err)
	}
}

// damaged says of err, when it is that the files of x are damaged, what is to be done.
func damaged(x snapshot.Snapshot, err error) error {
	if !errdefs.Is(err, errdefs.DataLoss) {
		return err
	}
	return fmt.Errorf("snapshot %s is damaged: %w; it is kept: bring another copy of it, from a registry or a backup, or go on from another snapshot", x.Name, err)
}

// unusable writes down that m cannot be woken because of err, when that is for good, and leaves it as it is.
func (e *Engine) unusable(ctx context.Context, m *machine, err error) (vm.Record, error) {
	r := m.record()
	if !errdefs.Is(err, errdefs.DataLoss) {
		return r, err
	}
	if x, known := e.snapshots.Get(ctx, r.Snapshot); known == nil {
		err = damaged(x, err)
	}
	if _, failed := e.commit(ctx, m, e.journal.Update, func(r *vm.Record) { r.Reason, r.Message = vm.ReasonDataLoss, err.Error() }); failed != nil {
		e.log.Error("damage of the saved state not recorded", "vm", m.id, "err", failed)
	}
	return m.record(), err
}

// resumeSleeping has m go on from h. Nothing is written to the journal before the process runs: until then the VM is hibernated.
func (e *Engine) resumeSleeping(ctx context.Context, m *machine, h snapshot.Held, accel vm.Accel, back *undo.Stack) (vm.Record, error) {
	r := m.record()
	if err := e.makeDirs(m.id); err != nil { // the runtime folder is gone after a reboot of the host
		return r, err
	}
	nics, err := e.attach(ctx, r, back, false)
	if err != nil {
		return r, err
	}
	// An attempt that failed may have let the guest write: each begins with overlays of its own.
	disks, _, err := e.overlaysOn(ctx, m)
	if err != nil {
		return r, err
	}
	known := macsOf(r.NICs)
	r.NICs, r.Disks, r.Spec.Accel = nics, disks, accel
	if r.Resume == nil || !r.Resume.Clone { // a clone that has not been told who it is must still be
		r.Resume = &vm.Resume{Fresh: h.Snapshot().Fresh}
		if r.ImageType == vm.ImageOCI && !slices.Equal(macsOf(nics), known) { // others decide, and the host was restarted
			r.Resume.Clone, r.Resume.MACs, r.Cloned = true, known, true
		}
	}
	incoming := incomingOf(h)
	incoming.Alone, incoming.LinksDown, incoming.Grown = true, !r.Itself(), grown(r)
	startedAt, restarts := r.StartedAt, r.Restarts
	return e.launchProcess(ctx, m, r, launchOptions{
		ready: e.syncing(m.id, disks), incoming: incoming, log: m.log.Resume, done: e.step(stepAnswer),
		change: func(to *vm.Record) {
			to.NICs, to.Disks, to.Resume, to.Cloned, to.Snapshot = r.NICs, r.Disks, r.Resume, r.Cloned, ""
			to.StartedAt, to.Restarts = startedAt, restarts // to the guest it has not been away
		},
	}, back)
}

func macsOf(nics []vm.NIC) (macs []string) {
	for _, n := range nics {
		macs = append(macs, n.MAC)
	}
	return macs
}

// undoWake leaves m hibernated, as was, after an attempt to wake it that failed with cause.
func (e *Engine) undoWake(ctx context.Context, m *machine, was vm.Record, back *undo.Stack, cause error) (vm.Record, error) {
	if err := back.Run(ctx); err != nil {
		cause = errors.Join(cause, fmt.Errorf("undo: %w", err))
	}
	change := func(r *vm.Record) {
		r.State, r.Snapshot, r.Disks, r.Resume, r.Cloned = was.State, was.Snapshot, was.Disks, was.Resume, was.Cloned
		r.Containers, r.ExitCode = was.Containers, was.ExitCode
		r.Handle, r.PID, r.AgentReady, r.Reason, r.Message = nil, 0, false, vm.ReasonWakeFailed, cause.Error()
		if errdefs.Is(cause, errdefs.DataLoss) {
			r.Reason = vm.ReasonDataLoss
		}
	}
	if _, err := e.commit(ctx, m, e.journal.Settle, change); err != nil {
		e.log.Error("vm hibernated still, and the journal does not take it", "vm", m.id, "err", err)
		e.assume(m, change)
	}
	e.tidy(m)
	return m.record(), cause
}

// cleanUp removes the snapshot that m was hibernated in, now that it runs, and settles.
func (e *Engine) cleanUp(ctx context.Context, m *machine, id string) error {
	if err := e.durable(ctx); err != nil { // until then the snapshot may be what the VM is
		return err
	}
	e.dropSlept(ctx, m, id)
	e.settleGone(ctx, m)
	return nil
}

// dropSlept removes the snapshot id that m was hibernated in, "" for none.
func (e *Engine) dropSlept(ctx context.Context, m *machine, id string) {
	if id == "" {
		return
	}
	if err := e.removeStored(context.WithoutCancel(ctx), id); err != nil && !errdefs.IsNotFound(err) {
		e.log.Warn("snapshot of a vm that runs again not removed", "vm", m.id, "snapshot", id, "err", err)
	}
}

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

// Wake resumes a hibernated VM. Waking a running VM is no error. If it fails, the VM stays hibernated and can be
// woken again. Wake returns, and removes the snapshot, when the guest has answered, or has run for a while if it has
// no agent.
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

// settleWoken waits for the guest of m, which has just resumed from h, and settles the operation. Either the VM runs
// and its snapshot is removed, or it is again as its earlier record was.
func (e *Engine) settleWoken(ctx context.Context, m *machine, h snapshot.Held, was vm.Record) (vm.Record, error) {
	ctx = context.WithoutCancel(ctx) // the caller may go away: the VM is awake or hibernated in the end
	if err := e.proven(m, h.Snapshot()); err != nil {
		if e.life.serving.Err() != nil {
			return m.record(), err // the next daemon continues to wait
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

// conclude removes the earlier state of m, whose guest has resumed and answered: the snapshot id that it was
// hibernated in ("" for none) and files in its folder. It then settles. If the journal fails, the next operation or
// recovery does it.
func (e *Engine) conclude(ctx context.Context, m *machine, id string, files ...string) error {
	settled := false
	if _, err := e.commit(ctx, m, e.step(stepClean), func(*vm.Record) {}); err != nil {
		// Then it is settled first: a crash before the rest leaves something behind, but loses nothing.
		if _, err := e.commit(ctx, m, e.journal.Settle, func(*vm.Record) {}); err != nil {
			e.log.Error("vm has gone on, and the journal does not take it", "vm", m.id, "err", err)
			return nil
		}
		settled = true
	}
	if err := e.durable(ctx); err != nil { // until then, the VM may still be in its earlier state after a power cut
		return err
	}
	e.tidy(m, files...)
	e.dropSlept(ctx, m, id)
	if !settled {
		e.settleGone(ctx, m)
	}
	return nil
}

// settleGone settles the operation of m, which has resumed and whose record says so. If the journal fails, the next
// operation or recovery does what is left.
func (e *Engine) settleGone(ctx context.Context, m *machine) {
	if _, err := e.commit(ctx, m, e.journal.Settle, func(*vm.Record) {}); err != nil {
		e.log.Error("vm runs again, and its operation is not settled", "vm", m.id, "err", err)
	}
}

// damaged adds to err what to do, if err says that the files of x are damaged.
func damaged(x snapshot.Snapshot, err error) error {
	if !errdefs.Is(err, errdefs.DataLoss) {
		return err
	}
	return fmt.Errorf("snapshot %s is damaged: %w; it is kept: bring another copy of it, from a registry or a backup, or go on from another snapshot", x.Name, err)
}

// unusable records that m cannot be woken because of err, if that is permanent. It changes nothing else.
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

// resumeSleeping resumes m from h. It writes nothing to the journal before the process runs: until then the VM is
// hibernated.
func (e *Engine) resumeSleeping(ctx context.Context, m *machine, h snapshot.Held, accel vm.Accel, back *undo.Stack) (vm.Record, error) {
	r := m.record()
	if err := e.makeDirs(m.id); err != nil { // a reboot of the host removes the runtime folder
		return r, err
	}
	nics, err := e.attach(ctx, r, back, false)
	if err != nil {
		return r, err
	}
	// A failed attempt may have let the guest write, so each attempt begins with its own overlays.
	disks, _, err := e.overlaysOn(ctx, m)
	if err != nil {
		return r, err
	}
	known := macsOf(r.NICs)
	r.NICs, r.Disks, r.Spec.Accel = nics, disks, accel
	if r.Resume == nil || !r.Resume.Clone { // a clone that has not received its identity remains a clone
		r.Resume = &vm.Resume{Fresh: h.Snapshot().Fresh}
		if r.ImageType == vm.ImageOCI && !slices.Equal(macsOf(nics), known) { // the network chose other MACs after a host restart
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
			to.StartedAt, to.Restarts = startedAt, restarts // for the guest there was no interruption
		},
	}, back)
}

func macsOf(nics []vm.NIC) (macs []string) {
	for _, n := range nics {
		macs = append(macs, n.MAC)
	}
	return macs
}

// undoWake leaves m hibernated, as its earlier record was, after an attempt to wake it failed with cause.
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

// cleanUp removes the snapshot that m was hibernated in, now that it runs, and settles the operation.
func (e *Engine) cleanUp(ctx context.Context, m *machine, id string) error {
	if err := e.durable(ctx); err != nil { // until then, the VM may still be in the snapshot after a power cut
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

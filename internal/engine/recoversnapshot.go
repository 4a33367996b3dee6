package engine

import (
	"context"
	"encoding/json"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// argsOfSnapshot returns the arguments of an unfinished operation with a snapshot.
func argsOfSnapshot(in journal.Intent) (snapshotArgs, error) {
	var args snapshotArgs
	if err := json.Unmarshal(in.Args, &args); err != nil || args.Snapshot == "" {
		return args, errdefs.DataLossf("the arguments of its unfinished %s are damaged", in.Op)
	}
	return args, nil
}

// committed reports whether a snapshot of m exists; its commit is one atomic change. A snapshot of another VM is an
// error: it does not belong to m, whatever the journal says.
func (e *Engine) committed(ctx context.Context, m *machine, id string) (bool, error) {
	store, err := e.store()
	if err != nil {
		return false, err
	}
	x, err := store.Get(ctx, id)
	switch {
	case errdefs.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, err
	case x.Source.VMID != m.id:
		return false, errdefs.DataLossf("the journal is damaged: snapshot %s is not of this VM", id)
	}
	return true, nil
}

// recoverSave ends an interrupted save: the snapshot exists or not, and the guest continues in either case.
func (e *Engine) recoverSave(ctx context.Context, m *machine, in journal.Intent) error {
	args, err := argsOfSnapshot(in)
	if err != nil {
		return err
	}
	if err := e.adopt(ctx, m); err != nil {
		return err
	}
	there, err := e.committed(ctx, m, args.Snapshot)
	if err != nil {
		return err
	}
	_, err = e.commit(ctx, m, e.journal.Settle, func(r *vm.Record) {
		if there {
			listed(r, args.Snapshot)
		}
	})
	e.tidy(m)
	return err
}

// unpause resumes the guest of m if it was paused for a save or for merging layers. A process that has ended is no
// error.
func (e *Engine) unpause(ctx context.Context, m *machine) error {
	run := m.run.Load()
	if run == nil {
		return nil
	}
	if w, ok := hypervisor.As[hypervisor.DiskWatcher](run.inst); ok {
		if fault, _, err := w.DiskFault(ctx); err == nil && fault != nil && fault.Stands {
			return nil // the engine did not pause it: it resumes when its disks have room
		}
	}
	state, err := run.inst.State(ctx)
	if err == nil && state == hypervisor.Paused {
		pauser, ok := hypervisor.As[hypervisor.Pauser](run.inst)
		if !ok {
			return errdefs.Unsupportedf("its guest is paused, and driver %s cannot have it go on", m.record().Driver)
		}
		err = pauser.Resume(ctx)
	}
	if errdefs.IsNotFound(err) || run.over() {
		return nil
	}
	return err
}

// recoverHibernate finishes a hibernation whose snapshot exists, and otherwise lets the guest continue.
func (e *Engine) recoverHibernate(ctx context.Context, m *machine, in journal.Intent) error {
	args, err := argsOfSnapshot(in)
	if err != nil {
		return err
	}
	there, err := e.committed(ctx, m, args.Snapshot)
	if err != nil {
		return err
	}
	if there && in.Step != stepUndo {
		if err := e.reattach(ctx, m); err != nil {
			return err
		}
		if run := m.run.Load(); run != nil {
			if err := e.endHeld(ctx, m, run); err != nil {
				return err
			}
		}
		if err := e.reap(ctx, m.record()); err != nil {
			return err
		}
		if err := e.detach(ctx, m.record().NICs, false); err != nil {
			return err
		}
		_, err := e.recordHibernated(ctx, m, args.Snapshot, below(m.record().Disks))
		return err
	}
	if err := e.adopt(ctx, m); err != nil {
		return err
	}
	if there {
		if err := e.removeStored(ctx, args.Snapshot); err != nil {
			e.log.Warn("snapshot of a hibernation that failed not removed", "vm", m.id, "snapshot", args.Snapshot, "err", err)
		}
	}
	_, err = e.commit(ctx, m, e.journal.Settle, func(*vm.Record) {})
	e.tidy(m)
	return err
}

// recoverWake finishes waking a VM whose process is on record and runs. It uses a worker if the guest has not
// answered yet. Any other VM is still hibernated.
func (e *Engine) recoverWake(ctx context.Context, m *machine, in journal.Intent, release func()) (later bool, err error) {
	args, err := argsOfSnapshot(in)
	if err != nil {
		return false, err
	}
	r := m.record()
	if err := e.reattach(ctx, m); err != nil {
		return false, err
	}
	there, err := e.committed(ctx, m, args.Snapshot)
	if m.run.Load() != nil {
		if err := e.unpause(ctx, m); err != nil {
			return false, err
		}
		if err == nil && in.Step == stepAnswer && there {
			return true, e.recoverAnswer(ctx, m, args, release)
		}
		slept := args.Snapshot
		if err != nil {
			e.log.Warn("snapshot of a vm that runs again not removed", "vm", m.id, "snapshot", slept, "err", err)
			slept = ""
		}
		err := e.cleanUp(ctx, m, slept)
		e.tidy(m)
		return false, err
	}
	if err != nil {
		return false, err
	}
	if len(r.Handle) > 0 && (in.Step == stepClean || r.AgentReady || !there) { // it was awake and has ended
		return false, e.settle(ctx, m, e.adopt(ctx, m))
	}
	return false, e.recoverHibernated(ctx, m, args)
}

// recoverAnswer waits, in a worker, for the guest of a VM that was being woken.
func (e *Engine) recoverAnswer(ctx context.Context, m *machine, args snapshotArgs, release func()) error {
	h, err := e.snapshots.Hold(ctx, args.Snapshot)
	if err != nil {
		release()
		return err
	}
	was := m.record()
	was.State, was.Snapshot, was.Disks = vm.StateHibernated, args.Snapshot, below(was.Disks)
	e.life.spawn(func(ctx context.Context) {
		defer release()
		defer h.Release()
		if _, err := e.settleWoken(ctx, m, h, was); err != nil && e.life.serving.Err() == nil {
			e.log.Error("unfinished operation not finished", "vm", m.id, "op", opWake, "err", err)
		}
	})
	return nil
}

// recoverHibernated records that m, which has no process, is hibernated as before an attempt to wake it.
func (e *Engine) recoverHibernated(ctx context.Context, m *machine, args snapshotArgs) error {
	r := m.record()
	if err := e.reap(ctx, r); err != nil {
		return err
	}
	nics, err := e.nicsOf(ctx, r, true)
	if err != nil {
		return err
	}
	if err := e.detach(ctx, nics, false); err != nil {
		return err
	}
	_, err = e.commit(ctx, m, e.journal.Settle, func(to *vm.Record) {
		if len(r.Handle) > 0 {
			to.Disks = below(r.Disks)
		}
		to.State, to.Snapshot, to.Handle, to.PID, to.AgentReady = vm.StateHibernated, args.Snapshot, nil, 0, false
		to.Reason, to.Message = vm.ReasonWakeFailed, "waking it was cut off when cocoond ended; wake it again"
	})
	e.tidy(m)
	return err
}

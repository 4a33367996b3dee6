package engine

import (
	"context"
	"encoding/json"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// argsOfSnapshot are the arguments of an unfinished operation with a snapshot.
func argsOfSnapshot(in journal.Intent) (snapshotArgs, error) {
	var args snapshotArgs
	if err := json.Unmarshal(in.Args, &args); err != nil || args.Snapshot == "" {
		return args, errdefs.DataLossf("the arguments of its unfinished %s are damaged", in.Op)
	}
	return args, nil
}

// committed reports whether a snapshot is there: its commit is one atomic change.
func (e *Engine) committed(ctx context.Context, id string) (bool, error) {
	store, err := e.store()
	if err != nil {
		return false, err
	}
	_, err = store.Get(ctx, id)
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// recoverSave ends a save that was cut off: the snapshot is there or it is not, and the guest goes on in either case.
func (e *Engine) recoverSave(ctx context.Context, m *machine, in journal.Intent) error {
	args, err := argsOfSnapshot(in)
	if err != nil {
		return err
	}
	if err := e.adopt(ctx, m); err != nil {
		return err
	}
	if err := e.unpause(ctx, m); err != nil {
		return err
	}
	there, err := e.committed(ctx, args.Snapshot)
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

// unpause has the guest of m go on if it has one that was stopped for a save. A process that has ended is no error.
func (e *Engine) unpause(ctx context.Context, m *machine) error {
	run := m.run.Load()
	if run == nil {
		return nil
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

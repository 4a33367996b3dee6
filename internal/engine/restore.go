package engine

import (
	"context"
	"errors"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Restore returns the VM of ref, running or not, to a snapshot that was taken of it: to its memory or, if it has
// none, to its disks, which the VM boots. Changes since the snapshot are lost. The old disks are removed when the
// guest has answered, or has run for a while if it has no agent.
// Errors: NotFound, FailedPrecondition (a snapshot of another VM, another kind of machine) before anything changes.
// If it fails after the process was ended, the VM is stopped, or hibernated as before, and has its earlier disks.
func (e *Engine) Restore(caller context.Context, ref, snap string) (vm.Record, error) {
	return e.operate(caller, opRestore, ref, func(ctx context.Context, m *machine) (vm.Record, error) {
		return e.restore(ctx, m, snap)
	})
}

func (e *Engine) restore(ctx context.Context, m *machine, snap string) (vm.Record, error) {
	r := m.record()
	store, err := e.store()
	if err != nil {
		return r, err
	}
	switch r.State {
	case vm.StateRunning, vm.StateStopped, vm.StateCreated, vm.StateHibernated:
	default:
		return r, broken(r)
	}
	h, err := store.Hold(ctx, snap)
	if err != nil {
		return r, err
	}
	defer h.Release()
	x := h.Snapshot()
	if r.State == vm.StateHibernated && r.Snapshot == x.ID { // its memory is needed only once: wake it instead
		h.Release()
		return e.wake(ctx, m)
	}
	if err := h.Verify(ctx); err != nil { // its memory is verified after the guest has ended
		return r, damaged(x, err)
	}
	images, err := e.restorable(ctx, r, x)
	if err != nil {
		return r, err
	}
	args := snapshotArgs{Snapshot: x.ID, Files: ownFiles(e.stateDir(m.id), r.Disks), Was: &r}
	if r.State == vm.StateHibernated {
		args.Slept = r.Snapshot
	}
	if err := e.open(ctx, m, opRestore, stepDisks, args.json()); err != nil {
		return r, err
	}
	disks, err := e.disksFrom(ctx, m, h, images)
	if err == nil {
		_, err = e.commit(ctx, m, e.step(stepKill), func(*vm.Record) {})
	}
	if err == nil {
		err = e.clear(ctx, m)
	}
	if err != nil {
		e.settleFailed(ctx, m, opRestore, func(r *vm.Record) {
			if r.State == vm.StateRunning && m.run.Load() == nil {
				stopped(r, ending{asked: true}, now())
			}
		})
		e.tidy(m)
		return m.record(), err
	}
	return e.restoreFrom(context.WithoutCancel(ctx), m, h, disks, args)
}

// restorable refuses a snapshot to which r cannot be restored.
func (e *Engine) restorable(ctx context.Context, r vm.Record, x snapshot.Snapshot) ([]image.Image, error) {
	if x.Source.VMID != r.ID {
		return nil, errdefs.Preconditionf("snapshot %s was not taken of this VM but of %s; clone it instead", x.Name, x.Source.VMName)
	}
	if _, err := containersIn(x, r.Spec, x.Live); err != nil {
		return nil, err
	}
	if !x.Live {
		if err := e.startable(r); err != nil {
			return nil, err
		}
	} else if _, err := e.resumable(ctx, x, r.Spec.Accel); err != nil {
		return nil, err
	}
	return e.imagesOf(vm.OnBehalf(ctx, vm.Owner{}), x) // the VM uses them already
}

// clear ends the process of m, if it has one, and records that. From here on recovery continues the restore.
func (e *Engine) clear(ctx context.Context, m *machine) error {
	run := m.run.Load()
	if run != nil {
		run.asked.Store(true)
		if err := kill(ctx, run); err != nil {
			run.asked.Store(false)
			return err
		}
	}
	e.reclaim(ctx, m, run)
	at := now()
	_, err := e.commit(ctx, m, e.step(stepLaunch), func(r *vm.Record) {
		if r.State != vm.StateHibernated {
			r.Reason, r.Message = "", ""
			stopped(r, ending{asked: true}, at)
		}
	})
	return err
}

// restoreFrom starts m, which no longer has a process, from h with the given disks, and settles in every case.
func (e *Engine) restoreFrom(ctx context.Context, m *machine, h snapshot.Held, disks []vm.Disk, args snapshotArgs) (vm.Record, error) {
	was := m.record()
	var back undo.Stack
	if _, err := e.startRestored(ctx, m, h, disks, &back); err != nil {
		return e.undoRestore(ctx, m, was, &back, damaged(h.Snapshot(), err))
	}
	return e.settleRestored(ctx, m, h.Snapshot(), was, args)
}

// settleRestored waits for the guest of m, which has just been restored to x, and settles the operation. Either the
// earlier state is removed, or m is again as its earlier record was.
func (e *Engine) settleRestored(ctx context.Context, m *machine, x snapshot.Snapshot, was vm.Record, args snapshotArgs) (vm.Record, error) {
	if args.Slept != "" { // until then, nobody may remove the snapshot that it was hibernated in
		e.settling.Store(args.Slept, true)
		defer e.settling.Delete(args.Slept)
	}
	if err := e.proven(m, x); err != nil {
		if e.life.serving.Err() != nil {
			return m.record(), err // the next daemon continues to wait
		}
		if err := e.endUnproven(ctx, m); err != nil {
			e.fail(ctx, m, vm.ReasonStartFailed, err)
			return m.record(), err
		}
		return e.undoRestore(ctx, m, was, &undo.Stack{}, err)
	}
	err := e.conclude(ctx, m, args.Slept, args.Files...)
	return m.record(), err
}

// undoRestore returns m to its earlier record was, because the restore failed with err.
func (e *Engine) undoRestore(ctx context.Context, m *machine, was vm.Record, back *undo.Stack, err error) (vm.Record, error) {
	if undone := back.Run(ctx); undone != nil {
		err = errors.Join(err, fmt.Errorf("undo: %w", undone))
	}
	change := func(r *vm.Record) {
		*r = was
		r.Reason, r.Message = vm.ReasonStartFailed, err.Error()
	}
	if _, failed := e.commit(ctx, m, e.journal.Settle, change); failed != nil {
		e.log.Error("failed operation not settled", "vm", m.id, "op", opRestore, "err", failed)
		e.assume(m, change)
	}
	e.tidy(m)
	return m.record(), err
}

// startRestored starts the process of a VM that is being restored.
func (e *Engine) startRestored(ctx context.Context, m *machine, h snapshot.Held, disks []vm.Disk, back *undo.Stack) (vm.Record, error) {
	r, live := m.record(), h.Snapshot().Live
	if !live {
		boot, err := e.boot(r.Spec, r.ImageType) // the path of the kernel may have changed
		if err != nil {
			return r, err
		}
		r.Boot = boot
	}
	if err := e.makeDirs(m.id); err != nil {
		return r, err
	}
	nics, err := e.attach(ctx, r, back, false)
	if err != nil {
		return r, err
	}
	for _, d := range r.Disks {
		if d.Role == vm.RoleCidat { // the only disk that is in no snapshot
			disks = append(disks, d)
		}
	}
	r.NICs, r.Disks, r.Resume, r.Cloned = nics, disks, nil, false
	if r.Disks, err = e.seed(ctx, r, nics); err != nil {
		return r, err
	}
	f := launchOptions{ready: e.syncing(m.id, r.Disks), log: m.log.Begin, done: e.step(stepAnswer)}
	if live {
		r.Resume = &vm.Resume{}
		for _, n := range h.Snapshot().NIC {
			r.Resume.MACs = append(r.Resume.MACs, n.MAC)
		}
		r.Resume.Clone = true
		if r.Cloned = !r.Itself(); !r.Cloned {
			r.Resume = &vm.Resume{}
		} else { // its guest had not received its identity yet
			r.Resume.MachineID = newMachineID()
		}
		r.Resume.Fresh = h.Snapshot().Fresh
		if r.Spec.Accel, err = e.resumable(ctx, h.Snapshot(), r.Spec.Accel); err != nil {
			return r, err
		}
		if r.Containers, err = containersIn(h.Snapshot(), r.Spec, true); err != nil {
			return r, err
		}
		f.log, f.incoming = e.foreignLogs(m), incomingOf(h)
		f.incoming.Alone, f.incoming.LinksDown = true, r.Cloned
	}
	f.change = func(to *vm.Record) {
		to.Boot, to.NICs, to.Disks, to.Resume, to.Cloned = r.Boot, r.NICs, r.Disks, r.Resume, r.Cloned
		if live {
			to.Containers = r.Containers
		}
		if to.Snapshot != "" && m.record().State == vm.StateHibernated {
			to.Snapshot = ""
		}
	}
	return e.launchProcess(ctx, m, r, f, back)
}

// recoverRestore recovers an interrupted restore. From the step that ends the VM's process on, it continues the
// restore in a worker. It undoes a restore that was interrupted before that step.
func (e *Engine) recoverRestore(ctx context.Context, m *machine, in journal.Intent, release func()) (later bool, err error) {
	args, err := argsOfSnapshot(in)
	if err != nil {
		return false, err
	}
	done := in.Step == stepClean || in.Step == stepAnswer && m.record().AgentReady
	if in.Step == stepAnswer && !done {
		return e.recoverRestored(ctx, m, args, release)
	}
	if in.Step == stepDisks || done {
		err := e.adopt(ctx, m)
		if err == nil && done && args.Slept != "" {
			e.dropStale(ctx, m, args.Slept)
		}
		if err == nil && done {
			e.tidy(m, args.Files...)
		}
		err = e.settle(ctx, m, err)
		e.tidy(m)
		return false, err
	}
	if err := e.reattach(ctx, m); err != nil {
		return false, err
	}
	e.life.spawn(func(ctx context.Context) {
		defer release()
		ctx, cancel := e.life.bound(ctx)
		defer cancel()
		if _, err := e.finishRestore(ctx, m, args); err != nil && e.life.serving.Err() == nil {
			e.log.Error("unfinished operation not finished", "vm", m.id, "op", in.Op, "err", err)
		}
	})
	return true, nil
}

// recoverRestored waits, in a worker, for the guest of a VM that was being restored. If the process has ended, the VM
// returns to its earlier record.
func (e *Engine) recoverRestored(ctx context.Context, m *machine, args snapshotArgs, release func()) (later bool, err error) {
	if args.Was == nil {
		return false, errdefs.DataLossf("the arguments of its unfinished restore are damaged")
	}
	was := *args.Was
	if args.Slept == "" && was.State == vm.StateRunning {
		stopped(&was, ending{asked: true}, now())
	}
	if err := e.reattach(ctx, m); err != nil {
		return false, err
	}
	x, err := e.snapshots.Get(ctx, args.Snapshot)
	if err != nil && !errdefs.IsNotFound(err) {
		return false, err
	}
	if run := m.run.Load(); run == nil {
		if err := e.reap(ctx, m.record()); err != nil {
			return false, err
		}
		e.reclaim(ctx, m, nil)
		cause := errdefs.Preconditionf("going back to snapshot %s was cut off when cocoond ended; restore it again", args.Snapshot)
		if _, err := e.undoRestore(ctx, m, was, &undo.Stack{}, cause); !errors.Is(err, cause) {
			return false, err
		}
		return false, nil
	}
	if err := e.unpause(ctx, m); err != nil {
		return false, err
	}
	e.life.spawn(func(ctx context.Context) {
		defer release()
		if _, err := e.settleRestored(ctx, m, x, was, args); err != nil && e.life.serving.Err() == nil {
			e.log.Error("unfinished operation not finished", "vm", m.id, "op", opRestore, "err", err)
		}
	})
	return true, nil
}

// finishRestore does the rest of a restore, with new disks. If it cannot, the VM keeps its earlier state.
func (e *Engine) finishRestore(ctx context.Context, m *machine, args snapshotArgs) (vm.Record, error) {
	h, disks, err := e.again(ctx, m, args)
	if err != nil {
		if e.life.serving.Err() == nil {
			e.settleFailed(ctx, m, opRestore, func(r *vm.Record) {
				if r.State != vm.StateRunning {
					r.Reason, r.Message = vm.ReasonStartFailed, err.Error()
				}
			})
			e.tidy(m)
		}
		return m.record(), err
	}
	defer h.Release()
	return e.restoreFrom(context.WithoutCancel(ctx), m, h, disks, args)
}

// again ends what is left of the process of m and creates its disks anew.
func (e *Engine) again(ctx context.Context, m *machine, args snapshotArgs) (snapshot.Held, []vm.Disk, error) {
	store, err := e.store()
	if err != nil {
		return nil, nil, err
	}
	h, err := store.Hold(ctx, args.Snapshot)
	if err != nil {
		return nil, nil, err
	}
	disks, err := e.ready(ctx, m, h)
	if err != nil {
		h.Release()
		return nil, nil, err
	}
	return h, disks, nil
}

func (e *Engine) ready(ctx context.Context, m *machine, h snapshot.Held) ([]vm.Disk, error) {
	images, err := e.restorable(ctx, m.record(), h.Snapshot())
	if err != nil {
		return nil, err
	}
	if err := e.clear(ctx, m); err != nil {
		return nil, err
	}
	if err := e.reap(ctx, m.record()); err != nil {
		return nil, err
	}
	return e.disksFrom(ctx, m, h, images)
}

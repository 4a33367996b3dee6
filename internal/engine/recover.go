package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// recoverWidth is how many VMs are recovered at a time.
const recoverWidth = 16

// recover makes the host match the journal: it finishes or undoes interrupted operations, adopts running processes,
// removes what certainly belongs to no VM, and keeps aside what is merely unknown.
func (e *Engine) recover(ctx context.Context) error {
	began := time.Now()
	for _, dir := range []string{e.cfg.StateDir, e.cfg.RunDir} {
		if err := os.MkdirAll(filepath.Join(dir, "vms"), 0o711); err != nil {
			return err
		}
	}
	records, unsettled, err := e.journal.Load(ctx)
	if err != nil {
		return err
	}
	intents := map[vm.ID]*journal.Intent{}
	for i := range unsettled {
		intents[unsettled[i].ID] = &unsettled[i]
	}
	e.remember(ctx, records)
	slots := make(chan struct{}, recoverWidth)
	var wg sync.WaitGroup
	for _, r := range records {
		if r, err = e.own(ctx, r); err != nil {
			return err
		}
		m := e.newMachine(r)
		m.remains.Store(true) // not known, so assume it
		e.index.add(m)
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			e.recoverOne(ctx, m, intents[m.id])
		})
	}
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	e.unplugDown(ctx, func(id vm.ID) bool { return intents[id] != nil }) // a VM with an intent may be starting again right now
	e.sweep(ctx)
	e.log.Info("recovered", "count", len(records), "unfinished", len(unsettled), "dur", time.Since(began))
	return ctx.Err()
}

// own gives a record from before owners existed, and the snapshots of its VM, the owner that its labels name.
func (e *Engine) own(ctx context.Context, r vm.Record) (vm.Record, error) {
	if !r.Owner.Operator() || e.cfg.OwnerOf == nil {
		return r, nil
	}
	owner := e.cfg.OwnerOf(r.Spec.Labels)
	if owner.Operator() {
		return r, nil
	}
	ids := slices.Clone(r.SnapshotIDs)
	if r.State == vm.StateHibernated {
		ids = append(ids, r.Snapshot)
	}
	for _, id := range ids {
		if e.snapshots == nil {
			break
		}
		_, err := e.snapshots.Update(ctx, id, func(x *snapshot.Snapshot) {
			if x.Source.VMID == r.ID && x.Owner.Operator() {
				x.Owner = owner
			}
		})
		if err != nil && !errdefs.IsNotFound(err) && !errdefs.Is(err, errdefs.DataLoss) {
			return r, fmt.Errorf("give snapshot %s of vm %s its owner: %w", id, r.ID, err)
		}
	}
	r.Owner = owner
	owned, err := e.journal.Update(ctx, r)
	if err != nil {
		return r, fmt.Errorf("give vm %s its owner: %w", r.ID, err)
	}
	e.log.Info("vm of an earlier release has an owner now", "vm", r.ID, "namespace", owner.Namespace)
	return owned, nil
}

// remember tells each network the addresses of all VMs, also of stopped ones, before it assigns any address.
func (e *Engine) remember(ctx context.Context, records []vm.Record) {
	held := map[string][]network.Held{}
	for _, r := range records {
		for i, nic := range r.NICs {
			held[nic.Network] = append(held[nic.Network], network.Held{ID: r.ID, Name: r.Owner.Qualify(r.Spec.Name), Index: i, NIC: nic})
		}
	}
	for _, n := range e.networks.All() {
		if err := n.Remember(ctx, held[n.Name()]); err != nil {
			e.log.Warn("addresses of vms not remembered", "network", n.Name(), "err", err)
		}
	}
}

// recoverOne recovers one VM. A VM that cannot be recovered goes to StateError with the reason; the others continue.
func (e *Engine) recoverOne(ctx context.Context, m *machine, in *journal.Intent) {
	release, err := e.queue.acquire(ctx, m.id)
	if err != nil {
		return // Run ends
	}
	e.recoverHeld(ctx, m, in, release)
}

// recoverHeld recovers m, which the caller holds, and releases it.
func (e *Engine) recoverHeld(ctx context.Context, m *machine, in *journal.Intent, release func()) {
	var err error
	later := false // a worker still holds the VM
	defer func() {
		if !later {
			release()
		}
	}()
	op := opAdopt
	if in == nil {
		if err = e.adopt(ctx, m); err == nil {
			e.tidy(m) // an operation may have been interrupted right after it was settled
		}
	} else {
		op = in.Op
		e.log.Info("unfinished operation", "vm", m.id, "op", op, "step", in.Step)
		later, err = e.recoverIntent(ctx, m, *in, release)
	}
	if err != nil && ctx.Err() == nil {
		e.log.Error("vm not recovered", "vm", m.id, "op", op, "err", err)
		e.fail(ctx, m, m.record().Reason, fmt.Errorf("%s: %w", op, err))
	}
}

// recoverIntent finishes or undoes an interrupted operation. A long one continues in a worker, which releases the VM:
// later is true then.
func (e *Engine) recoverIntent(ctx context.Context, m *machine, in journal.Intent, release func()) (later bool, err error) {
	switch in.Op {
	case opCreate, opLaunch, opClone:
		return false, e.undoCreate(ctx, m)
	case opStart:
		return false, e.undoStart(ctx, m)
	case opAdopt:
		return false, e.settle(ctx, m, e.adopt(ctx, m))
	case opRemove:
		return false, e.remove(ctx, m, true)
	case opSave:
		return false, e.recoverSave(ctx, m, in)
	case opHibernate:
		return false, e.recoverHibernate(ctx, m, in)
	case opWake:
		return e.recoverWake(ctx, m, in, release)
	case opRestore:
		return e.recoverRestore(ctx, m, in, release)
	case opStop, opRestart:
		if err := e.reattach(ctx, m); err != nil {
			return false, err
		}
		e.life.spawn(func(ctx context.Context) {
			defer release()
			e.finishStop(ctx, m, in)
		})
		return true, nil
	}
	return false, errdefs.Unsupportedf("this Cocoon does not know the operation %q", in.Op)
}

// undoCreate removes what an interrupted creation made: no caller was told of the VM. A VM whose process is on record
// is complete, though, and stays.
func (e *Engine) undoCreate(ctx context.Context, m *machine) error {
	if len(m.record().Handle) > 0 {
		return e.settle(ctx, m, e.adopt(ctx, m))
	}
	if err := e.erase(ctx, m, true); err != nil {
		return err
	}
	return e.forget(ctx, m)
}

// undoStart makes the VM as it was before an interrupted start.
func (e *Engine) undoStart(ctx context.Context, m *machine) error {
	r := m.record()
	if len(r.Handle) > 0 {
		return e.settle(ctx, m, e.adopt(ctx, m))
	}
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
	_, err = e.commit(ctx, m, e.journal.Settle, func(r *vm.Record) {
		r.Reason, r.Message = vm.ReasonStartFailed, "its start was cut off when cocoond ended; start it again"
	})
	return err
}

func (e *Engine) settle(ctx context.Context, m *machine, err error) error {
	if err == nil {
		_, err = e.commit(ctx, m, e.journal.Settle, func(*vm.Record) {})
	}
	return err
}

// finishStop continues a stop or restart with the rest of its grace. It leaves the intent open when Run ends.
func (e *Engine) finishStop(ctx context.Context, m *machine, in journal.Intent) {
	ctx, cancel := e.life.bound(ctx)
	defer cancel()
	var args stopArgs
	if err := json.Unmarshal(in.Args, &args); err != nil {
		e.log.Warn("arguments of unfinished operation not understood", "vm", m.id, "op", in.Op, "err", err)
	}
	left := max(args.Grace-time.Since(in.Began), 0)
	var err error
	if m.run.Load() == nil || in.Op == opRestart && in.Step == stepLaunch { // it has ended, and nobody cleaned up after it
		err = e.reap(ctx, m.record())
	}
	switch {
	case err != nil:
	case in.Op == opStop:
		_, err = e.stop(ctx, m, left, e.journal.Settle)
	case in.Step == stepLaunch: // it was stopped already
		_, err = e.bootUp(ctx, m, stepLaunch)
	default:
		_, err = e.restart(ctx, m, left)
	}
	if err != nil && e.life.serving.Err() == nil {
		e.log.Error("unfinished operation not finished", "vm", m.id, "op", in.Op, "err", err)
	}
}

// adopt watches the process of m again if its record has one, or records that it has ended.
func (e *Engine) adopt(ctx context.Context, m *machine) error {
	r := m.record()
	if len(r.Handle) == 0 {
		if r.State == vm.StateRunning || r.State == vm.StateCreating { // no intent explains it: this cannot happen
			return errdefs.New(errdefs.Internal, "it is %s without a process on record", r.State)
		}
		return nil
	}
	if err := e.reattach(ctx, m); err != nil {
		return err
	}
	if m.run.Load() != nil {
		// The engine pauses guests only for moments, and a crash can happen in one of them.
		if err := e.unpause(ctx, m); err != nil {
			return err
		}
		if r.State == vm.StateRunning {
			return nil
		}
		_, err := e.commit(ctx, m, e.journal.Update, func(r *vm.Record) { // it was not reachable last time
			r.State, r.Reason, r.Message = vm.StateRunning, "", ""
		})
		return err
	}
	how := e.lastExit(ctx, r)
	if err := e.reap(ctx, r); err != nil {
		return err
	}
	e.reclaim(ctx, m, nil)
	at := now()
	_, err := e.commit(ctx, m, e.journal.Update, func(r *vm.Record) {
		if r.State == vm.StateError {
			r.Reason = ""
		}
		stopped(r, how, at)
	})
	return err
}

// lastExit asks the driver how a process ended that nobody watched.
func (e *Engine) lastExit(ctx context.Context, r vm.Record) ending {
	d, err := e.driver(r.Driver)
	if err != nil {
		return ending{lost: true}
	}
	t, ok := hypervisor.As[hypervisor.ExitTeller](d)
	if !ok {
		return ending{lost: true}
	}
	exit, err := t.LastExit(ctx, hypervisor.Handle(r.Handle))
	return ending{exit: exit, lost: err != nil}
}

// reattach watches the process of m again if it has one that still runs.
func (e *Engine) reattach(ctx context.Context, m *machine) error {
	r := m.record()
	if len(r.Handle) == 0 {
		return nil
	}
	d, err := e.driver(r.Driver)
	if err != nil {
		return err
	}
	inst, err := d.Adopt(ctx, hypervisor.Handle(r.Handle))
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := m.log.Resume(); err != nil {
		return errors.Join(err, inst.Close())
	}
	e.attend(m, inst)
	return nil
}

package engine

import (
	"context"
	"errors"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// hibernation is the name of the snapshot in which a VM is hibernated if the caller gives no other.
func hibernation(id vm.ID) string { return "hibernate-" + string(id) }

// Hibernate saves a running VM under name ("": hibernate-<id>) and ends its process once everything is durable. The
// VM keeps its name, MACs and addresses. Hibernating a hibernated VM is no error.
// Errors: as for SaveSnapshot. Whatever fails, the VM continues as before and no snapshot remains.
func (e *Engine) Hibernate(caller context.Context, ref, name string) (vm.Record, error) {
	return e.operate(caller, opHibernate, ref, func(ctx context.Context, m *machine) (vm.Record, error) {
		return e.hibernate(ctx, m, name)
	})
}

func (e *Engine) hibernate(ctx context.Context, m *machine, name string) (vm.Record, error) {
	r := m.record()
	if r.State == vm.StateHibernated {
		return r, nil
	}
	store, err := e.store()
	if err != nil {
		return r, err
	}
	c, err := e.capture(m, false)
	if err != nil {
		return r, err
	}
	if c.run == nil {
		return r, errdefs.Preconditionf("it does not run (%s), so there is nothing to hibernate; start it first", r.State)
	}
	c.hold = true
	pauser, ok := hypervisor.As[hypervisor.Pauser](c.run.inst)
	if !ok {
		return r, errdefs.Unsupportedf("driver %s cannot have a paused guest go on", r.Driver)
	}
	if name == "" {
		name = hibernation(m.id)
		e.dropStale(ctx, m, name)
	}
	draft, err := store.Create(ctx, name)
	if err != nil {
		return r, err
	}
	defer e.discard(m, draft)
	if err := e.open(ctx, m, opHibernate, stepSave, snapshotArgs{Snapshot: draft.ID()}.json()); err != nil {
		return r, err
	}
	// From its commit on, the snapshot is the state of the VM, although no record says so yet.
	e.settling.Store(draft.ID(), true)
	defer e.settling.Delete(draft.ID())
	frozen := r.Disks
	x, err := e.shoot(ctx, m, c, draft, snapshot.Snapshot{Name: name, Description: "vm " + m.name() + " hibernated"})
	if err != nil {
		return m.record(), e.undoHibernate(ctx, m, pauser, err)
	}
	if err := e.endHeld(ctx, m, c.run); err != nil {
		return e.undoStored(ctx, m, pauser, x, frozen, err)
	}
	return e.recordHibernated(ctx, m, x.ID, frozen)
}

// endHeld ends the process of a paused guest whose state is durable elsewhere. The guest notices nothing.
func (e *Engine) endHeld(ctx context.Context, m *machine, run *run) error {
	run.asked.Store(true)
	if err := kill(ctx, run); err != nil {
		run.asked.Store(false)
		return err
	}
	e.reclaim(ctx, m, run)
	return nil
}

// recordHibernated records that m is hibernated, with frozen, the disks that its guest knows. Later writes of any
// process go to overlays on them.
func (e *Engine) recordHibernated(ctx context.Context, m *machine, id string, frozen []vm.Disk) (vm.Record, error) {
	change := func(r *vm.Record) {
		r.State, r.Handle, r.PID, r.AgentReady = vm.StateHibernated, nil, 0, false
		r.Snapshot, r.Disks = id, frozen
		r.Reason, r.Message = vm.ReasonHibernated, ""
	}
	r, err := e.commit(ctx, m, e.journal.Settle, change)
	if err != nil {
		// The intent is open and the snapshot exists. The next recovery gets the same result, and so does any
		// operation on the VM before that.
		e.log.Error("vm hibernated, and the journal does not take it", "vm", m.id, "err", err)
		return e.assume(m, change), err
	}
	e.tidy(m)
	return r, nil
}

// assume changes only the record in memory, because this is the real state, whatever the journal says.
func (e *Engine) assume(m *machine, change func(*vm.Record)) vm.Record {
	m.write.Lock()
	defer m.write.Unlock()
	r := m.record()
	change(&r)
	m.rec.Store(&r)
	return r
}

// undoHibernate resumes a guest whose hibernation failed with cause before its state was durable.
func (e *Engine) undoHibernate(ctx context.Context, m *machine, pauser hypervisor.Pauser, cause error) error {
	err := e.resumeGuest(ctx, m, pauser)
	if err != nil {
		err = errors.Join(cause, fmt.Errorf("its guest stays paused: %w; restart cocoond or the VM", err))
		e.fail(ctx, m, m.record().Reason, err)
		return err
	}
	e.settleFailed(ctx, m, opHibernate, func(*vm.Record) {})
	e.tidy(m)
	return cause
}

// resumeGuest resumes the guest. A guest that has ended meanwhile is no error: its end is recorded as any other.
func (e *Engine) resumeGuest(ctx context.Context, m *machine, pauser hypervisor.Pauser) error {
	run := m.run.Load()
	if run == nil || run.over() {
		return nil
	}
	if err := pauser.Resume(context.WithoutCancel(ctx)); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	run.still.Store(false)
	return nil
}

// undoStored resumes a guest whose process could not be ended because of cause, although its state is durable. The
// journal records this first: from then on no recovery uses the snapshot as the VM.
//
// If the process has ended after all, the VM is hibernated in the snapshot.
func (e *Engine) undoStored(ctx context.Context, m *machine, pauser hypervisor.Pauser, x snapshot.Snapshot, frozen []vm.Disk, cause error) (vm.Record, error) {
	ctx = context.WithoutCancel(ctx)
	_, err := e.commit(ctx, m, e.step(stepUndo), func(*vm.Record) {})
	if err == nil {
		err = pauser.Resume(ctx)
	}
	if run := m.run.Load(); errdefs.IsNotFound(err) || run == nil || run.over() {
		e.reclaim(ctx, m, run)
		return e.recordHibernated(ctx, m, x.ID, frozen)
	}
	if err != nil {
		err = errors.Join(cause, fmt.Errorf("its guest stays paused: %w; its state is in snapshot %s", err, x.Name))
		e.fail(ctx, m, m.record().Reason, err)
		return m.record(), err
	}
	m.run.Load().still.Store(false)
	if err := e.removeStored(ctx, x.ID); err != nil {
		e.log.Warn("snapshot of a hibernation that failed not removed", "vm", m.id, "snapshot", x.ID, "err", err)
	}
	e.settleFailed(ctx, m, opHibernate, func(*vm.Record) {})
	e.tidy(m)
	return m.record(), cause
}

// dropStale removes the snapshot ref of m, in which m is no longer hibernated.
func (e *Engine) dropStale(ctx context.Context, m *machine, ref string) {
	x, err := e.snapshots.Get(ctx, ref)
	if err != nil || x.Source.VMID != m.id {
		return
	}
	if err := e.removeStored(ctx, x.ID); err != nil {
		e.log.Warn("snapshot of an earlier hibernation not removed", "vm", m.id, "snapshot", x.ID, "err", err)
	}
}

// dropHibernation removes the snapshots in which m is or was hibernated. The snapshot that a VM was cloned from is
// not its own. A snapshot that somebody holds stays.
func (e *Engine) dropHibernation(ctx context.Context, m *machine) {
	if e.snapshots == nil {
		return
	}
	e.dropStale(ctx, m, hibernation(m.id))
	if r := m.record(); r.Snapshot != "" && r.State != vm.StateRunning {
		e.dropStale(ctx, m, r.Snapshot)
	}
}

package engine

import (
	"context"
	"errors"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Hibernate saves a running VM under name ("": hibernate-<id>) and ends its process once everything is durable. The
// VM keeps its name, MACs and addresses. Hibernating a hibernated VM is no error.
// Errors: as for SaveSnapshot. Whatever fails, the VM continues as before and no snapshot remains.
func (e *Engine) Hibernate(caller context.Context, ref, name string) (vm.Record, error) {
	return e.operate(caller, opHibernate, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
		return m.hibernate(ctx, name)
	})
}

func (m *machine) hibernate(ctx context.Context, name string) (vm.Record, error) {
	r := m.record()
	if r.State == vm.StateHibernated {
		return r, nil
	}
	if r.Spec.Sandbox {
		return r, errdefs.Unsupportedf("it is a sandbox, which cannot be hibernated; save it, or stop it")
	}
	if err := selfContained(r); err != nil {
		return r, err
	}
	store, err := m.store()
	if err != nil {
		return r, err
	}
	c, err := m.capture(ctx, false)
	if err != nil {
		return r, err
	}
	if c.proc == nil {
		return r, errdefs.Preconditionf("it does not run (%s), so it cannot be hibernated; start it first", r.State)
	}
	c.hold = true
	pauser, ok := hypervisor.As[hypervisor.Pauser](c.proc.Inst)
	if !ok {
		return r, errdefs.Unsupportedf("driver %s cannot resume a paused guest", r.Driver)
	}
	if name == "" {
		name = hibernation(m.id)
		m.dropStale(ctx, name)
	}
	if c.draft, err = store.Create(ctx, name); err != nil {
		return r, err
	}
	defer c.discard()
	// From its commit on, the snapshot is the state of the VM, although no record says so yet.
	id := c.draft.ID()
	m.vms.settling.Store(id, true)
	defer m.vms.settling.Delete(id)
	h := &hibernate{capture: c, pauser: pauser, name: name, frozen: r.Disks}
	return hibernateOperation.run(ctx, m, h, snapshotArgs{Snapshot: id}.json())
}

// hibernate saves a VM and ends its process.
type hibernate struct {
	capture
	pauser hypervisor.Pauser
	name   string            // of the snapshot
	frozen []vm.Disk         // the disks that the guest knows: later writes of any process go to overlays on them
	x      snapshot.Snapshot // valid once stored is true
	stored bool              // the snapshot is complete
	ended  bool              // and the process has ended
	args   snapshotArgs      // of a hibernation that an earlier process of the engine began
}

var hibernateOperation = operation[*hibernate]{
	name: opHibernate, told: true, recall: recallHibernate,
	steps: []step[*hibernate]{
		{word: stepSave, run: (*hibernate).save, undo: (*hibernate).undo, recover: (*hibernate).recoverSave},
		{word: stepUndo, recover: (*hibernate).recoverUndo},
	},
}

func recallHibernate(m *machine, in journal.Intent) (*hibernate, error) {
	args, err := argsOfSnapshot(in)
	return &hibernate{capture: capture{machine: m}, args: args}, err
}

// save saves the guest, which stays paused, and ends its process. The guest notices nothing.
func (h *hibernate) save(ctx context.Context) (outcome, error) {
	x, err := h.shoot(ctx, snapshot.Snapshot{Name: h.name, Description: "vm " + h.machine.name() + " hibernated"})
	if err != nil {
		return outcome{}, err
	}
	h.x, h.stored = x, true
	if err := h.retire(ctx); err != nil {
		return outcome{}, err
	}
	h.ended = true
	return h.hibernated(x.ID, h.frozen), nil
}

// hibernated is the outcome of a VM that is hibernated in a snapshot.
func (h *hibernate) hibernated(id string, frozen []vm.Disk) outcome {
	return outcome{change: func(r *vm.Record) {
		r.State, r.Handle, r.PID, r.AgentReady = vm.StateHibernated, nil, 0, false
		r.Snapshot, r.Disks = id, frozen
		r.Reason, r.Message = vm.ReasonHibernated, ""
	}, then: func(context.Context) { h.tidy() }}
}

// settleHibernated records that the VM is hibernated. If the journal fails, the intent stays open. Then the next recovery,
// or an operation on the VM before it, finds the snapshot and gets the same result.
func (h *hibernate) settleHibernated(ctx context.Context, id string, frozen []vm.Disk) error {
	done := h.hibernated(id, frozen)
	err := h.settleAssumed(ctx, opHibernate, done.change)
	if err == nil {
		done.then(ctx)
	}
	return err
}

func (h *hibernate) undo(ctx context.Context, err error) error {
	switch {
	case h.ended:
		h.log.Error("vm is hibernated, but the journal did not record it", "vm", h.id, "err", err)
		h.assume(h.hibernated(h.x.ID, h.frozen).change)
		return err
	case h.stored:
		return h.undoStored(context.WithoutCancel(ctx), err)
	}
	return h.undoUnstored(ctx, err)
}

// undoUnstored resumes a guest whose hibernation failed with cause before its state was durable. A guest that has
// ended meanwhile is no error: its end is recorded as any other.
func (h *hibernate) undoUnstored(ctx context.Context, cause error) error {
	if run := h.run.Load(); run != nil && !run.Over() {
		if err := h.settlePause(context.WithoutCancel(ctx), run); err != nil {
			err = errors.Join(cause, fmt.Errorf("its guest stays paused: %w; restart cocoond or the VM", err))
			h.fail(ctx, opHibernate, h.record().Reason, err)
			return err
		}
	}
	h.settleFailed(ctx, opHibernate, same)
	h.tidy()
	return cause
}

// undoStored resumes a guest whose process could not be ended because of cause, although its state is durable. The
// journal records this first: from then on no recovery uses the snapshot as the VM.
//
// If the process has ended after all, the VM is hibernated in the snapshot.
func (h *hibernate) undoStored(ctx context.Context, cause error) error {
	_, err := h.commit(ctx, h.step(stepUndo), same)
	if err == nil {
		limited, cancel := context.WithTimeout(ctx, undo.Limit)
		err = h.pauser.Resume(limited)
		cancel()
	}
	run := h.run.Load()
	if errdefs.IsNotFound(err) || run == nil || run.Over() {
		h.reclaim(ctx)
		return h.settleHibernated(ctx, h.x.ID, h.frozen)
	}
	if err != nil {
		err = errors.Join(cause, fmt.Errorf("its guest stays paused: %w; its state is in snapshot %s", err, h.x.Name))
		h.fail(ctx, opHibernate, h.record().Reason, err)
		return err
	}
	run.Held.Store(false)
	h.dropFailed(ctx, h.x.ID)
	h.settleFailed(ctx, opHibernate, same)
	h.tidy()
	return cause
}

// dropFailed removes the snapshot of a hibernation that failed.
func (h *hibernate) dropFailed(ctx context.Context, id string) {
	if err := h.removeStored(ctx, id); err != nil {
		h.log.Warn("snapshot of a failed hibernation not removed", "vm", h.id, "snapshot", id, "err", err)
	}
}

// recoverSave finishes a hibernation whose snapshot exists, and otherwise lets the guest continue.
func (h *hibernate) recoverSave(ctx context.Context) (next string, err error) {
	there, err := h.committed(ctx, h.id, h.args.Snapshot)
	if err != nil {
		return "", err
	}
	if !there {
		return "", h.recoverAwake(ctx, false)
	}
	if err := h.reattach(ctx); err != nil {
		return "", err
	}
	if h.run.Load() != nil {
		if err := h.retire(ctx); err != nil {
			return "", err
		}
	}
	if err := h.reap(ctx); err != nil {
		return "", err
	}
	if err := h.nics.detach(ctx, h.record().NICs, false); err != nil {
		return "", err
	}
	return "", h.settleHibernated(ctx, h.args.Snapshot, below(h.record().Disks))
}

// recoverUndo lets the guest continue and removes the snapshot.
func (h *hibernate) recoverUndo(ctx context.Context) (next string, err error) {
	there, err := h.committed(ctx, h.id, h.args.Snapshot)
	if err != nil {
		return "", err
	}
	return "", h.recoverAwake(ctx, there)
}

// recoverAwake lets the guest continue. With drop, it removes the snapshot.
func (h *hibernate) recoverAwake(ctx context.Context, drop bool) error {
	if err := h.adopt(ctx); err != nil {
		return err
	}
	if drop {
		h.dropFailed(ctx, h.args.Snapshot)
	}
	err := h.settle(ctx, same)
	h.tidy()
	return err
}

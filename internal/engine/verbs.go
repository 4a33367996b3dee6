package engine

import (
	"context"
	"fmt"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// operate runs act on the VM of ref when its turn comes.
func (n *node) operate(caller context.Context, op, ref string, act func(*machine, context.Context) (vm.Record, error)) (vm.Record, error) {
	ctx, leave, err := n.life.enter(caller)
	if err != nil {
		return vm.Record{}, err
	}
	defer leave()
	m, release, err := n.vms.take(ctx, ref)
	if err != nil {
		return vm.Record{}, n.life.ended(caller, err)
	}
	defer release()
	began := time.Now()
	r, err := act(m, vm.OnBehalf(ctx, m.record().Owner)) // what is made from a VM belongs to the owner of the VM, whoever asked
	if err == nil {
		err = n.durable(ctx)
	}
	if err != nil {
		return r.Clone(), n.life.ended(caller, fmt.Errorf("%s vm %s: %w", op, m.name(), err))
	}
	n.log.Info("vm operated on", "vm", m.id, "op", op, "dur", time.Since(began))
	return r.Clone(), nil
}

// UpdateVolume replaces the content of a file volume, first durably on the host, then in the guest if it is
// connected. A guest that is starting, stopped or lost meanwhile gets it at its next setup. A disk guest does not get
// it.
// Errors: NotFound (VM, volume), InvalidArgument (not a file volume, bad files), FailedPrecondition while the guest is paused,
// Unavailable and others when a connected guest does not accept it: the caller should retry then.
func (e *Engine) UpdateVolume(caller context.Context, ref, volume string, files []vm.VolumeFile) error {
	ctx, leave, err := e.life.enter(caller)
	if err != nil {
		return err
	}
	defer leave()
	err = e.updateVolume(ctx, ref, volume, files)
	if err != nil {
		return e.life.ended(caller, fmt.Errorf("update volume %s of vm %s: %w", volume, ref, err))
	}
	return nil
}

func (e *Engine) updateVolume(ctx context.Context, ref, volume string, files []vm.VolumeFile) error {
	m, release, err := e.vms.take(ctx, ref)
	if err != nil {
		return err
	}
	v, err := volumeOf(m.record(), volume)
	if err == nil {
		v.Files = files
		err = vm.ValidateFiles(volume, files)
	}
	if err == nil {
		err = e.dirs.writeVolume(m.id, v)
	}
	// The guest gets it after the VM is released: a slow guest does not delay a stop.
	release()
	if err != nil {
		return err
	}
	if err := awake(m.record()); err != nil { // it keeps its session, so it would not get the content by itself
		return err
	}
	if r := m.run.Load(); r != nil {
		return r.link.PushVolume(ctx, v)
	}
	return nil
}

// RemoveSnapshot deletes a snapshot unless a VM is hibernated in it. VMs that were cloned from it are not touched.
// Errors: NotFound, FailedPrecondition while a hibernated VM or somebody else needs it.
func (e *Engine) RemoveSnapshot(caller context.Context, ref string) error {
	ctx, leave, err := e.life.enter(caller)
	if err != nil {
		return err
	}
	defer leave()
	if err := e.removeSnapshot(ctx, ref); err != nil {
		return e.life.ended(caller, fmt.Errorf("remove snapshot %s: %w", ref, err))
	}
	return nil
}

func (e *Engine) removeSnapshot(ctx context.Context, ref string) error {
	store, err := e.store()
	if err != nil {
		return err
	}
	x, err := store.Get(ctx, ref)
	if err != nil {
		return err
	}
	if !vm.Behalf(ctx).Reaches(x.Owner) {
		return errdefs.Preconditionf("it belongs to the operator; only the operator may remove it")
	}
	if _, busy := e.vms.settling.Load(x.ID); busy {
		return errdefs.Preconditionf("vm %s is being hibernated in it", x.Source.VMName)
	}
	var listing []*machine
	for _, m := range e.vms.all() {
		r := m.record()
		if r.State == vm.StateHibernated && r.Snapshot == x.ID {
			return errdefs.Preconditionf("vm %s is hibernated in it; wake or remove the VM", m.name())
		}
		if slices.Contains(r.SnapshotIDs, x.ID) {
			listing = append(listing, m)
		}
	}
	for _, id := range e.strays.ids() {
		if row, err := e.kept(id); err == nil && row.Record.State == vm.StateHibernated && row.Record.Snapshot == x.ID {
			return errdefs.Preconditionf("vm %s, which the journal does not know, is hibernated in it; see `cocoon recover`", id)
		}
	}
	if err := e.removeStored(ctx, x.ID); err != nil {
		return err
	}
	for _, m := range listing { // an operation on the VM may take long: do not wait for it
		e.life.spawn(func(ctx context.Context) { unlist(ctx, m, x.ID) })
	}
	return nil
}

// unlist removes a deleted snapshot from the list in the record of m.
func unlist(ctx context.Context, m *machine, id string) {
	ctx, cancel := m.life.bound(ctx)
	defer cancel()
	release, err := m.vms.queue.Lock(ctx, m.id)
	if err != nil {
		return
	}
	defer release()
	if m.vms.get(m.id) != m {
		return
	}
	_, err = m.update(ctx, func(r *vm.Record) {
		r.SnapshotIDs = slices.DeleteFunc(slices.Clone(r.SnapshotIDs), func(s string) bool { return s == id })
	})
	if err != nil {
		m.log.Warn("snapshot not removed from the list of its vm", "vm", m.id, "snapshot", id, "err", err)
	}
}

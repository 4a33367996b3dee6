package engine

import (
	"context"
	"errors"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// This file keeps the volumes of a VM with its snapshots, and gives clones their own copies. The volume store has the bytes. It records
// for what each snapshot and each copy was made (volume.Spec.For), so that a crash leaves none behind.

// savable refuses to save r for others, if it has what no snapshot can keep. It looks before the guest is paused.
func (n *node) savable(ctx context.Context, r vm.Record) error {
	if err := selfContained(r); err != nil {
		return err
	}
	if err := savableSandbox(r); err != nil {
		return err
	}
	if len(r.Attached) == 0 {
		return nil
	}
	if r.State == vm.StateHibernated { // its snapshot was taken without them
		return errdefs.Preconditionf("it is hibernated and uses volume %s; wake it first", r.Attached[0].Volume)
	}
	if _, err := n.snapshotter(); err != nil {
		return err
	}
	checker, ok := volume.As[volume.LiveChecker](n.volumes)
	if r.State != vm.StateRunning || !ok {
		return nil
	}
	ctx = vm.OnBehalf(ctx, r.Owner)
	for _, a := range r.Attached {
		if err := checker.CheckLive(ctx, string(a.ID)); err != nil {
			return notKept(a, err, true)
		}
	}
	return nil
}

// notKept returns why the volume a cannot be in a snapshot of its VM, whose guest would wait if live.
func notKept(a vm.AttachedVolume, err error, live bool) error {
	if live && errdefs.IsFailedPrecondition(err) {
		return errdefs.Preconditionf("volume %s cannot be copied at once, and its guest would wait for the copy; stop the VM first, or keep such volumes on xfs, btrfs or a thin pool: %w", a.Volume, err)
	}
	return fmt.Errorf("volume %s: %w", a.Volume, err)
}

// snapshotter returns the volume store, or Unsupported if it cannot keep the bytes of one instant.
func (n *node) snapshotter() (volume.Snapshotter, error) {
	can, ok := volume.As[volume.Snapshotter](n.volumes)
	if !ok {
		return nil, errdefs.Unsupportedf("the volume store of this node takes no snapshots")
	}
	return can, nil
}

// removeStored removes the pool's entries of a snapshot, then the snapshot, then those of its volumes.
func (n *node) removeStored(ctx context.Context, id string) error {
	n.pool.Empty(ctx, id)
	if err := n.snapshots.Remove(ctx, id); err != nil {
		return err
	}
	if err := n.dropKept(ctx, id); err != nil { // the next start of the engine does it
		n.log.Warn("snapshots of volumes not removed", "snapshot", id, "err", err)
	}
	return nil
}

// dropKept removes the snapshots of volumes that were taken for the snapshot id of a VM.
func (n *node) dropKept(ctx context.Context, id string) error {
	return n.eachKept(ctx, func(can volume.Snapshotter, x volume.Snapshot) error {
		if x.For != id {
			return nil
		}
		return can.DeleteSnapshot(ctx, string(x.ID))
	})
}

// sweepKept removes the snapshots of volumes that belong to a snapshot of a VM which does not exist. It logs what it cannot remove and
// tries again next time.
func (n *node) sweepKept(ctx context.Context) {
	if n.snapshots == nil {
		return
	}
	err := n.eachKept(ctx, func(can volume.Snapshotter, x volume.Snapshot) error {
		if _, err := n.snapshots.Get(ctx, x.For); !errdefs.IsNotFound(err) {
			return nil // it exists, or cannot be read
		}
		n.log.Info("snapshot of a volume removed, its vm's snapshot does not exist", "volume", x.Source, "snapshot", x.For)
		return can.DeleteSnapshot(ctx, string(x.ID))
	})
	if err != nil {
		n.log.Warn("snapshots of volumes not removed", "err", err)
	}
}

// eachKept calls fn, as the operator, for each snapshot of a volume that was taken for the snapshot of a VM.
func (n *node) eachKept(ctx context.Context, fn func(volume.Snapshotter, volume.Snapshot) error) error {
	can, ok := volume.As[volume.Snapshotter](n.volumes)
	if !ok {
		return nil
	}
	ctx = vm.OnBehalf(ctx, vm.Owner{})
	all, err := can.Snapshots(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, x := range all {
		if x.For != "" {
			errs = append(errs, fn(can, x))
		}
	}
	return errors.Join(errs...)
}

// copyable refuses a clone of x for owner whose volumes cannot be copied.
func (n *node) copyable(ctx context.Context, x snapshot.Snapshot, owner vm.Owner) error {
	asked := x.Record.Spec.DiskVolumes()
	if len(asked) == 0 && len(x.Volumes) == 0 {
		return nil
	}
	if len(x.Volumes) == 0 {
		return errdefs.Preconditionf("its VM uses volume %s, whose content is not in the snapshot, so only that VM can resume from it; create a VM with a clone of the volume instead", asked[0].Name)
	}
	can, err := n.snapshotter()
	if err != nil {
		return err
	}
	if owner != x.Owner {
		return errdefs.Preconditionf("it has volumes, which only their owner can copy; use a snapshot without volumes")
	}
	if len(asked) != len(x.Volumes) {
		return errdefs.DataLossf("its record is damaged: it has %d volumes, and its VM %d", len(x.Volumes), len(asked))
	}
	for _, v := range x.Volumes {
		if diskVolume(x.Record.Spec, v.Volume) < 0 {
			return errdefs.DataLossf("its record is damaged: its VM has no volume %q", v.Volume)
		}
		got, err := can.GetSnapshot(vm.OnBehalf(ctx, owner), string(v.Snapshot))
		if err == nil && (got.ID != v.Snapshot || got.For != x.ID) {
			err = errdefs.DataLossf("it belongs to another snapshot")
		}
		if err != nil {
			return fmt.Errorf("the content of volume %s: %w", v.Volume, err)
		}
	}
	return nil
}

// copyVolumes gives r volumes with the content of those of x, and attaches them. back undoes that. A guest that resumes keeps the serials
// that it knows.
func (n *node) copyVolumes(ctx context.Context, x snapshot.Snapshot, r vm.Record, back *undo.Stack) (vm.Record, error) {
	if len(x.Volumes) == 0 {
		return r, nil
	}
	can, err := n.snapshotter()
	if err != nil {
		return r, err
	}
	owned := vm.OnBehalf(ctx, r.Owner)
	back.Push(func(ctx context.Context) error { return n.dropCopies(ctx, r.ID) })
	r = r.Clone()
	for _, v := range x.Volumes {
		made, err := can.FromSnapshot(owned, string(v.Snapshot), volume.Spec{For: string(r.ID)})
		if err != nil {
			return r, fmt.Errorf("volume %s: %w", v.Volume, err)
		}
		r.Spec.Volumes[diskVolume(r.Spec, v.Volume)].Disk.Ref = string(made.ID)
		a := vm.AttachedVolume{Volume: v.Volume, ID: made.ID, Serial: volume.Serial(made.ID)}
		if r.Cloned {
			a.Serial, a.Size = v.Serial, v.Size
		}
		r.Attached = append(r.Attached, a)
		r.Disks = append(r.Disks, vm.Disk{Role: vm.RoleVolume, Serial: a.Serial, Port: v.Port})
	}
	has, err := n.withVolumes(ctx, r, r.Disks, back)
	if err != nil {
		return r, err
	}
	r.Disks, r.Attached = has.disks, has.attached
	if r.Cloned && len(has.grown) > 0 {
		resume := *r.Resume
		resume.Volumes = has.grown
		r.Resume = &resume
	}
	return r, nil
}

// dropCopies removes the volumes that were made for the VM id. Preconditions: no caller was told of that VM, and nothing uses them.
func (n *node) dropCopies(ctx context.Context, id vm.ID) error {
	maker, ok := volume.As[volume.Maker](n.volumes)
	if !ok {
		return nil
	}
	ctx = vm.OnBehalf(ctx, vm.Owner{})
	all, err := n.volumes.List(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, v := range all {
		if v.For == string(id) {
			errs = append(errs, maker.Delete(ctx, string(v.ID)))
		}
	}
	return errors.Join(errs...)
}

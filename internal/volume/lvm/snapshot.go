package lvm

import (
	"context"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/record"
)

// Snapshot implements volume.Snapshotter. A snapshot shares all blocks with its volume until one of the two changes.
func (s *Store) Snapshot(ctx context.Context, ref string, spec volume.Spec) (volume.Snapshot, error) {
	snap, err := s.snapshot(ctx, ref, spec)
	if err != nil {
		return volume.Snapshot{}, fmt.Errorf("take a snapshot of volume %s%s: %w", ref, record.As(spec.Name), record.Full(err))
	}
	return snap, nil
}

func (s *Store) snapshot(ctx context.Context, ref string, spec volume.Spec) (volume.Snapshot, error) {
	if err := spec.Validate(vm.VolumeSnapshots); err != nil {
		return volume.Snapshot{}, err
	}
	e, release, err := s.source(ctx, ref)
	if err != nil {
		return volume.Snapshot{}, err
	}
	defer release()
	v := e.Rec.Object
	if spec.Size != 0 && spec.Size != v.Size {
		return volume.Snapshot{}, errdefs.Invalidf("a snapshot has the size of its volume, %d bytes, and cannot have %d", v.Size, spec.Size)
	}
	owner := vm.Heir(ctx, v.Owner)
	return create(ctx, s, s.snapshots, owner, spec.Name, func(id vm.ID, name, lv string) (rec recorded[volume.Snapshot], err error) {
		rec.Object = volume.Snapshot{ID: id, Name: name, Owner: owner, Kind: Kind, Volume: v.ID, Source: v.Name, Size: v.Size, For: spec.For, CreatedAt: now(), Labels: spec.Labels}.Clone()
		rec.Allocated = s.allocated(e.Rec.state)
		return rec, s.copyOf(ctx, lv, e.Rec.LV, v.Size, v.Size)
	})
}

// CheckLive implements volume.LiveChecker. A thin pool can copy each of its volumes at once, unless it is too full.
func (s *Store) CheckLive(ctx context.Context, ref string) error {
	if _, err := s.volumes.Get(ctx, ref); err != nil {
		return err
	}
	if err := s.guard(); err != nil {
		return fmt.Errorf("look whether volume %s can be copied: %w", ref, err)
	}
	return nil
}

// source holds a volume that is to be copied. What hypervisors have written to it is in the pool then.
func (s *Store) source(ctx context.Context, ref string) (*entry[volume.Volume], func(), error) {
	e, release, err := s.volumes.Lock(ctx, ref)
	if err != nil {
		return nil, nil, err
	}
	if err := e.Rec.Object.Copyable(); err != nil {
		release()
		return nil, nil, err
	}
	if e.Own.file != nil {
		if err := e.Own.file.Sync(); err != nil {
			release()
			return nil, nil, fmt.Errorf("write what the host has cached of it: %w", err)
		}
	}
	return e, release, nil
}

// GetSnapshot implements volume.Snapshotter.
func (s *Store) GetSnapshot(ctx context.Context, ref string) (volume.Snapshot, error) {
	rec, err := s.snapshots.Get(ctx, ref)
	return rec.Object, err
}

// Snapshots implements volume.Snapshotter.
func (s *Store) Snapshots(ctx context.Context) ([]volume.Snapshot, error) {
	return objects(s.snapshots.List(ctx))
}

// FromSnapshot implements volume.Snapshotter.
func (s *Store) FromSnapshot(ctx context.Context, ref string, spec volume.Spec) (volume.Volume, error) {
	v, err := s.fromSnapshot(ctx, ref, spec)
	if err != nil {
		return volume.Volume{}, fmt.Errorf("make a volume from snapshot %s%s: %w", ref, record.As(spec.Name), record.Full(err))
	}
	return v, nil
}

func (s *Store) fromSnapshot(ctx context.Context, ref string, spec volume.Spec) (volume.Volume, error) {
	e, release, err := s.snapshots.Lock(ctx, ref)
	if err != nil {
		return volume.Volume{}, err
	}
	defer release()
	snap := e.Rec.Object
	return s.copy(vm.OnBehalf(ctx, vm.Heir(ctx, snap.Owner)), spec, snap.ID, snap.Size, e.Rec.state)
}

// Clone implements volume.Cloner.
func (s *Store) Clone(ctx context.Context, ref string, spec volume.Spec) (volume.Volume, error) {
	v, err := s.clone(ctx, ref, spec)
	if err != nil {
		return volume.Volume{}, fmt.Errorf("clone volume %s%s: %w", ref, record.As(spec.Name), record.Full(err))
	}
	return v, nil
}

func (s *Store) clone(ctx context.Context, ref string, spec volume.Spec) (volume.Volume, error) {
	e, release, err := s.source(ctx, ref)
	if err != nil {
		return volume.Volume{}, err
	}
	defer release()
	v := e.Rec.Object
	return s.copy(vm.OnBehalf(ctx, vm.Heir(ctx, v.Owner)), spec, v.ID, v.Size, e.Rec.state)
}

// copy makes a volume of the logical volume of an object that is held.
func (s *Store) copy(ctx context.Context, spec volume.Spec, from vm.ID, size int64, source state) (volume.Volume, error) {
	want := size
	if spec.Size != 0 {
		var err error
		if want, err = s.round(spec.Size); err != nil {
			return volume.Volume{}, err
		}
	}
	if want < size {
		return volume.Volume{}, errdefs.Invalidf("a copy cannot have %d bytes, less than its source; choose at least %d", want, size)
	}
	return s.make(ctx, spec, from, func(ctx context.Context, lv string) (filling, error) {
		return filling{size: want, allocated: s.allocated(source)}, s.copyOf(ctx, lv, source.LV, size, want)
	})
}

// Restore implements volume.Snapshotter. The volume gets another logical volume, a copy of that of the snapshot.
func (s *Store) Restore(ctx context.Context, ref, snapshot string) (volume.Volume, error) {
	v, err := s.restore(ctx, ref, snapshot)
	if err != nil {
		return volume.Volume{}, fmt.Errorf("restore volume %s from snapshot %s: %w", ref, snapshot, record.Full(err))
	}
	return v, nil
}

func (s *Store) restore(ctx context.Context, ref, snapshot string) (volume.Volume, error) {
	e, release, err := s.volumes.Lock(ctx, ref)
	if err != nil {
		return volume.Volume{}, err
	}
	defer release()
	v := e.Rec.Object
	if len(v.Attachments) > 0 {
		return v, errdefs.Preconditionf("it is attached to %s; detach it there first", v.Users())
	}
	if err := s.unread(e); err != nil {
		return v, err
	}
	from, done, err := s.snapshots.Lock(ctx, snapshot)
	if err != nil {
		return v, err
	}
	defer done()
	snap := from.Rec.Object
	if snap.Size > v.Size {
		return v, errdefs.Invalidf("the snapshot has %d bytes, more than the volume; resize that to %d bytes first", snap.Size, snap.Size)
	}
	if err := s.guard(); err != nil {
		return v, err
	}
	return v.Clone(), s.replace(ctx, e, from.Rec, v.Size)
}

// replace gives the volume e, which nobody uses, a copy of the snapshot with size bytes in place of its logical volume. Preconditions: the
// locks of both are held.
func (s *Store) replace(ctx context.Context, e *entry[volume.Volume], snap recorded[volume.Snapshot], size int64) error {
	old, lv := e.Rec.Clone(), prefix+string(vm.NewID())
	next := old.Clone()
	next.Gone = append(next.Gone, lv)
	if err := s.volumes.Save(e, next); err != nil {
		return err
	}
	allocated := s.allocated(snap.state)
	err := s.copyOf(ctx, lv, snap.LV, snap.Object.Size, size)
	if err == nil {
		next = old.Clone()
		next.LV, next.Gone, next.Allocated = lv, append(next.Gone, old.LV), allocated
		err = s.volumes.Save(e, next)
	}
	if err == nil {
		s.close(e)
	}
	if ferr := finish(context.WithoutCancel(ctx), s, s.volumes, e); ferr != nil { // removes the old one, or the new one after a failure
		s.cfg.Log.Warn("removed logical volume is left, and tried again later", "volume", string(e.ID), "lv", e.Rec.Gone, "err", ferr)
	}
	return err
}

// DeleteSnapshot implements volume.Snapshotter.
func (s *Store) DeleteSnapshot(ctx context.Context, ref string) error {
	if err := s.deleteSnapshot(ctx, ref); err != nil {
		return record.Failed("delete", vm.VolumeSnapshots, ref, err)
	}
	return nil
}

func (s *Store) deleteSnapshot(ctx context.Context, ref string) error {
	e, release, err := s.snapshots.Lock(ctx, ref)
	if err != nil {
		return err
	}
	defer release()
	return erase(ctx, s, s.snapshots, e)
}

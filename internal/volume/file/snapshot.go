package file

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/record"
)

var (
	_ volume.Snapshotter = (*Store)(nil)
	_ volume.LiveChecker = (*Store)(nil)
	_ volume.Cloner      = (*Store)(nil)
)

// Snapshot implements volume.Snapshotter.
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
	v, src, done, err := s.read(ctx, ref, volume.Volume.Copyable)
	if err != nil {
		return volume.Snapshot{}, err
	}
	defer done()
	if spec.Size != 0 && spec.Size != v.Size {
		return volume.Snapshot{}, errdefs.Invalidf("a snapshot has the size of its volume, %d bytes, and cannot have %d", v.Size, spec.Size)
	}
	owner := vm.Heir(ctx, v.Owner)
	return s.snapshots.create(ctx, owner, spec.Name, func(id vm.ID, name string, data *os.File) (volume.Snapshot, error) {
		snap := volume.Snapshot{ID: id, Name: name, Owner: owner, Kind: Kind, Volume: v.ID, Source: v.Name, Size: v.Size, For: spec.For, CreatedAt: now(), Labels: spec.Labels}.Clone()
		return snap, fill(ctx, data, src, v.Size, spec.Live)
	})
}

// fill copies src to dst, which gets size bytes. If src is live, only sharing its content gives the bytes of one instant.
func fill(ctx context.Context, dst, src *os.File, size int64, live bool) error {
	var err error
	if live {
		err = sparse.Clone(dst, src)
	} else {
		err = sparse.Copy(ctx, dst, src)
	}
	switch {
	case live && errdefs.Is(err, errdefs.Unsupported):
		return errNotLive
	case err != nil:
		return err
	}
	return dst.Truncate(size)
}

var errNotLive = errdefs.Preconditionf("a VM writes to it, and the file system of this node's volumes cannot keep the bytes of one instant (xfs and btrfs can); stop or hibernate the VM first")

// CheckLive implements volume.LiveChecker. It tries with files of its own, so it does not touch the volume.
func (s *Store) CheckLive(ctx context.Context, ref string) error {
	if _, err := s.volumes.Get(ctx, ref); err != nil {
		return err
	}
	err := sparse.CanClone(s.snapshots.dir, s.volumes.dir)
	switch {
	case errdefs.Is(err, errdefs.Unsupported):
		err = errNotLive
	case errors.Is(err, errors.ErrUnsupported): // not known: Snapshot tells
		err = nil
	}
	if err != nil {
		return fmt.Errorf("look whether volume %s can be copied at once: %w", ref, record.Full(err))
	}
	return nil
}

// read opens the bytes of a volume for reading. Until done, no VM can be attached that writes. allow, if not nil, may refuse.
func (s *Store) read(ctx context.Context, ref string, allow func(volume.Volume) error) (v volume.Volume, data *os.File, done func(), err error) {
	e, unlock, err := s.volumes.Lock(ctx, ref)
	if err != nil {
		return v, nil, nil, err
	}
	defer unlock()
	v = e.Rec.Clone()
	if allow != nil {
		if err := allow(v); err != nil {
			return v, nil, nil, err
		}
	}
	if data, err = s.volumes.openData(v, v.Size, os.O_RDONLY); err != nil {
		return v, nil, nil, err
	}
	s.volumes.Reading(e, 1)
	return v, data, func() {
		data.Close()
		s.volumes.Reading(e, -1)
	}, nil
}

// openData opens the bytes of an object, which must have at least size bytes. Errors: DataLoss.
func (x *folders[R]) openData(rec R, size int64, flag int) (*os.File, error) {
	f, err := record.OpenPlain(x.data(rec.Named().ID), flag)
	if errdefs.Is(err, errdefs.DataLoss) {
		return nil, errdefs.DataLossf("%w; put the file of %s %s back", err, x.kind.Noun, rec.Named().Name)
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && info.Size() < size {
		err = errdefs.DataLossf("%w; put the whole file of %s %s back at %s", wrongSize(info.Size(), size), x.kind.Noun, rec.Named().Name, f.Name())
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// GetSnapshot implements volume.Snapshotter.
func (s *Store) GetSnapshot(ctx context.Context, ref string) (volume.Snapshot, error) {
	return s.snapshots.Get(ctx, ref)
}

// Snapshots implements volume.Snapshotter.
func (s *Store) Snapshots(ctx context.Context) ([]volume.Snapshot, error) {
	return s.snapshots.List(ctx)
}

// openSnapshot opens the bytes of a snapshot. They stay readable if it is deleted meanwhile.
func (s *Store) openSnapshot(ctx context.Context, ref string) (volume.Snapshot, *os.File, error) {
	e, unlock, err := s.snapshots.Lock(ctx, ref)
	if err != nil {
		return volume.Snapshot{}, nil, err
	}
	defer unlock()
	data, err := s.snapshots.openData(e.Rec, e.Rec.Size, os.O_RDONLY)
	return e.Rec.Clone(), data, err
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
	snap, src, err := s.openSnapshot(ctx, ref)
	if err != nil {
		return volume.Volume{}, err
	}
	defer src.Close()
	return s.copy(vm.OnBehalf(ctx, vm.Heir(ctx, snap.Owner)), spec, snap.ID, snap.Size, src)
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
	v, src, done, err := s.read(ctx, ref, volume.Volume.Copyable)
	if err != nil {
		return volume.Volume{}, err
	}
	defer done()
	return s.copy(vm.OnBehalf(ctx, vm.Heir(ctx, v.Owner)), spec, v.ID, v.Size, src)
}

// copy makes a volume with the first size bytes of src.
func (s *Store) copy(ctx context.Context, spec volume.Spec, from vm.ID, size int64, src *os.File) (volume.Volume, error) {
	want := size
	if spec.Size != 0 {
		var err error
		if want, err = volume.RoundSize(spec.Size); err != nil {
			return volume.Volume{}, err
		}
	}
	if want < size {
		return volume.Volume{}, errdefs.Invalidf("a copy cannot have %d bytes, less than its source; choose at least %d", want, size)
	}
	return s.make(ctx, spec, from, func(data *os.File) (int64, error) { return want, fill(ctx, data, src, size, spec.Live) })
}

// Restore implements volume.Snapshotter.
func (s *Store) Restore(ctx context.Context, ref, snapshot string) (volume.Volume, error) {
	v, err := s.restore(ctx, ref, snapshot)
	if err != nil {
		return volume.Volume{}, fmt.Errorf("restore volume %s from snapshot %s: %w", ref, snapshot, record.Full(err))
	}
	return v, nil
}

func (s *Store) restore(ctx context.Context, ref, snapshot string) (volume.Volume, error) {
	e, unlock, err := s.volumes.Lock(ctx, ref)
	if err != nil {
		return volume.Volume{}, err
	}
	defer unlock()
	v := e.Rec.Clone()
	if len(v.Attachments) > 0 {
		return v, errdefs.Preconditionf("it is attached to %s; detach it there first", v.Users())
	}
	snap, src, err := s.openSnapshot(ctx, snapshot)
	if err != nil {
		return v, err
	}
	defer src.Close()
	if snap.Size > v.Size {
		return v, errdefs.Invalidf("the snapshot has %d bytes, more than the volume; resize that to %d bytes first", snap.Size, snap.Size)
	}
	return v, replace(ctx, s.volumes.data(v.ID), src, v.Size)
}

// replace makes the file at path a copy of src with size bytes, in one step.
func replace(ctx context.Context, path string, src *os.File, size int64) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+dataFile+tempInfix+"*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	err = fill(ctx, f, src, size, false)
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return atomicfile.Rename(f.Name(), path)
}

// DeleteSnapshot implements volume.Snapshotter.
func (s *Store) DeleteSnapshot(ctx context.Context, ref string) error {
	if err := s.snapshots.remove(ctx, ref, func(volume.Snapshot) error { return nil }); err != nil {
		return record.Failed("delete", vm.VolumeSnapshots, ref, err)
	}
	return nil
}

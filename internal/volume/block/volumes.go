package block

import (
	"context"
	"fmt"
	"reflect"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/record"
)

// find resolves a reference; see vm.Kind.Match. Preconditions: s.mu is held.
func (s *Store) find(ctx context.Context, ref string) (*entry, error) {
	id, err := vm.Volumes.Match(vm.Behalf(ctx), ref, func(yield func(vm.Named) bool) {
		for _, e := range s.all {
			n := e.rec.Named()
			n.ID = e.id // a damaged record may have another one
			if !yield(n) {
				return
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return s.all[id], s.all[id].bad
}

// Get implements volume.Store.
func (s *Store) Get(ctx context.Context, ref string) (volume.Volume, error) {
	if err := ctx.Err(); err != nil {
		return volume.Volume{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e, err := s.find(ctx, ref)
	if err != nil {
		return volume.Volume{}, err
	}
	return e.rec.Clone(), nil
}

// List implements volume.Store.
func (s *Store) List(ctx context.Context) ([]volume.Volume, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	out := make([]volume.Volume, 0, len(s.all))
	for _, e := range s.all {
		if e.bad == nil && e.rec.Named().VisibleTo(vm.Behalf(ctx)) {
			out = append(out, e.rec.Clone())
		}
	}
	s.mu.Unlock()
	slices.SortFunc(out, func(a, b volume.Volume) int { return a.Named().Compare(b.Named()) })
	return out, nil
}

// Usage implements volume.Store. A device is allocated as a whole.
func (s *Store) Usage(ctx context.Context) (map[vm.ID]volume.Usage, error) {
	all, err := s.List(ctx)
	if err != nil {
		return nil, err
	}
	out := make(map[vm.ID]volume.Usage, len(all))
	for _, v := range all {
		out[v.ID] = volume.Usage{Size: v.Size, Allocated: v.Size}
	}
	return out, nil
}

// hold finds a volume and keeps others from changing it until release.
func (s *Store) hold(ctx context.Context, ref string) (e *entry, release func(), err error) {
	s.mu.Lock()
	e, err = s.find(ctx, ref)
	s.mu.Unlock()
	if err != nil {
		return nil, nil, err
	}
	if release, err = s.locks.Lock(ctx, e.id); err != nil {
		return nil, nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all[e.id] != e { // it was given back meanwhile
		release()
		return nil, nil, vm.Volumes.Missing(vm.Behalf(ctx), ref)
	}
	return e, release, nil
}

// save replaces the record of e, and its device. Preconditions: the lock of e is held.
func (s *Store) save(e *entry, next recorded, dev *device) (volume.Volume, error) {
	if !reflect.DeepEqual(next, e.rec) {
		if err := record.Write(s.file(e.id), next); err != nil {
			_ = record.Write(s.file(e.id), e.rec) // the new one may be on the disk; without room, the old one still is
			return volume.Volume{}, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e.rec, e.device = next, dev
	return next.Clone(), nil
}

// Update implements volume.Store.
func (s *Store) Update(ctx context.Context, ref string, change func(*volume.Volume)) (volume.Volume, error) {
	v, err := s.update(ctx, ref, change)
	if err != nil {
		return volume.Volume{}, fmt.Errorf("update volume %s: %w", ref, record.Full(err))
	}
	return v, nil
}

func (s *Store) update(ctx context.Context, ref string, change func(*volume.Volume)) (volume.Volume, error) {
	e, release, err := s.hold(ctx, ref)
	if err != nil {
		return volume.Volume{}, err
	}
	defer release()
	asked, next := e.rec.Clone(), e.rec.clone()
	change(&asked)
	if asked.Name != next.Name {
		if next.Lent {
			return volume.Volume{}, errdefs.Preconditionf("its name is that of the volume of a CSI driver")
		}
		return volume.Volume{}, errdefs.Preconditionf("its name is in the configuration of the node; change it there")
	}
	if err := volume.ValidateLabels(asked.Labels); err != nil {
		return volume.Volume{}, err
	}
	next.Labels = asked.Clone().Labels
	return s.save(e, next, e.device)
}

// Resize implements volume.Store. The device must have that size already.
func (s *Store) Resize(ctx context.Context, ref string, size int64) (volume.Volume, error) {
	v, err := s.resize(ctx, ref, size)
	if err != nil {
		return volume.Volume{}, fmt.Errorf("resize volume %s: %w", ref, record.Full(err))
	}
	return v, nil
}

func (s *Store) resize(ctx context.Context, ref string, size int64) (volume.Volume, error) {
	size, err := volume.RoundSize(size)
	if err != nil {
		return volume.Volume{}, err
	}
	e, release, err := s.hold(ctx, ref)
	if err != nil {
		return volume.Volume{}, err
	}
	defer release()
	next := e.rec.clone()
	switch {
	case size < next.Size:
		return volume.Volume{}, errdefs.Invalidf("it has %d bytes and cannot shrink to %d", next.Size, size)
	case size == next.Size:
		return next.Volume, nil
	}
	dev, err := s.identified(e)
	if err != nil {
		return volume.Volume{}, err
	}
	defer e.release(dev)
	if has := whole(dev.id.Size); has != size {
		return volume.Volume{}, errdefs.Preconditionf("its device has %d bytes, and no volume on a device has another size; let the device grow first", has)
	}
	next.Size, next.Device = size, dev.id
	return s.save(e, next, e.device)
}

// Attach implements volume.Store.
func (s *Store) Attach(ctx context.Context, ref string, to vm.ID, as volume.Mode) (volume.Volume, vm.Disk, error) {
	v, d, err := s.attach(ctx, ref, to, as)
	if err != nil {
		return volume.Volume{}, vm.Disk{}, fmt.Errorf("attach volume %s to VM %s: %w", ref, to, record.Full(err))
	}
	return v, d, nil
}

func (s *Store) attach(ctx context.Context, ref string, to vm.ID, as volume.Mode) (v volume.Volume, d vm.Disk, err error) {
	if !to.Valid() {
		return v, d, errdefs.Invalidf("%.100q is not the id of a VM", to)
	}
	e, release, err := s.hold(ctx, ref)
	if err != nil {
		return v, d, err
	}
	defer release()
	if !e.named && !e.rec.Lent {
		return v, d, errdefs.Preconditionf("the configuration of the node does not name its device any more; add %s to it again", e.rec.Path)
	}
	if s.lostSince(e) {
		return v, d, errdefs.Preconditionf("its device is not here since the machine started; its CSI driver must publish it again, as a new start of its pod makes it do")
	}
	next := e.rec.clone()
	has, err := record.Admit(next.Volume, to, as)
	if err != nil {
		return v, d, err
	}
	dev, err := s.claim(e)
	if err != nil {
		return v, d, err
	}
	defer func() { e.release(dev) }()
	if dev.fixed && !as.ReadOnly {
		return v, d, errdefs.Preconditionf("its device %s cannot be written to; attach it to read only", dev.Name())
	}
	if !has {
		next.Attachments = append(next.Attachments, volume.Attachment{VM: to, Mode: as, Since: now()})
	}
	v, err = s.save(e, next, dev)
	return v, vm.Disk{Path: dev.Name(), Format: vm.DiskRaw, ReadOnly: as.ReadOnly, Shared: as.Shared, Device: !dev.file}, err
}

// Detach implements volume.Store.
func (s *Store) Detach(ctx context.Context, ref string, from vm.ID) error {
	if err := s.detach(ctx, ref, from); err != nil {
		return fmt.Errorf("detach volume %s from VM %s: %w", ref, from, record.Full(err))
	}
	return nil
}

func (s *Store) detach(ctx context.Context, ref string, from vm.ID) error {
	e, release, err := s.hold(ctx, ref)
	if err != nil {
		return err
	}
	defer release()
	next, dev := e.rec.clone(), e.device
	next.Attachments = slices.DeleteFunc(next.Attachments, func(a volume.Attachment) bool { return a.VM == from })
	if len(next.Attachments) == 0 {
		dev = nil
	}
	old := e.device
	if _, err := s.save(e, next, dev); err != nil {
		return err
	}
	e.release(old)
	return nil
}

package lvm

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/index"
	"cocoonstack.io/cocoon/internal/volume/record"
)

// Get implements volume.Store.
func (s *Store) Get(ctx context.Context, ref string) (volume.Volume, error) {
	rec, err := s.volumes.Get(ctx, ref)
	return rec.Object, err
}

// List implements volume.Store.
func (s *Store) List(ctx context.Context) ([]volume.Volume, error) {
	return objects(s.volumes.List(ctx))
}

func objects[R index.Record[R]](all []recorded[R], err error) ([]R, error) {
	if err != nil {
		return nil, err
	}
	out := make([]R, len(all))
	for i, r := range all {
		out[i] = r.Object
	}
	return out, nil
}

// Usage implements volume.Store. It asks the kernel.
func (s *Store) Usage(ctx context.Context) (map[vm.ID]volume.Usage, error) {
	all, err := s.volumes.List(ctx)
	if err != nil {
		return nil, err
	}
	out := make(map[vm.ID]volume.Usage, len(all))
	for _, r := range all {
		out[r.Object.ID] = volume.Usage{Size: r.Object.Size, Allocated: s.allocated(r.state)}
	}
	return out, nil
}

// round returns size rounded up to what a logical volume can have. Errors: InvalidArgument.
func (s *Store) round(size int64) (int64, error) {
	size, err := volume.RoundSize(size)
	if err != nil {
		return 0, err
	}
	s.mu.Lock()
	unit := max(s.extent, volume.Block)
	s.mu.Unlock()
	size = (size + unit - 1) / unit * unit
	return size, fits(size)
}

func fits(size int64) error {
	_, err := volume.RoundSize(size)
	return err
}

// Create implements volume.Maker.
func (s *Store) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	v, err := s.create(ctx, spec)
	if err != nil {
		return volume.Volume{}, record.Failed("create", vm.Volumes, spec.Name, err)
	}
	return v, nil
}

func (s *Store) create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	size, err := s.round(spec.Size)
	if err != nil {
		return volume.Volume{}, err
	}
	return s.make(ctx, spec, "", func(ctx context.Context, lv string) (filling, error) {
		return filling{size: size}, s.lvcreate(ctx, lv, size)
	})
}

// filling is what a new volume has.
type filling struct{ size, allocated int64 } // bytes

// make makes a volume. fill makes its logical volume.
func (s *Store) make(ctx context.Context, spec volume.Spec, from vm.ID, fill func(ctx context.Context, lv string) (filling, error)) (volume.Volume, error) {
	if err := spec.Validate(vm.Volumes); err != nil {
		return volume.Volume{}, err
	}
	owner := vm.Behalf(ctx)
	return create(ctx, s, s.volumes, owner, spec.Name, func(id vm.ID, name, lv string) (rec recorded[volume.Volume], err error) {
		f, err := fill(ctx, lv)
		rec.Object = volume.Volume{ID: id, Name: name, Owner: owner, Kind: Kind, Size: f.size, From: string(from), For: spec.For, CreatedAt: now(), Labels: spec.Labels}.Clone()
		rec.Allocated = f.allocated
		return rec, err
	})
}

// create makes an object: its name is taken first, a record names the logical volume, build makes that, and another record makes the
// object exist. If build fails, nothing is left. name may be "".
func create[R index.Record[R]](ctx context.Context, s *Store, x *table[R], owner vm.Owner, name string, build func(id vm.ID, name, lv string) (recorded[R], error)) (R, error) {
	var none R
	if err := ctx.Err(); err != nil {
		return none, err
	}
	id, name, err := x.Reserve(owner, name)
	if err != nil {
		return none, err
	}
	release, err := x.LockID(ctx, id) // settle waits for it
	if err != nil {
		x.Free(owner, name)
		return none, err
	}
	defer release()
	lv := prefix + string(id)
	making := recorded[R]{state: state{Gone: []string{lv}}}
	err = s.guard()
	if err == nil {
		err = record.Write(x.file(id), making)
	}
	if err != nil {
		x.Free(owner, name)
		return none, err
	}
	e := x.Put(id, making, true)
	rec, err := build(id, name, lv)
	if err == nil {
		rec.LV, rec.Gone = lv, nil
		err = record.Write(x.file(id), rec)
	}
	if err != nil {
		x.Free(owner, name)
		undo := context.WithoutCancel(ctx)
		if uerr := errorOf(record.Write(x.file(id), making), func() error { return finish(undo, s, x, e) }); uerr != nil {
			s.cfg.Log.Warn("logical volume that was not completed is left, and removed later", "lv", lv, "err", uerr)
		}
		return none, err
	}
	x.Show(e, rec)
	return rec.Object.Clone(), nil
}

// errorOf returns err, or what next returns if there is none.
func errorOf(err error, next func() error) error {
	if err != nil {
		return err
	}
	return next()
}

// lvcreate makes a logical volume of size zero bytes. It has no device, and LVM gives it none when the host starts.
func (s *Store) lvcreate(ctx context.Context, lv string, size int64) error {
	_, err := s.lvm.run(ctx, "lvcreate", "-y", "-V", bytesOf(size), "-T", s.cfg.Pool, "-n", lv, "--addtag", tag, "-k", "y", "-an", "-W", "n")
	return err
}

// copyOf makes lv a copy of another logical volume, which shares all blocks with it, with at least size bytes.
func (s *Store) copyOf(ctx context.Context, lv, source string, has, size int64) error {
	if _, err := s.lvm.run(ctx, "lvcreate", "-y", "-s", "-n", lv, "--addtag", tag, "-k", "y", "-an", s.vg+"/"+source); err != nil {
		return s.missing(ctx, source, err)
	}
	if size <= has {
		return nil
	}
	return s.extend(ctx, lv, size)
}

// extend makes a logical volume size bytes long. It is no error if it has that size.
func (s *Store) extend(ctx context.Context, lv string, size int64) error {
	_, err := s.lvm.run(ctx, "lvextend", "-y", "-L", bytesOf(size), s.vg+"/"+lv)
	if err == nil {
		return nil
	}
	if all, _, rerr := s.report(ctx); rerr == nil && all[lv].size == size {
		return nil
	}
	return s.missing(ctx, lv, err)
}

func bytesOf(n int64) string { return strconv.FormatInt(n, 10) + "b" }

// Update implements volume.Store.
func (s *Store) Update(ctx context.Context, ref string, change func(*volume.Volume)) (volume.Volume, error) {
	v, err := s.update(ctx, ref, change)
	if err != nil {
		return volume.Volume{}, record.Failed("update", vm.Volumes, ref, err)
	}
	return v, nil
}

func (s *Store) update(ctx context.Context, ref string, change func(*volume.Volume)) (volume.Volume, error) {
	e, release, err := s.volumes.Lock(ctx, ref)
	if err != nil {
		return volume.Volume{}, err
	}
	defer release()
	asked, next := e.Rec.Object.Clone(), e.Rec.Clone()
	change(&asked)
	next.Object.Name, next.Object.Labels = asked.Name, asked.Clone().Labels
	if err := vm.Volumes.ValidateName(asked.Name); err != nil {
		return volume.Volume{}, err
	}
	if err := volume.ValidateLabels(asked.Labels); err != nil {
		return volume.Volume{}, err
	}
	return next.Object.Clone(), s.volumes.Save(e, next)
}

// Resize implements volume.Store. The logical volume grows before its record. If the process is killed in between, New gives the record
// the size of the logical volume.
func (s *Store) Resize(ctx context.Context, ref string, size int64) (volume.Volume, error) {
	v, err := s.resize(ctx, ref, size)
	if err != nil {
		return volume.Volume{}, record.Failed("resize", vm.Volumes, ref, err)
	}
	return v, nil
}

func (s *Store) resize(ctx context.Context, ref string, size int64) (v volume.Volume, err error) {
	if size, err = s.round(size); err != nil {
		return v, err
	}
	e, release, err := s.volumes.Lock(ctx, ref)
	if err != nil {
		return v, err
	}
	defer release()
	next := e.Rec.Clone()
	switch has := next.Object.Size; {
	case size < has:
		return v, errdefs.Invalidf("it has %d bytes and cannot shrink to %d; make a smaller volume and copy the files to it in a guest", has, size)
	case size == has:
		return next.Object, nil
	}
	if err := s.guard(); err != nil {
		return v, err
	}
	if err := s.extend(ctx, next.LV, size); err != nil {
		return v, err
	}
	next.Object.Size = size
	return next.Object.Clone(), s.volumes.Save(e, next)
}

// Delete implements volume.Maker.
func (s *Store) Delete(ctx context.Context, ref string) error {
	if err := s.delete(ctx, ref); err != nil {
		return record.Failed("delete", vm.Volumes, ref, err)
	}
	return nil
}

func (s *Store) delete(ctx context.Context, ref string) error {
	e, release, err := s.volumes.Lock(ctx, ref)
	if err != nil {
		return err
	}
	defer release()
	if v := e.Rec.Object; len(v.Attachments) > 0 {
		return errdefs.Preconditionf("it is attached to %s; detach it there first", v.Users())
	}
	if err := s.unread(e); err != nil {
		return err
	}
	s.close(e)
	return erase(ctx, s, s.volumes, e)
}

// unread returns a FailedPrecondition error while operations read the bytes of e.
func (s *Store) unread(e *entry[volume.Volume]) error {
	if n := s.volumes.Readers(e); n > 0 {
		return errdefs.Preconditionf("%d other operations read it, such as an export; try again when they are done", n)
	}
	return nil
}

// erase removes an object. It is gone when its record says so; if its logical volume cannot be removed now, that is done later.
// Preconditions: the lock of e is held, and nobody uses its device.
func erase[R index.Record[R]](ctx context.Context, s *Store, x *table[R], e *entry[R]) error {
	if err := s.examined(); err != nil {
		return err
	}
	next := recorded[R]{state: state{Gone: append(slices.Clone(e.Rec.Gone), e.Rec.LV)}}
	x.Hide(e, true)
	if err := record.Write(x.file(e.ID), next); err != nil {
		_ = record.Write(x.file(e.ID), e.Rec)
		x.Hide(e, false)
		return err
	}
	x.Empty(e, next)
	if err := finish(context.WithoutCancel(ctx), s, x, e); err != nil {
		s.cfg.Log.Warn("removed logical volume is left, and tried again later", "kind", x.kind.Noun, "id", string(e.ID), "lv", e.Rec.Gone, "err", err)
	}
	return nil
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
	e, release, err := s.volumes.Lock(ctx, ref)
	if err != nil {
		return v, d, err
	}
	defer release()
	has, err := record.Admit(e.Rec.Object, to, as)
	if err == nil && !as.ReadOnly {
		err = s.unread(e)
	}
	if err == nil {
		err = s.claim(ctx, e)
	}
	if err != nil {
		return v, d, err
	}
	next := e.Rec.Clone()
	if !has {
		next.Object.Attachments = append(next.Object.Attachments, volume.Attachment{VM: to, Mode: as, Since: now()})
		if err := s.volumes.Save(e, next); err != nil {
			return v, d, err
		}
	}
	return next.Object, vm.Disk{Path: e.Own.file.Name(), Format: vm.DiskRaw, ReadOnly: as.ReadOnly, Shared: as.Shared, Device: true}, nil
}

// Detach implements volume.Store. The device stays for a while, open exclusively, since a VM that starts again needs it.
func (s *Store) Detach(ctx context.Context, ref string, from vm.ID) error {
	if err := s.detach(ctx, ref, from); err != nil {
		return fmt.Errorf("detach volume %s from VM %s: %w", ref, from, record.Full(err))
	}
	return nil
}

func (s *Store) detach(ctx context.Context, ref string, from vm.ID) error {
	e, release, err := s.volumes.Lock(ctx, ref)
	if err != nil {
		return err
	}
	defer release()
	next := e.Rec.Clone()
	next.Object.Attachments = slices.DeleteFunc(next.Object.Attachments, func(a volume.Attachment) bool { return a.VM == from })
	if len(next.Object.Attachments) == len(e.Rec.Object.Attachments) {
		return nil
	}
	next.Allocated = s.allocated(next.state)
	if err := s.volumes.Save(e, next); err != nil {
		return err
	}
	s.volumes.keep(e, e.Own.file)
	return nil
}

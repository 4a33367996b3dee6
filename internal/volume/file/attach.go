package file

import (
	"context"
	"fmt"
	"os"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/record"
)

// Attach implements volume.Store.
func (s *Store) Attach(ctx context.Context, ref string, to vm.ID, as volume.Mode) (volume.Volume, vm.Disk, error) {
	v, err := s.attach(ctx, ref, to, as)
	if err != nil {
		return volume.Volume{}, vm.Disk{}, fmt.Errorf("attach volume %s to VM %s: %w", ref, to, record.Full(err))
	}
	return v, vm.Disk{Path: s.volumes.data(v.ID), Format: vm.DiskRaw, ReadOnly: as.ReadOnly, Shared: as.Shared}, nil
}

func (s *Store) attach(ctx context.Context, ref string, to vm.ID, as volume.Mode) (volume.Volume, error) {
	if !to.Valid() {
		return volume.Volume{}, errdefs.Invalidf("%.100q is not the id of a VM", to)
	}
	e, unlock, err := s.volumes.Lock(ctx, ref)
	if err != nil {
		return volume.Volume{}, err
	}
	defer unlock()
	data, err := s.volumes.openData(e.Rec, e.Rec.Size, os.O_RDONLY) // only a file that is fit for use
	if err != nil {
		return volume.Volume{}, err
	}
	data.Close()
	v := e.Rec.Clone()
	has, err := record.Admit(v, to, as)
	if err != nil || has {
		return v, err
	}
	if n := s.volumes.Readers(e); n > 0 && !as.ReadOnly {
		return v, errdefs.Preconditionf("%d other operations read it, such as an export or a copy; try again when they are done", n)
	}
	v.Attachments = append(v.Attachments, volume.Attachment{VM: to, Mode: as, Since: now()})
	return v.Clone(), s.volumes.Save(e, v)
}

// Detach implements volume.Store.
func (s *Store) Detach(ctx context.Context, ref string, from vm.ID) error {
	_, err := s.volumes.change(ctx, ref, func(v *volume.Volume) error {
		v.Attachments = slices.DeleteFunc(v.Attachments, func(a volume.Attachment) bool { return a.VM == from })
		return nil
	})
	if err != nil {
		return fmt.Errorf("detach volume %s from VM %s: %w", ref, from, record.Full(err))
	}
	return nil
}

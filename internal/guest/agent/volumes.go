package agent

import (
	"context"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

var (
	_ guest.VolumeKeeper   = (*session)(nil)
	_ guest.VolumeAttacher = (*session)(nil)
)

// PutVolume implements guest.VolumeKeeper.
func (s *session) PutVolume(ctx context.Context, v vm.Volume) error {
	r := &guestv1.PutVolumeRequest{Volume: volume(v)}
	for _, f := range v.Files {
		r.Files = append(r.Files, &guestv1.VolumeFile{Path: f.Path, Data: f.Data, Mode: f.Mode, Uid: f.UID})
	}
	_, err := s.client.PutVolume(ctx, r)
	return s.failure(ctx, "send volume "+v.Name+" to the guest", err)
}

// AttachVolume implements guest.VolumeAttacher.
func (s *session) AttachVolume(ctx context.Context, v vm.Volume, path string) error {
	m := volume(v)
	m.Serial = v.Disk.Ref
	_, err := s.client.AttachVolume(ctx, &guestv1.AttachVolumeRequest{Volume: m, Path: path})
	return s.failure(ctx, "mount volume "+v.Name+" in the guest", err)
}

// DetachVolume implements guest.VolumeAttacher.
func (s *session) DetachVolume(ctx context.Context, volume, serial string) error {
	_, err := s.client.DetachVolume(ctx, &guestv1.DetachVolumeRequest{Name: volume, Serial: serial})
	return s.failure(ctx, "unmount volume "+volume+" in the guest", err)
}

// GrowVolume implements guest.VolumeAttacher.
func (s *session) GrowVolume(ctx context.Context, volume, serial string, size int64) error {
	_, err := s.client.GrowVolume(ctx, &guestv1.GrowVolumeRequest{Name: volume, Serial: serial, Size: size})
	return s.failure(ctx, "grow volume "+volume+" in the guest", err)
}

func volume(v vm.Volume) *guestv1.Volume {
	m := &guestv1.Volume{Name: v.Name, Kind: string(v.Kind), Memory: v.Memory, SizeLimit: v.SizeLimit, Group: v.Group}
	if d := v.Disk; d != nil {
		m.ReadOnly, m.FsType, m.GroupOnMismatch = d.ReadOnly, d.FSType, d.GroupOnMismatch
	}
	if d := v.Dir; d != nil {
		m.ReadOnly, m.GroupOnMismatch = d.ReadOnly, d.GroupOnMismatch
	}
	if n := v.NFS; n != nil {
		m.Server, m.Path, m.Options, m.ReadOnly = n.Server, n.Path, n.Options, n.ReadOnly
	}
	return m
}

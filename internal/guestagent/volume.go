package guestagent

import (
	"context"
	"slices"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// PutVolume implements guestv1.GuestServer.
func (s *Server) PutVolume(ctx context.Context, r *guestv1.PutVolumeRequest) (*guestv1.PutVolumeReply, error) {
	if s.cfg.Volumes == nil {
		return nil, errNoVolumes()
	}
	v := volume(r.GetVolume())
	for _, f := range r.GetFiles() {
		v.Files = append(v.Files, vm.VolumeFile{Path: f.GetPath(), Data: f.GetData(), Mode: f.GetMode(), UID: f.Uid})
	}
	if err := (vm.Spec{Volumes: []vm.Volume{v}}).ValidateVolumes(); err != nil {
		return nil, err
	}
	if err := s.mayWrite(); err != nil {
		return nil, err
	}
	return &guestv1.PutVolumeReply{}, s.cfg.Volumes.Put(ctx, v)
}

// mount makes and mounts the volumes of a Setup, also in the rooms of containers, and returns the groups that may use
// them.
func (s *Server) mount(ctx context.Context, r *guestv1.SetupRequest, rooms map[string]*guestv1.Container) (groups []uint32, err error) {
	var spec vm.Spec
	for _, m := range r.GetVolumes() {
		v := volume(m)
		spec.Volumes = append(spec.Volumes, v)
		if v.Group != nil && !slices.Contains(groups, uint32(*v.Group)) {
			groups = append(groups, uint32(*v.Group))
		}
	}
	spec.Mounts = mounts(r.GetMounts())
	where := map[string][]vm.Mount{"/": spec.Mounts}
	for folder, c := range rooms {
		where[folder] = mounts(c.GetMounts())
		spec.Containers = append(spec.Containers, vm.Container{Name: c.GetName(), Mounts: where[folder]})
	}
	if len(spec.Volumes) == 0 && len(spec.Mounts) == 0 && len(spec.Containers) == 0 {
		return nil, nil
	}
	if s.cfg.Volumes == nil {
		return nil, errNoVolumes()
	}
	if err := spec.ValidateVolumes(); err != nil {
		return nil, err
	}
	return groups, s.cfg.Volumes.Mount(ctx, spec.Volumes, where)
}

func mounts(list []*guestv1.Mount) (out []vm.Mount) {
	for _, m := range list {
		out = append(out, vm.Mount{Volume: m.GetVolume(), Path: m.GetPath(), SubPath: m.GetSubPath(), ReadOnly: m.GetReadOnly()})
	}
	return out
}

func volume(m *guestv1.Volume) vm.Volume {
	return vm.Volume{
		Name: m.GetName(), Kind: vm.VolumeKind(m.GetKind()), Memory: m.GetMemory(), SizeLimit: m.GetSizeLimit(), Group: m.Group,
	}
}

func errNoVolumes() error { return errdefs.Unsupportedf("this guest's agent does not support volumes") }

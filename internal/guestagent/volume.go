package guestagent

import (
	"context"
	"fmt"
	"slices"
	"strings"

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

// mounted is what is known of volumes when they are mounted.
type mounted struct {
	groups []uint32         // that may use them
	lacks  map[string]error // by the folder of a room: what of an image's files is to be mounted there, but does not exist
}

// mount makes and mounts the volumes of a Setup, also in the rooms of containers.
func (s *Server) mount(ctx context.Context, r *guestv1.SetupRequest, rooms map[string]*guestv1.Container) (done mounted, err error) {
	var spec vm.Spec
	for _, m := range r.GetVolumes() {
		v := volume(m)
		spec.Volumes = append(spec.Volumes, v)
		if v.Kind == vm.VolumeNFS && s.cfg.Volumes != nil {
			s.cfg.Volumes.KnownAs(m.GetSerial())
		}
		if v.Group != nil && !slices.Contains(done.groups, uint32(*v.Group)) {
			done.groups = append(done.groups, uint32(*v.Group))
		}
	}
	spec.Mounts = mounts(r.GetMounts())
	where := map[string][]vm.Mount{"/": spec.Mounts}
	for folder, c := range rooms {
		where[folder] = mounts(c.GetMounts())
		spec.Containers = append(spec.Containers, vm.Container{Name: c.GetName(), Mounts: where[folder]})
	}
	if len(spec.Volumes) == 0 && len(spec.Mounts) == 0 && len(spec.Containers) == 0 {
		return done, nil
	}
	if s.cfg.Volumes == nil {
		return done, errNoVolumes()
	}
	if err := spec.ValidateVolumes(); err != nil {
		return done, err
	}
	images, err := s.images(r)
	if err != nil {
		return done, err
	}
	done.lacks, err = s.cfg.Volumes.Mount(ctx, spec.Volumes, images, where)
	return done, err
}

// images mounts the images whose files are volumes, and returns their folders by the names of the volumes.
func (s *Server) images(r *guestv1.SetupRequest) (folders map[string]string, err error) {
	for _, m := range r.GetVolumes() {
		if vm.VolumeKind(m.GetKind()) != vm.VolumeImage || s.mainProcess() != nil { // they were mounted before the process began
			continue
		}
		if s.cfg.Rooms == nil {
			return nil, errdefs.Unsupportedf("this guest's agent does not support volumes with the files of images")
		}
		if folders == nil {
			folders = map[string]string{}
		}
		if folders[m.GetName()], err = s.cfg.Rooms.Image(m.GetName(), m.GetLayers()); err != nil {
			return nil, fmt.Errorf("volume %s: %w", m.GetName(), err)
		}
	}
	return folders, nil
}

func mounts(list []*guestv1.Mount) (out []vm.Mount) {
	for _, m := range list {
		out = append(out, vm.Mount{Volume: m.GetVolume(), Path: m.GetPath(), SubPath: m.GetSubPath(), ReadOnly: m.GetReadOnly(), Device: m.GetDevice()})
	}
	return out
}

func volume(m *guestv1.Volume) vm.Volume {
	v := vm.Volume{
		Name: m.GetName(), Kind: vm.VolumeKind(m.GetKind()), Memory: m.GetMemory(), SizeLimit: m.GetSizeLimit(), Group: m.Group,
		Image: imageName(m),
	}
	if v.Kind == vm.VolumeDisk { // the guest knows it only by its serial
		v.Disk = &vm.VolumeUse{Ref: m.GetSerial(), ReadOnly: m.GetReadOnly(), FSType: m.GetFsType(), GroupOnMismatch: m.GetGroupOnMismatch()}
	}
	if v.Kind == vm.VolumeDir { // the guest knows it only by its tag
		v.Dir = &vm.HostDir{Path: "/" + m.GetSerial(), ReadOnly: m.GetReadOnly(), GroupOnMismatch: m.GetGroupOnMismatch()}
	}
	if v.Kind == vm.VolumeNFS {
		v.NFS = &vm.NFS{Server: m.GetServer(), Path: m.GetPath(), Options: m.GetOptions(), ReadOnly: m.GetReadOnly()}
	}
	return v
}

// imageName stands for the name of the image, which the guest is not told.
func imageName(m *guestv1.Volume) string { return strings.Join(m.GetLayers(), ",") }

func errNoVolumes() error { return errdefs.Unsupportedf("this guest's agent does not support volumes") }

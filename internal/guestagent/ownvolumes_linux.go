package guestagent

import (
	"context"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file is about volumes that only one container has, which was added to the guest: the files of images, and disks that it sees as devices.

// disksOf returns the serials of the disks that a container needs.
func disksOf(m *guestv1.Container) []string {
	all := append([]string(nil), m.GetLayers()...)
	for _, v := range m.GetVolumes() {
		all = append(all, v.GetLayers()...)
		if v.GetSerial() != "" {
			all = append(all, v.GetSerial())
		}
	}
	return all
}

// devicesOf returns the names of the volumes of m that are devices.
func devicesOf(m *guestv1.Container) (names []string) {
	for _, v := range m.GetVolumes() {
		if vm.VolumeKind(v.GetKind()) == vm.VolumeDisk {
			names = append(names, v.GetName())
		}
	}
	return names
}

// mountAdded makes the mounts of a container that is added, in their order, in its file system at folder. Preconditions: setup is held.
// Errors: NotFound if an image lacks the part that is to be mounted, InvalidArgument, Unavailable.
func (s *Server) mountAdded(ctx context.Context, folder string, m *guestv1.Container) error {
	images := map[string]string{} // folders with their files, by volume
	for _, v := range m.GetVolumes() {
		switch vm.VolumeKind(v.GetKind()) {
		case vm.VolumeImage:
			dir, err := s.cfg.Rooms.Image(v.GetName(), v.GetLayers())
			if err != nil {
				return err
			}
			images[v.GetName()] = dir
		case vm.VolumeDisk:
			if err := s.cfg.Volumes.Attach(ctx, volume(v), "", nil); err != nil {
				return err
			}
		default:
			return errdefs.Invalidf("volume %s of kind %q cannot be that of one container", v.GetName(), v.GetKind())
		}
	}
	for _, one := range mounts(m.GetMounts()) {
		var err error
		if dir, ok := images[one.Volume]; ok {
			err = s.cfg.Volumes.MountImage(folder, dir, one)
		} else {
			err = s.cfg.Volumes.MountLater(ctx, folder, []vm.Mount{one})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

package enginetest

import (
	"context"
	"maps"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

var (
	_ guest.VolumeAttacher  = (*session)(nil)
	_ guest.MountReporter   = (*session)(nil)
	_ hypervisor.DiskGrower = (*Guest)(nil)
)

// GuestVolume is a volume on a disk, as a guest has it.
type GuestVolume struct {
	Serial string `json:"serial"`
	Path   string `json:"path"`
	Size   int64  `json:"size"` // bytes of its file system that the guest was asked to use; 0: never asked
}

// volumesOf are the volumes on disks that a guest mounts when it is set up.
func volumesOf(s guest.Setup) map[string]GuestVolume {
	all := map[string]GuestVolume{}
	mounts := slices.Clone(s.Mounts)
	for _, c := range s.Containers {
		mounts = append(mounts, c.Mounts...)
	}
	for _, v := range s.Volumes {
		if v.Kind != vm.VolumeDisk {
			continue
		}
		g := GuestVolume{Serial: s.VolumeSerials[v.Name]}
		if i := slices.IndexFunc(mounts, func(m vm.Mount) bool { return m.Volume == v.Name }); i >= 0 {
			g.Path = mounts[i].Path
		}
		all[v.Name] = g
	}
	return all
}

// Busy makes programs in the guest use its volumes, until it is called with false.
func (g *Guest) Busy(busy bool) { g.change(func() { g.busy = busy }) }

// Volumes are the volumes on disks that the guest has, by name.
func (g *Guest) Volumes() map[string]GuestVolume {
	p, _ := g.look()
	return p.Volumes
}

// Serials are those of the disks that the guest has.
func (g *Guest) Serials() []string {
	p, _ := g.look()
	return p.Serials
}

// Told are the sizes of disks that the guest was told, in bytes, by serial.
func (g *Guest) Told() map[string]int64 {
	p, _ := g.look()
	return p.Told
}

// AttachVolume implements guest.VolumeAttacher.
func (s *session) AttachVolume(_ context.Context, v vm.Volume, path string) error {
	return s.withVolumes("agent.AttachVolume", func(all map[string]GuestVolume) error {
		if !slices.Contains(s.g.p.Serials, v.Disk.Ref) {
			return errdefs.Unavailablef("the guest has no disk with the serial %s", v.Disk.Ref)
		}
		if path == "/bad" {
			return errdefs.Preconditionf("the disk holds no file system")
		}
		if _, has := all[v.Name]; !has {
			all[v.Name] = GuestVolume{Serial: v.Disk.Ref, Path: path}
		}
		return nil
	})
}

// DetachVolume implements guest.VolumeAttacher.
func (s *session) DetachVolume(_ context.Context, volume, _ string) error {
	return s.withVolumes("agent.DetachVolume", func(all map[string]GuestVolume) error {
		if _, has := all[volume]; has && s.g.busy {
			return errdefs.Preconditionf("the volume is in use")
		}
		delete(all, volume)
		return nil
	})
}

// GrowVolume implements guest.VolumeAttacher.
func (s *session) GrowVolume(_ context.Context, volume, serial string, size int64) error {
	return s.withVolumes("agent.GrowVolume", func(all map[string]GuestVolume) error {
		v, has := all[volume]
		if !has || v.Serial != serial {
			return errdefs.Unavailablef("the guest has no volume %s", volume)
		}
		v.Size = size
		all[volume] = v
		return nil
	})
}

// withVolumes runs change with a copy of the guest's volumes, which replaces them unless it fails. A fault call+" done" comes when
// they are changed.
func (s *session) withVolumes(call string, change func(map[string]GuestVolume) error) (err error) {
	if err := s.alive(call); err != nil {
		return err
	}
	s.g.change(func() {
		all := maps.Clone(s.g.p.Volumes)
		if all == nil {
			all = map[string]GuestVolume{}
		}
		if err = change(all); err == nil {
			s.g.p.Volumes = all
		}
	})
	if err != nil {
		return err
	}
	return s.alive(call + " done")
}

// Mounts implements guest.MountReporter: a guest that is busy has mounted every disk.
func (s *session) Mounts(context.Context, string) (at []string, err error) {
	s.g.change(func() {
		if s.g.busy {
			at = []string{"/mnt"}
		}
	})
	return at, s.alive("agent.Mounts")
}

// GrowDisk implements hypervisor.DiskGrower.
func (g *Guest) GrowDisk(_ context.Context, serial string, size int64) error {
	return g.w.around("driver.GrowDisk", func() (err error) {
		g.change(func() {
			if !slices.Contains(g.p.Serials, serial) {
				err = errdefs.Invalidf("the VM has no disk %s", serial)
				return
			}
			told := maps.Clone(g.p.Told)
			if told == nil {
				told = map[string]int64{}
			}
			told[serial] = size
			g.p.Told = told
		})
		return err
	})
}

package vm

import (
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// SharedVolumes returns the volumes of s that other VMs may write to at the same time.
func (s Spec) SharedVolumes() (out []Volume) {
	for _, v := range s.DiskVolumes() {
		if v.Disk.Shared {
			out = append(out, v)
		}
	}
	return out
}

// validateShared refuses to share a volume whose file system only one guest may have mounted, and one that is no plain disk.
func (s Spec) validateShared() error {
	root, _ := BootVolume(s.Image)
	for _, v := range s.SharedVolumes() {
		dev := DiskDevice{}
		if s.Hardware != nil {
			dev = s.Hardware.Disks[v.Name]
		}
		switch {
		case v.Name == root:
			return errdefs.Invalidf("volume %s is shared, and the guest boots from it, so another guest would destroy its file system; boot from another volume, or do not share this one", v.Name)
		case s.mounted(v.Name):
			return errdefs.Invalidf("volume %s is shared, and a file system that two guests mount is destroyed; leave out its path or use its device, or do not share it", v.Name)
		case dev.CDROM:
			return errdefs.Invalidf("volume %s is shared, and a CD-ROM cannot be; make it a disk, or do not share it", v.Name)
		case dev.Bus == DiskUSB:
			return errdefs.Invalidf("volume %s is shared, and a disk on usb cannot be; use virtio, scsi or sata, or do not share it", v.Name)
		}
	}
	return nil
}

// mounted reports whether a file system on the volume is mounted for the guest.
func (s Spec) mounted(volume string) bool {
	all := slices.Clip(s.Mounts)
	for _, c := range s.Containers {
		all = append(all, c.Mounts...)
	}
	return slices.ContainsFunc(all, func(m Mount) bool { return m.Volume == volume && !m.Device })
}

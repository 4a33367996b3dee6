package kubevirt

import (
	"slices"

	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"
)

// shareable reports whether other VMs may use the volume of d at the same time.
func shareable(d v1.Disk) bool { return d.Shareable != nil && *d.Shareable }

// Shareable reports whether several machines may use the volume at the same time.
func Shareable(s *v1.VirtualMachineInstanceSpec, volume string) bool {
	return slices.ContainsFunc(s.Domain.Devices.Disks, func(d v1.Disk) bool { return d.Name == volume && shareable(d) })
}

// shareable refuses a disk that VMs cannot share.
func (c *check) shareable(d v1.Disk, at *field.Path) {
	refuse := func(at *field.Path, why string) { c.errs = append(c.errs, field.Forbidden(at, why)) }
	i := slices.IndexFunc(c.spec.Volumes, func(v v1.Volume) bool { return v.Name == d.Name })
	if !shareable(d) || i < 0 {
		return
	}
	switch v := c.spec.Volumes[i]; {
	case v.HostDisk != nil:
		refuse(at.Child("shareable"), "it is a file of the node; use hostDisk.shared")
	case v.PersistentVolumeClaim == nil && v.DataVolume == nil:
		refuse(at.Child("shareable"), "only a persistentVolumeClaim or a dataVolume can be shared, because no other machine can have this volume")
	case rootVolume(c.spec) == &c.spec.Volumes[i]:
		refuse(at.Child("shareable"), "the guest boots from it, and a file system that two guests mount is destroyed; share another disk")
	case d.CDRom != nil:
		refuse(at.Child("shareable"), "a CD-ROM cannot be shared; use disk")
	case d.Disk != nil && d.Disk.Bus == v1.DiskBusUSB:
		refuse(at.Child("shareable"), "a disk on usb cannot be shared; use virtio, scsi or sata")
	}
	if d.Cache != "" && d.Cache != v1.CacheNone {
		refuse(at.Child("cache"), "a disk that is shared has the cache none; set it, or leave it out")
	}
}

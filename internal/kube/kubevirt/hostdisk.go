package kubevirt

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// hostDisks returns which volumes of the pod are files of the node and disks of the guest.
func hostDisks(s *v1.VirtualMachineInstanceSpec) map[string]contract.HostDisk {
	var out map[string]contract.HostDisk
	for _, v := range s.Volumes {
		d := v.HostDisk
		if d == nil {
			continue
		}
		if out == nil {
			out = map[string]contract.HostDisk{}
		}
		out[v.Name] = contract.HostDisk{Capacity: d.Capacity.Value(), Shared: d.Shared != nil && *d.Shared}
	}
	return out
}

// hostDiskVolume returns the volume of the pod for a file of the node.
func hostDiskVolume(v v1.Volume) corev1.Volume {
	kind := corev1.HostPathFile
	if v.HostDisk.Type == v1.HostDiskExistsOrCreate {
		kind = corev1.HostPathFileOrCreate
	}
	return corev1.Volume{Name: v.Name, VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: v.HostDisk.Path, Type: &kind}}}
}

// hostDisk refuses a file that no node can have.
func (c *check) hostDisk(d *v1.HostDisk, at *field.Path) {
	if d == nil {
		return
	}
	only(c, at.Child("type"), d.Type, v1.HostDiskExists, v1.HostDiskExistsOrCreate)
	if d.Path == "" {
		c.errs = append(c.errs, field.Required(at.Child("path"), "name the file of the node"))
	} else if err := (vm.HostDisk{Path: d.Path}).Validate(); err != nil {
		c.invalid(at.Child("path"), d.Path, err.Error())
	}
	switch capacity := d.Capacity.Value(); {
	case d.Type == v1.HostDiskExistsOrCreate && capacity <= 0:
		c.invalid(at.Child("capacity"), d.Capacity.String(), "must be more than 0 with DiskOrCreate, such as 1Gi")
	case d.Type == v1.HostDiskExists && capacity != 0:
		c.invalid(at.Child("capacity"), d.Capacity.String(), "is for a file that is made; use DiskOrCreate, or leave it out")
	case capacity > vm.MaxStorage:
		c.invalid(at.Child("capacity"), d.Capacity.String(), "is more than a disk can have")
	}
}

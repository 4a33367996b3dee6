package engine

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file plugs disks for one container of a sandbox: the layers of images that it mounts, and block devices of the node. Each disk is
// plugged once. It is unplugged with the last container that has it.

// ownDisk is a volume of a container that is disks: an image, or a device.
type ownDisk struct {
	volume string
	image  *image.Image
	device vm.Disk // without an image
}

// ownDisks returns the volumes of c that are disks. It changes nothing.
// Errors: as of the image store, InvalidArgument for an image that boots itself, FailedPrecondition for what is no block device.
func (m *machine) ownDisks(ctx context.Context, c vm.Container) (out []ownDisk, err error) {
	for _, v := range c.Volumes {
		o := ownDisk{volume: v.Name}
		switch {
		case v.Kind == vm.VolumeImage:
			var img image.Image
			if img, err = m.images.Get(ctx, v.Image); err == nil && img.Type != vm.ImageOCI {
				err = errdefs.Invalidf("image %s boots itself, so its files cannot be mounted", v.Image)
			}
			o.image = &img
		case v.HostDisk != nil:
			o.device, err = m.deviceFor(m.id, *v.HostDisk)
		default:
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", v.Name, err)
		}
		out = append(out, o)
	}
	return out, nil
}

// deviceFor returns the disk of the VM id that is a block device of the node, which no other running VM uses unless both only read it.
func (n *node) deviceFor(id vm.ID, d vm.HostDisk) (vm.Disk, error) {
	path, err := filepath.EvalSymlinks(d.Path)
	if err != nil {
		return vm.Disk{}, errdefs.Preconditionf("%w", err)
	}
	st, err := os.Stat(path)
	if err != nil {
		return vm.Disk{}, errdefs.Preconditionf("%w", err)
	}
	if st.Mode()&(os.ModeDevice|os.ModeCharDevice) != os.ModeDevice {
		return vm.Disk{}, errdefs.Preconditionf("%s is no block device", d.Path)
	}
	for _, other := range n.vms.all() {
		r := other.record()
		if r.ID == id || r.State != vm.StateRunning {
			continue
		}
		for _, o := range r.Disks {
			together := o.ReadOnly && d.ReadOnly
			if o.Role == vm.RoleHost && o.Path == path && !together {
				return vm.Disk{}, errdefs.Preconditionf("the device %s is a disk of another running VM; delete its pod first", path)
			}
		}
	}
	return vm.Disk{Path: path, Format: vm.DiskRaw, Device: true, ReadOnly: d.ReadOnly, Role: vm.RoleHost}, nil
}

// planOwnDisks returns what is to be known about the volumes own of a container, and add with the disks to plug for them. disks are those that the
// guest has.
func (m *machine) planOwnDisks(ctx context.Context, own []ownDisk, disks, add []vm.Disk) (volumes []vm.ImageVolume, all []vm.Disk, err error) {
	for _, o := range own {
		known := vm.ImageVolume{Volume: o.volume}
		var more []vm.Disk
		if o.image == nil {
			known.Layers, more, err = pluggedDevice(slices.Concat(disks, add), o.device)
		} else {
			var layers []vm.Disk
			if layers, err = m.images.Base(ctx, *o.image); err == nil {
				known.ImageDigest = o.image.ID
				known.Layers, more, err = plugged(slices.Concat(disks, add), layers)
			}
		}
		if err != nil {
			return nil, nil, fmt.Errorf("volume %s: %w", o.volume, err)
		}
		volumes, add = append(volumes, known), append(slices.Clip(add), more...)
	}
	return volumes, add, nil
}

// pluggedDevice is plugged for a device of the node.
func pluggedDevice(disks []vm.Disk, d vm.Disk) (serials []string, add []vm.Disk, err error) {
	used := map[string]bool{}
	for _, o := range disks {
		used[o.Serial] = true
		if o.Role == vm.RoleHost && o.Path == d.Path {
			if o.ReadOnly && !d.ReadOnly {
				return nil, nil, errdefs.Preconditionf("another container of the pod has the device %s read-only, and the guest has it once", d.Path)
			}
			return []string{o.Serial}, nil, nil
		}
	}
	number := 0
	for used[vm.HostDiskSerial(number)] {
		number++
	}
	d.Serial = vm.HostDiskSerial(number)
	if d.Port, err = portsOf(disks).take(); err != nil {
		return nil, nil, err
	}
	return []string{d.Serial}, []vm.Disk{d}, nil
}

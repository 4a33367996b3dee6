package engine

import (
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hostdir"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file gives VMs files of the node as disks: only below folders that its operator allows to the owner of the VM. That is compared when a VM is
// created and each time that it starts. The driver opens the files, and locks those that are not shared; a lock that another process has
// is a failed start.

// designHostDisks checks the files of the node that r asks for. It changes nothing.
func (n *node) designHostDisks(r vm.Record) error {
	if len(r.Spec.HostDisks()) > 0 && r.ImageType == vm.ImageOCI {
		return errdefs.Invalidf("image %s is a container image, whose guest has no disks of the node; use a disk image, or a folder of the node", r.Spec.Image)
	}
	for _, v := range r.Spec.HostDisks() {
		if asked(r, v) {
			if _, err := n.deviceFor(r.ID, *v.HostDisk); err != nil {
				return fmt.Errorf("volume %s: %w", v.Name, err)
			}
			continue
		}
		allowed, err := n.freeHostDisk(r, v)
		if err == nil && v.HostDisk.Capacity == 0 {
			err = present(allowed.Path, v.HostDisk.Path)
		}
		if err != nil {
			return fmt.Errorf("volume %s: %w", v.Name, err)
		}
	}
	return nil
}

func present(root, path string) error {
	f, err := hostdir.Open(root, path, false, true)
	if err == nil {
		err = f.Close()
	}
	return err
}

// freeHostDisk returns the entry by which r may have the file v, which no other running VM uses unless all share it or only read it.
// Errors: FailedPrecondition.
func (n *node) freeHostDisk(r vm.Record, v vm.Volume) (hostdir.Allowed, error) {
	d := *v.HostDisk
	allowed, err := n.cfg.HostPaths.Find(r.Owner.Namespace, d.Path, !d.ReadOnly)
	if err != nil {
		return allowed, err
	}
	for _, m := range n.vms.all() {
		other := m.record()
		if other.ID == r.ID || other.State != vm.StateRunning {
			continue
		}
		for _, o := range other.Spec.HostDisks() {
			h := o.HostDisk
			together := h.Shared && d.Shared || h.ReadOnly && d.ReadOnly
			if h.Path == d.Path && !together {
				return allowed, errdefs.Preconditionf("the file %s of the node is a disk of another running VM; stop that VM, or let both share it", d.Path)
			}
		}
	}
	return allowed, nil
}

// withHostDisks returns disks with the files of the node that r has, and makes those that are missing and may be made. Those that disks has already keep
// their places. The one from which the guest boots comes first. It is idempotent.
func (n *node) withHostDisks(r vm.Record, disks []vm.Disk) ([]vm.Disk, error) {
	root, _ := vm.BootVolume(r.Spec.Image)
	disks = slices.Clone(disks)
	for i, v := range r.Spec.HostDisks() {
		d, err := n.hostDisk(r, v)
		if err != nil {
			return nil, fmt.Errorf("volume %s: %w", v.Name, err)
		}
		d.Serial = vm.HostDiskSerial(i)
		at := slices.IndexFunc(disks, func(o vm.Disk) bool { return o.Serial == d.Serial })
		switch {
		case at >= 0:
			disks[at] = d
		case v.Name == root:
			disks = slices.Insert(disks, 0, d)
		default:
			disks = append(disks, d)
		}
	}
	return disks, nil
}

// asked reports whether the kubelet of the node has asked for v, a device for r. A record of a VM that is no sandbox may say so, too.
func asked(r vm.Record, v vm.Volume) bool { return v.HostDisk.Trusted && r.Spec.Sandbox }

// hostDisk returns the disk that is the file or the device v of the node, and makes a file that is missing and may be made.
func (n *node) hostDisk(r vm.Record, v vm.Volume) (vm.Disk, error) {
	h := *v.HostDisk
	if asked(r, v) {
		return n.deviceFor(r.ID, h)
	}
	allowed, err := n.freeHostDisk(r, v)
	if err == nil && h.Capacity > 0 && !allowed.ReadOnly {
		err = hostdir.CreateData(allowed.Path, h.Path, h.Capacity)
	}
	if err == nil {
		err = present(allowed.Path, h.Path)
	}
	return vm.Disk{Path: h.Path, Root: allowed.Path, Format: vm.DiskRaw, ReadOnly: h.ReadOnly, Shared: h.Shared, Role: vm.RoleHost}, err
}

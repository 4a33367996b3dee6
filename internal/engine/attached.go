package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// This file attaches volumes of the volume store to VMs. The store records who uses a volume. A VM keeps its volumes while it is
// stopped or hibernated, and until it is removed.

// designAttached finds the volumes that r asks for. It changes nothing.
func (n *node) designAttached(ctx context.Context, r *vm.Record) error {
	for _, v := range r.Spec.DiskVolumes() {
		if n.volumes == nil {
			return errdefs.Unsupportedf("volume %s: this node keeps no volumes", v.Name)
		}
		got, err := n.volumes.Get(ctx, v.Disk.Ref)
		if err == nil {
			_, err = got.Admits(r.ID, volume.ModeOf(*v.Disk))
		}
		if err != nil {
			return fmt.Errorf("volume %s: %w", v.Name, err)
		}
		if i := slices.IndexFunc(r.Attached, func(a vm.AttachedVolume) bool { return a.ID == got.ID }); i >= 0 {
			return errdefs.Invalidf("the volumes %s and %s are the same disk %s; leave one out", r.Attached[i].Volume, v.Name, got.Name)
		}
		r.Attached = append(r.Attached, vm.AttachedVolume{Volume: v.Name, ID: got.ID, Serial: volume.Serial(got.ID)})
	}
	return nil
}

// volumesOf are the volumes that are attached to a VM.
type volumesOf struct {
	disks    []vm.Disk           // all disks of the VM, with those of the volumes
	attached []vm.AttachedVolume // with the present sizes
	grown    []string            // those that can be written to and are larger than on record, by name
}

// withVolumes attaches the volumes of r, and returns them with disks. Those that disks has already keep their places: saved state knows
// the disks by them. The volume from which the guest boots comes first. back, if not nil, undoes that. It is idempotent.
func (n *node) withVolumes(ctx context.Context, r vm.Record, disks []vm.Disk, back *undo.Stack) (volumesOf, error) {
	if len(r.Attached) == 0 {
		return volumesOf{disks: disks, attached: r.Attached}, nil
	}
	ctx = vm.OnBehalf(ctx, r.Owner)
	gone := func(d vm.Disk) bool {
		return d.Role == vm.RoleVolume && !slices.ContainsFunc(r.Attached, func(a vm.AttachedVolume) bool { return a.Serial == d.Serial })
	}
	out := volumesOf{disks: slices.DeleteFunc(slices.Clone(disks), gone)}
	root, _ := vm.BootVolume(r.Spec.Image)
	for _, a := range r.Attached {
		i := diskVolume(r.Spec, a.Volume)
		if i < 0 {
			return out, errdefs.DataLossf("the record of the VM is damaged: it has volume %s attached and does not ask for it; remove the VM, which leaves the volume as it is", a.Volume)
		}
		if back != nil {
			back.Push(func(ctx context.Context) error { return n.releaseVolume(ctx, a.ID, r.ID) })
		}
		got, d, err := n.volumes.Attach(ctx, string(a.ID), r.ID, volume.ModeOf(*r.Spec.Volumes[i].Disk))
		if err != nil {
			return out, fmt.Errorf("attach volume %s: %w", a.Volume, err)
		}
		d.Serial, d.Role, d.Port = a.Serial, vm.RoleVolume, portOf(disks, a.Serial)
		if a.Size != got.Size && !d.ReadOnly {
			out.grown = append(out.grown, a.Volume)
		}
		a.Size = got.Size
		out.attached = append(out.attached, a)
		at := slices.IndexFunc(out.disks, func(o vm.Disk) bool { return o.Role == vm.RoleVolume && o.Serial == a.Serial })
		switch {
		case a.Volume == root:
			out.disks = slices.Insert(withoutDisk(out.disks, a.Serial), 0, d)
		case at >= 0:
			out.disks[at] = d
		default:
			out.disks = append(out.disks, d)
		}
	}
	return out, nil
}

// diskVolume returns the index in s.Volumes of the volume of the store with that name; -1: there is none.
func diskVolume(s vm.Spec, name string) int {
	return slices.IndexFunc(s.Volumes, func(v vm.Volume) bool { return v.Name == name && v.Disk != nil })
}

// unsized returns attached as those of a guest of which it is not known which sizes it knows.
func unsized(attached []vm.AttachedVolume) []vm.AttachedVolume {
	attached = slices.Clone(attached)
	for i := range attached {
		attached[i].Size = 0
	}
	return attached
}

// portOf returns the place of the disk of a volume, which it keeps for as long as the VM has it; 0: it has none.
func portOf(disks []vm.Disk, serial string) int {
	for _, d := range disks {
		if d.Role == vm.RoleVolume && d.Serial == serial {
			return d.Port
		}
	}
	return 0
}

// releaseVolume ends the attachment of a volume to the VM id. It is no error if it has none.
func (n *node) releaseVolume(ctx context.Context, volume, id vm.ID) error {
	err := n.volumes.Detach(vm.OnBehalf(ctx, vm.Owner{}), string(volume), id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// detachVolumes ends the attachments of m, whose process has ended. With thorough, the record may lack some of them.
func (m *machine) detachVolumes(ctx context.Context, thorough bool) error {
	if m.volumes == nil {
		return nil
	}
	var errs []error
	for _, a := range m.record().Attached {
		errs = append(errs, m.releaseVolume(ctx, a.ID, m.id))
	}
	if thorough {
		errs = append(errs, m.releaseVolumes(ctx, m.id))
	}
	return errors.Join(errs...)
}

// releaseVolumes ends all attachments to the VM id, whatever its record says. Preconditions: its process has ended.
func (n *node) releaseVolumes(ctx context.Context, id vm.ID) error {
	if n.volumes == nil {
		return nil
	}
	all, err := n.volumes.List(vm.OnBehalf(ctx, vm.Owner{}))
	errs := []error{err}
	for _, v := range all {
		if v.AttachedTo(id) {
			errs = append(errs, n.releaseVolume(ctx, v.ID, id))
		}
	}
	return errors.Join(errs...)
}

// attachedAs returns the index of an attached volume by its id; -1: the VM does not have it.
func attachedAs(r vm.Record, id vm.ID) int {
	return slices.IndexFunc(r.Attached, func(a vm.AttachedVolume) bool { return a.ID == id })
}

// withoutDisk returns disks without the one with that serial.
func withoutDisk(disks []vm.Disk, serial string) []vm.Disk {
	return slices.DeleteFunc(slices.Clone(disks), func(d vm.Disk) bool { return d.Serial == serial })
}

// withoutVolumes returns disks without those of volumes.
func withoutVolumes(disks []vm.Disk) []vm.Disk {
	return slices.DeleteFunc(slices.Clone(disks), func(d vm.Disk) bool { return d.Role == vm.RoleVolume })
}

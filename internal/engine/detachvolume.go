package engine

import (
	"context"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

func (m *machine) detachVolume(ctx context.Context, ref string) (vm.Record, error) {
	r := m.record()
	i, err := m.attachedOf(ctx, r, ref)
	if err != nil {
		return r, err
	}
	if err := changeable(r); err != nil {
		return r, err
	}
	if root, ok := vm.BootVolume(r.Spec.Image); ok && root == r.Attached[i].Volume {
		return r, errdefs.Preconditionf("the VM boots from volume %s; remove the VM instead, which leaves the volume as it is", root)
	}
	x := volumeArgs{Attached: r.Attached[i]}
	at := slices.IndexFunc(r.Spec.Volumes, func(v vm.Volume) bool { return v.Name == x.Attached.Volume && v.Disk != nil })
	if at < 0 {
		return r, errdefs.DataLossf("the record of the VM is damaged: it has volume %s attached and does not ask for it; remove the VM, which leaves the volume as it is", x.Attached.Volume)
	}
	x.Volume, x.Path = r.Spec.Volumes[at], r.Spec.MountPath(x.Attached.Volume)
	if r.State == vm.StateRunning {
		fixed := func(d vm.Disk) bool { return d.Serial == x.Attached.Serial && d.Role == vm.RoleVolume && d.Port == 0 }
		if slices.ContainsFunc(r.Disks, fixed) {
			return r, errdefs.Preconditionf("the VM was created with volume %s, so its guest cannot release it while it runs; stop the VM first", x.Attached.Volume)
		}
		if err := m.attachable(ctx); err != nil {
			return r, err
		}
	}
	return detachOperation.run(ctx, m, &detachment{attaching: attaching{m, x}}, x.json())
}

// attachedOf returns the index of the attached volume ref: its name or id in the store, or the name that the VM has for it.
func (m *machine) attachedOf(ctx context.Context, r vm.Record, ref string) (int, error) {
	if m.volumes != nil {
		got, err := m.volumes.Get(ctx, ref)
		if i := attachedAs(r, got.ID); err == nil && i >= 0 {
			return i, nil
		}
	}
	i := slices.IndexFunc(r.Attached, func(a vm.AttachedVolume) bool { return a.Volume == ref || string(a.ID) == ref })
	if i < 0 {
		return -1, errdefs.NotFoundf("it has no volume %s attached", ref)
	}
	return i, nil
}

// detachment takes a volume from a VM. The guest comes first: it may refuse. The store frees the volume when the disk is gone, and
// only then the record has it no longer.
type detachment struct {
	attaching
	refused bool // the guest has refused, and nothing has changed
}

var detachOperation = operation[*detachment]{
	name: opDetachVolume, told: true, recall: recallDetachment,
	steps: []step[*detachment]{
		{word: stepLeave, run: (*detachment).leave, undo: (*detachment).undo, recover: (*detachment).recover, lasting: true},
		{word: stepUnplug, run: (*detachment).unplug, undo: (*detachment).undo, recover: (*detachment).recover, lasting: true},
		{word: stepDetach, run: (*detachment).detach, undo: (*detachment).undo, recover: (*detachment).recover, lasting: true},
	},
}

func recallDetachment(m *machine, in journal.Intent) (*detachment, error) {
	args, err := volumeArgsOf(in)
	return &detachment{attaching: attaching{m, args}}, err
}

// leave has the guest unmount the volume.
func (x *detachment) leave(ctx context.Context) (outcome, error) {
	if !x.runs() {
		return outcome{}, nil
	}
	err := x.unmount(ctx, attachPatience)
	x.refused = errdefs.IsFailedPrecondition(err) || errdefs.Is(err, errdefs.Unsupported)
	return outcome{}, err
}

func (x *detachment) unplug(ctx context.Context) (outcome, error) {
	if !x.runs() {
		return outcome{}, nil
	}
	return outcome{}, x.remove(ctx)
}

func (x *detachment) detach(ctx context.Context) (outcome, error) {
	if err := x.durable(ctx); err != nil { // the store's record survives a power cut, so this operation must, too
		return outcome{}, err
	}
	if err := x.releaseVolume(ctx, x.Attached.ID, x.id); err != nil {
		return outcome{}, err
	}
	return outcome{synced: true, change: x.gone}, nil
}

// gone changes r to the record of a VM that does not have the volume.
func (x *detachment) gone(r *vm.Record) {
	r.Spec = r.Spec.WithoutVolume(x.Volume.Name)
	r.Attached = slices.DeleteFunc(slices.Clone(r.Attached), func(a vm.AttachedVolume) bool { return a.ID == x.Attached.ID })
	r.Disks = withoutDisk(r.Disks, x.Attached.Serial)
}

// undo gives the volume back to the VM. If somebody else has it by then, the VM has lost it.
func (x *detachment) undo(ctx context.Context, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Limit)
	defer cancel()
	if x.refused {
		x.settleFailed(ctx, opDetachVolume, same)
		return cause
	}
	d, _, err := x.own(ctx)
	if errdefs.IsFailedPrecondition(err) || errdefs.IsNotFound(err) {
		x.settleFailed(ctx, opDetachVolume, x.gone)
		return cause
	}
	change := same
	if err == nil && x.runs() {
		change = func(r *vm.Record) { r.Disks = append(withoutDisk(r.Disks, d.Serial), d) }
		if err = x.insert(ctx, d); err == nil {
			_, err = x.mount(ctx)
		}
	}
	x.settleFailed(ctx, opDetachVolume, change)
	if err != nil {
		return fmt.Errorf("%w; the VM has volume %s still, but its guest could not get it back: %w; detach it again, or restart the VM", cause, x.Volume.Name, err)
	}
	return cause
}

// recover goes on where the earlier process of the engine ended.
func (x *detachment) recover(ctx context.Context) (next string, err error) {
	_, err = x.readopt(ctx)
	return stepLeave, err
}

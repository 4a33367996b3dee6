package engine

import (
	"context"

	"cocoonstack.io/cocoon/internal/vm"
)

// AttachVolume gives a VM one more volume, which it has until DetachVolume or its removal. A guest of a container image that runs
// mounts it at path at once: for its main process, or in each of its containers. With path "" the guest gets only the disk. A VM that
// is stopped has the volume when it starts. It is no error if the VM has the volume in this way already.
// Errors: NotFound (VM, volume), InvalidArgument (path), AlreadyExists if the VM has the volume in another way, FailedPrecondition if
// another VM has it, the VM is hibernated, or the guest cannot use what is on the disk; DataLoss for errors of its file system,
// ResourceExhausted, Unsupported, Unavailable when the guest does not answer. After an error the VM is as before, unless the error says
// that it keeps the volume.
func (v volumeVerbs) AttachVolume(caller context.Context, ref string, use vm.VolumeUse, path string) (vm.Record, error) {
	return v.operate(caller, opAttachVolume, ref, func(m *machine, ctx context.Context) (vm.Record, error) {
		return m.attachVolume(ctx, use, path)
	})
}

// DetachVolume takes a volume from a VM. ref is its name or id in the store, or the name that the VM has for it. A guest of a container
// image that runs unmounts it first. In other guests the disk must not be in use; only qemu-guest-agent is asked whether it is mounted.
// Errors: NotFound (VM; volume, also if it was detached already), FailedPrecondition while a program in the guest uses the volume, if
// the VM is hibernated, or if it runs and was created with the volume; Unsupported, Unavailable when the guest does not answer or
// does not release the disk. After an error the VM has the volume, unless the error says otherwise.
func (v volumeVerbs) DetachVolume(caller context.Context, vmRef, ref string) (vm.Record, error) {
	return v.operate(caller, opDetachVolume, vmRef, func(m *machine, ctx context.Context) (vm.Record, error) {
		return m.detachVolume(ctx, ref)
	})
}

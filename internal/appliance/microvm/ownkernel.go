package microvm

import (
	"context"
	"strings"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// The kernel of a VM with a kernel of its own: a file of an image, which no guest sees.
const (
	kernelVolume = "capsule-kernel" // no volume of a workload: those have no such mount
	// KernelFile is the path of the kernel in the image that Files makes of it.
	KernelFile = "/kernel"
	// InitramfsFile is the path of the initramfs there, if the VM has one.
	InitramfsFile = "/initramfs"
	// ownArgs begin its command line. The documented system passes the address; here the kernel asks for it by DHCP.
	ownArgs = "ro root=/dev/vda console=ttyS0 reboot=k panic=1 ip=dhcp"
)

// Boot has the paths of the files that a VM boots.
type Boot struct {
	Kernel, Rootfs string
	Initramfs      string // "": none
}

// bootOf returns what w boots, if it has a kernel of its own.
func bootOf(w *capsulev1.Workload) Boot {
	m := w.GetMicroVm()
	return Boot{Kernel: m.GetKernelPath(), Rootfs: m.GetRootfsPath(), Initramfs: m.GetInitramfsPath()}
}

// Files are the kernels and file systems that the administrator of the machine has put there.
type Files interface {
	// Check returns an error unless all paths are files that a VM can boot.
	// Errors: InvalidArgument, FailedPrecondition if one is not there.
	Check(b Boot) error
	// Ready makes images of the files as they are now, unless they are made, and returns their names. That of the kernel has KernelFile,
	// and InitramfsFile if there is an initramfs.
	// Errors: those of Check, ResourceExhausted.
	Ready(ctx context.Context, b Boot) (kernelImage, rootfsImage string, err error)
}

// ownKernel makes s boot the kernel of w. Its images are set by Driver.spec.
func ownKernel(w *capsulev1.Workload, s *vm.Spec) error {
	m := w.GetMicroVm()
	if !s.Process.Empty() || len(s.Process.Env) > 0 {
		return errdefs.Unsupportedf("workload %s: its own kernel starts what its file system says; leave microVm.command, args and env out", w.GetName())
	}
	for field, p := range map[string]*capsulev1.Probe{"startupProbe": w.GetStartupProbe(), "livenessProbe": w.GetLivenessProbe(), "readinessProbe": w.GetReadinessProbe()} {
		if p.GetExec() != nil {
			return errdefs.Unsupportedf("workload %s: no command runs in a VM with its own kernel; use an http or tcp probe as %s", w.GetName(), field)
		}
	}
	args := strings.TrimSpace(ownArgs + " " + m.GetKernelCmdlineExtra())
	if err := vm.ValidateKernelArgs(args); err != nil {
		return errdefs.New(errdefs.InvalidArgument, "workload %s: microVm.kernelCmdlineExtra: %w", w.GetName(), err)
	}
	s.Image = "capsule-own/rootfs"
	s.Volumes = append(s.Volumes, vm.Volume{Name: kernelVolume, Kind: vm.VolumeImage, Image: "capsule-own/kernel"})
	s.Hardware = &vm.Hardware{Kernel: &vm.Kernel{Volume: kernelVolume, Path: KernelFile, Args: args}}
	if m.GetInitramfsPath() != "" {
		s.Hardware.Kernel.Initrd = InitramfsFile
	}
	return nil
}

// spec is Spec with the images of a kernel of its own.
func (d *Driver) spec(ctx context.Context, w *capsulev1.Workload, hash string) (vm.Spec, error) {
	s, err := Spec(w, hash)
	if err != nil || s.Kernel() == nil {
		return s, err
	}
	kernel, rootfs, err := d.Files.Ready(ctx, bootOf(w))
	if err != nil {
		return s, err
	}
	s.Image = rootfs
	for i := range s.Volumes {
		if s.Volumes[i].Name == kernelVolume {
			s.Volumes[i].Image = kernel
		}
	}
	return s, nil
}

package vm

import (
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Kernel is the kernel that a disk guest boots instead of the boot loader of a disk: files of a container image. The guest may have no disk of its
// own; its Spec.Image is then FromVolume of the volume. A VM with a Kernel cannot be saved.
type Kernel struct {
	Volume string `json:"volume"`           // of kind VolumeImage, which is not mounted
	Path   string `json:"path"`             // of the kernel in the image: absolute and clean
	Initrd string `json:"initrd,omitempty"` // as Path; "": none
	Args   string `json:"args,omitempty"`   // its whole command line
}

// Limits of a Kernel.
const (
	MaxKernelFile = 512 << 20 // bytes of the kernel, and of its initrd
	MaxKernelArgs = 2047      // bytes; the kernel of a PC ignores what is beyond
)

// ValidateKernelPath returns an InvalidArgument error unless path can be that of a kernel or an initrd in an image.
func ValidateKernelPath(path string) error {
	if !strings.HasPrefix(path, "/") || !localPath(path[1:]) {
		return errdefs.Invalidf("%q is not the path of a file in an image; begin with \"/\", and leave out empty, \".\" and \"..\" parts", path)
	}
	return nil
}

// ValidateKernelArgs returns an InvalidArgument error unless args can be the command line of a kernel.
func ValidateKernelArgs(args string) error {
	if len(args) > MaxKernelArgs {
		return errdefs.Invalidf("the arguments of a kernel have %d bytes; at most %d are possible", len(args), MaxKernelArgs)
	}
	if strings.ContainsFunc(args, func(r rune) bool { return r < ' ' || r > '~' }) {
		return errdefs.Invalidf("the arguments of a kernel are one line of printable ASCII characters, and %q is not", args)
	}
	return nil
}

// Kernel returns the kernel that the guest of s boots, nil if it boots from a disk or is no disk guest.
func (s Spec) Kernel() *Kernel {
	if s.Hardware == nil {
		return nil
	}
	return s.Hardware.Kernel
}

// validateKernel checks the kernel that the guest boots. Whether its files exist is known only with the image.
func (s Spec) validateKernel() error {
	k := s.Kernel()
	if k == nil {
		return nil
	}
	i := slices.IndexFunc(s.Volumes, func(v Volume) bool { return v.Name == k.Volume })
	switch {
	case i < 0 || s.Volumes[i].Kind != VolumeImage:
		return errdefs.Invalidf("its kernel is in the volume %q, and no volume of that name has the files of an image", k.Volume)
	case s.MountPath(k.Volume) != "":
		return errdefs.Invalidf("its kernel is in the volume %s, which is mounted at %s; only the node reads it, so leave out the mount", k.Volume, s.MountPath(k.Volume))
	}
	if s.Hardware.UEFI.SecureBoot {
		return errdefs.Invalidf("its firmware has Secure Boot, which does not check the kernel %s that the node gives it; leave out Secure Boot", k.Path)
	}
	if err := ValidateKernelPath(k.Path); err != nil {
		return errdefs.Invalidf("kernel: %w", err)
	}
	if k.Initrd != "" {
		if err := ValidateKernelPath(k.Initrd); err != nil {
			return errdefs.Invalidf("initrd: %w", err)
		}
	}
	return ValidateKernelArgs(k.Args)
}

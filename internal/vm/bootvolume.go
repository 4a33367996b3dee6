package vm

import (
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// volumeScheme begins the Image of a VM that has none: volume://NAME is the volume, one of Spec.Volumes, from which its guest boots. That is a disk,
// a file of the node, or
// the volume with the files of its Kernel.
const volumeScheme = "volume://"

// BootVolume returns the name of the volume that image stands for; ok is false if image names an image.
func BootVolume(image string) (name string, ok bool) { return strings.CutPrefix(image, volumeScheme) }

// FromVolume returns the Image of a VM that boots from the volume of that name.
func FromVolume(name string) string { return volumeScheme + name }

// validateBootVolume checks the volume from which the guest boots, if it does.
func (s Spec) validateBootVolume() error {
	name, ok := BootVolume(s.Image)
	if !ok {
		return nil
	}
	i := slices.IndexFunc(s.Volumes, func(v Volume) bool { return v.Name == name })
	switch {
	case i < 0:
		return errdefs.Invalidf("it boots from volume %q, which it does not have; add the volume, or boot from an image", name)
	case s.Kernel() != nil && s.Kernel().Volume == name: // the guest has no disk of its own
	case s.Volumes[i].Kind != VolumeDisk && s.Volumes[i].Kind != VolumeHostDisk:
		return errdefs.Invalidf("it boots from volume %q, which is no disk; boot from a disk of the volume store, or from an image", name)
	}
	return nil
}

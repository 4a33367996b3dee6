package vm

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// A guest boots the kernel of an image, with a disk of its own or without one. Whatever no image or kernel can have is refused.
func TestKernel(t *testing.T) {
	spec := func(change func(*Spec, *Kernel)) Spec {
		k := &Kernel{Volume: "boot", Path: "/boot/vmlinuz", Initrd: "/boot/initrd", Args: "console=ttyS0 root=/dev/vda"}
		s := Spec{
			Name: "web", Hostname: "web", Image: FromVolume("boot"), CPUs: 1, Memory: MinMemory, Storage: MinStorage, Accel: AccelAuto, Hardware: &Hardware{Kernel: k},
			Volumes: []Volume{{Name: "boot", Kind: VolumeImage, Image: "kernel:1"}, {Name: "data", Kind: VolumeDisk, Disk: &VolumeUse{Ref: "d"}}},
		}
		change(&s, k)
		return s
	}
	for what, change := range map[string]func(*Spec, *Kernel){
		"no disk":       func(*Spec, *Kernel) {},
		"an image":      func(s *Spec, _ *Kernel) { s.Image = "cloud" },
		"a volume":      func(s *Spec, _ *Kernel) { s.Image = FromVolume("data") },
		"UEFI":          func(s *Spec, _ *Kernel) { s.Firmware, s.Hardware.UEFI.Persistent = FirmwareUEFI, true },
		"nothing else":  func(_ *Spec, k *Kernel) { k.Initrd, k.Args = "", "" },
		"all arguments": func(_ *Spec, k *Kernel) { k.Args = strings.Repeat("x", MaxKernelArgs) },
	} {
		s := spec(change)
		if err := s.Validate(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if s.Hardware.Usual() || s.Clone().Kernel() == s.Kernel() || *s.Clone().Kernel() != *s.Kernel() {
			t.Errorf("%s: not copied", what)
		}
	}
	for what, change := range map[string]func(*Spec, *Kernel){
		"no volume":          func(_ *Spec, k *Kernel) { k.Volume = "" },
		"of a disk":          func(_ *Spec, k *Kernel) { k.Volume = "data" },
		"mounted":            func(s *Spec, _ *Kernel) { s.Mounts = []Mount{{Volume: "boot", Path: "/k"}} },
		"no kernel":          func(_ *Spec, k *Kernel) { k.Path = "" },
		"relative":           func(_ *Spec, k *Kernel) { k.Path = "boot/vmlinuz" },
		"upwards":            func(_ *Spec, k *Kernel) { k.Path = "/boot/../../etc/shadow" },
		"not clean":          func(_ *Spec, k *Kernel) { k.Path = "/boot//vmlinuz" },
		"a folder":           func(_ *Spec, k *Kernel) { k.Path = "/" },
		"zero":               func(_ *Spec, k *Kernel) { k.Initrd = "/boot/\x00" },
		"initrd upwards":     func(_ *Spec, k *Kernel) { k.Initrd = "/.." },
		"two lines":          func(_ *Spec, k *Kernel) { k.Args = "a\nb" },
		"umlauts":            func(_ *Spec, k *Kernel) { k.Args = "ä" },
		"too many arguments": func(_ *Spec, k *Kernel) { k.Args = strings.Repeat("x", MaxKernelArgs+1) },
		"Secure Boot":        func(s *Spec, _ *Kernel) { s.Firmware, s.Hardware.UEFI.SecureBoot = FirmwareUEFI, true },
		"boots another":      func(s *Spec, _ *Kernel) { s.Image = FromVolume("other") },
		"boots files": func(s *Spec, _ *Kernel) {
			s.Image, s.Volumes = FromVolume("more"), append(s.Volumes, Volume{Name: "more", Kind: VolumeImage, Image: "x"})
		},
	} {
		if err := spec(change).Validate(); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

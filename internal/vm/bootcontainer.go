package vm

import (
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// GuestBoot says how the guest of a sandbox boots the image of a container, which is a disk image.
type GuestBoot struct {
	Firmware  Firmware   // "" is FirmwareBIOS
	CloudInit *CloudInit // nil: only the generated documents
	Storage   int64      // bytes of the disk; 0: that of the sandbox, or more if the image has more
}

// Validate returns an InvalidArgument error if no guest can boot so.
func (g GuestBoot) Validate() error {
	switch {
	case g.Firmware != "" && g.Firmware != FirmwareBIOS && g.Firmware != FirmwareUEFI:
		return errdefs.Invalidf("invalid firmware %q; use %s or %s", g.Firmware, FirmwareBIOS, FirmwareUEFI)
	case g.Storage < 0 || g.Storage > MaxStorage:
		return errdefs.Invalidf("a disk of %d bytes is not possible; use at most %d, or 0 for the usual size", g.Storage, int64(MaxStorage))
	}
	return nil
}

// Booting returns s, the spec of a sandbox, for a guest that boots the image of c. It has the volumes of c. The guest finds devices itself.
func (s Spec) Booting(c Container, g GuestBoot) Spec {
	s, c = s.Clone(), c.Clone()
	s.Image, s.Firmware, s.CloudInit, s.Volumes = c.Image, g.Firmware, g.CloudInit, c.Volumes
	s.Process = Process{Entrypoint: c.Process.Entrypoint, Args: c.Process.Args, ReadOnlyRoot: c.Process.ReadOnlyRoot} // which no guest can have that boots itself
	s.Mounts = slices.DeleteFunc(c.Mounts, func(m Mount) bool { return m.Device })
	if g.Storage > 0 {
		s.Storage = g.Storage
	}
	if s.DNS != nil {
		s.DNS.Offered = true // a guest that boots itself keeps its own
	}
	return s
}

// Boots reports whether the guest of r is its container of that name, which boots itself.
func (r Record) Boots(container string) bool {
	return r.BootContainer != "" && r.BootContainer == container
}

// Package postclone determines what the owner of a resumed clone must do by hand if no agent of ours does it, and the
// shell commands for it: the hint in the annotation vm.cocoonstack.io/post-clone-hint.
//
// It is pure: facts in, text out. It runs nothing and contacts no guest.
package postclone

import (
	"strings"

	"cocoonstack.io/cocoon/internal/vm"
)

// Class is a kind of clone, by the steps that give it its own identity and network.
type Class string

// The classes.
const (
	// Automatic clones need nothing: an agent tells them their identity, or their network does when the interface
	// changes.
	Automatic Class = "automatic"
	// CloudImage clones keep the source's identity because resuming from memory does not run cloud-init again.
	CloudImage Class = "cloudimg"
	// StaticOCI clones keep the source's addresses, which are in the guest's own configuration.
	StaticOCI Class = "oci-static"
	// FrozenMAC clones keep the source's MAC address, which is in the devices' saved state.
	FrozenMAC Class = "frozen-mac"
)

// Hypervisors whose saved state fixes the MAC of the guest's interfaces.
const firecracker = "firecracker"

// Facts determine the class of a clone.
type Facts struct {
	Hypervisor string // name of the driver
	// FixedMAC means that the guest's interfaces kept the source's MACs although the driver does not always do so.
	FixedMAC bool

	ImageType vm.ImageType  // "": decide by Image, then COW
	Image     string        // image of the source, as in the snapshot; "" after a fork or a wake
	COW       vm.DiskFormat // of the writable disk, for a clone of an unknown image

	StaticNIC    bool // an interface has an address that no DHCP server gave it
	Windows      bool
	AgentAnswers bool // an agent in the guest can be given its identity
}

// Classify returns the class of a clone.
func Classify(f Facts) Class {
	switch {
	case f.Windows: // has no shell for our commands, and requests its network configuration anew
		return Automatic
	case f.AgentAnswers:
		return Automatic
	case f.Hypervisor == firecracker || f.FixedMAC:
		return FrozenMAC
	case f.cloudImage():
		return CloudImage
	case f.StaticNIC:
		return StaticOCI
	}
	return Automatic
}

// cloudImage tells an image that boots itself from an OCI image: by its type, else by its source, else by the format of
// the writable disk.
func (f Facts) cloudImage() bool {
	switch {
	case f.ImageType != "":
		return f.ImageType == vm.ImageDisk
	case f.Image != "":
		url := strings.ToLower(f.Image)
		return strings.HasPrefix(url, "http://") || strings.HasPrefix(url, "https://")
	}
	return f.COW == vm.DiskQCOW2
}

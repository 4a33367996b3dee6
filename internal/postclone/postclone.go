// Package postclone says what the owner of a resumed clone has to do by hand where no agent of ours does it, and the
// shell commands for it: the hint of the annotation vm.cocoonstack.io/post-clone-hint.
//
// It is pure: facts in, text out. It runs nothing and reaches no guest.
package postclone

import (
	"strings"

	"cocoonstack.io/cocoon/internal/vm"
)

// Class is a kind of clone, by what it takes to make it reachable as itself.
type Class string

// The classes.
const (
	// Automatic clones need nothing: an agent tells them who they are, or their network does when the interface changes.
	Automatic Class = "automatic"
	// CloudImage clones keep the source's identity because going on from memory does not run cloud-init again.
	CloudImage Class = "cloudimg"
	// StaticOCI clones keep the source's addresses, which stand in the guest's own configuration.
	StaticOCI Class = "oci-static"
	// FrozenMAC clones keep the source's MAC address, which is in the devices' saved state.
	FrozenMAC Class = "frozen-mac"
)

// Hypervisors whose saved state fixes the MAC of the guest's interfaces.
const firecracker = "firecracker"

// Facts are what the class of a clone follows from.
type Facts struct {
	Hypervisor string // name of the driver
	// FixedMAC says that the guest's interfaces have kept the source's MACs although the driver is none that always does so.
	FixedMAC bool

	ImageType vm.ImageType  // "": look at what follows
	Image     string        // that the source was made from, as the snapshot tells; "" after a fork or a wake
	COW       vm.DiskFormat // of the writable disk, for a clone whose image is not known

	StaticNIC    bool // an interface has an address that no DHCP server gave it
	Windows      bool
	AgentAnswers bool // an agent in the guest can be told who it is
}

// Classify returns the class of a clone.
func Classify(f Facts) Class {
	switch {
	case f.Windows: // has no shell for our commands, and asks its network anew
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

// cloudImage tells an image that boots itself from one of ours: by its type, else by where it is from, else by the disk
// that VMs of it write to.
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

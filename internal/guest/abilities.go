package guest

import (
	"context"
	"net/netip"
)

// Freezer is the ability of an Agent to hold the guest's file systems still, for a copy of its disks that is consistent.
type Freezer interface {
	// Freeze flushes and freezes the file systems and returns how many there are. One that fails leaves none frozen, as
	// far as the guest can be reached.
	Freeze(ctx context.Context) (int, error)
	// Thaw ends that and returns how many were frozen. Thawing what is not frozen is no error.
	Thaw(ctx context.Context) (int, error)
}

// NetworkReporter is the ability of an Agent to say which addresses the guest gave itself.
type NetworkReporter interface {
	Interfaces(ctx context.Context) ([]Interface, error)
}

// Interface is a network interface as the guest, which may lie, sees it.
type Interface struct {
	Name      string
	MAC       string // lower case, "" when it has none
	Addresses []netip.Prefix
}

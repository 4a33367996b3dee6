// Package network is the contract for giving VMs interfaces: a tap on the host and an address for the guest.
//
// Implementations own links, rules and leases of their own making; they never touch others'.
package network

import (
	"context"
	"maps"
	"slices"

	"cocoonstack.io/cocoon/internal/vm"
)

// Networks are those of a node. Safe for concurrent use.
type Networks interface {
	// Get returns the network called name, nil when there is none.
	Get(name string) Network

	// All returns every network that is known now.
	All() []Network
}

// Fixed are networks by name that stay as they are.
type Fixed map[string]Network

// Get implements Networks.
func (f Fixed) Get(name string) Network { return f[name] }

// All implements Networks.
func (f Fixed) All() []Network { return slices.Collect(maps.Values(f)) }

// Held is an interface that a VM has by its record.
type Held struct {
	ID    vm.ID
	Name  string // of the VM
	Index int
	NIC   vm.NIC
}

// Stray is an interface of a VM that nobody knows. Of NIC there are at least network, tap and MAC.
type Stray struct {
	ID  vm.ID
	NIC vm.NIC
}

// Network provides interfaces on one named network. Safe for concurrent use.
type Network interface {
	// Name is what vm.NICSpec.Network refers to.
	Name() string

	// Setup brings the network up (bridge, addresses, rules, DHCP) and adopts what an earlier run left. Idempotent.
	// Errors: FailedPrecondition when a subnet clashes with the host or a device node is missing, with the remedy.
	Setup(ctx context.Context) error

	// Run serves what must be served while the daemon lives (DHCP) and returns when ctx ends. Links and rules stay.
	Run(ctx context.Context) error

	// Remember makes sure that the addresses that VMs have, running or not, are given to nobody else, should the network have
	// lost them. It comes before the first Attach after a start. What contradicts what the network knows is passed over.
	Remember(ctx context.Context, held []Held) error

	// Attach gives the VM called name its tap, MAC and IP. Idempotent per (id, index): the same answer again, and a tap
	// that vanished is made again; another name is the VM's from then on. The MAC and IP depend on the first name only, as
	// far as the address is free, unless somebody beyond the network decides about addresses.
	// Errors: ResourceExhausted when no address is left.
	Attach(ctx context.Context, id vm.ID, name string, index int, spec vm.NICSpec) (vm.NIC, error)

	// Detach removes the tap and keeps the address reserved. Idempotent. Like Release it works without Setup, so that a
	// VM can be removed when its network is gone.
	Detach(ctx context.Context, nic vm.NIC) error

	// Release gives the address back. Idempotent; Detach first.
	Release(ctx context.Context, nic vm.NIC) error

	// Sweep removes taps of ours that are not in keep (tap names) and whose VM known reports as known, and returns their
	// names. Addresses may be given back with them: who has one reserved is kept, and detached, if its tap is to go.
	// What belongs to a VM that is not known stays as it is, with its address, and is returned as strays.
	Sweep(ctx context.Context, keep []string, known func(vm.ID) bool) (removed []string, strays []Stray, err error)

	// Teardown removes every link and rule of the network. Leases stay on disk.
	Teardown(ctx context.Context) error
}

// Package network is the contract for giving network interfaces to VMs: a tap on the host and an address for the guest. Some networks also
// give them to the network namespaces of containers.
//
// Implementations own the links, rules and leases that they create; they never touch any others.
package network

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/reach"
	"cocoonstack.io/cocoon/internal/vm"
)

// Networks are the networks of a node. Safe for concurrent use.
type Networks interface {
	// Get returns the network called name, nil if there is none.
	Get(name string) Network

	// All returns every network that is known now.
	All() []Network
}

// Fixed is a fixed set of networks by name.
type Fixed map[string]Network

// Get implements Networks.
func (f Fixed) Get(name string) Network { return f[name] }

// All implements Networks.
func (f Fixed) All() []Network { return slices.Collect(maps.Values(f)) }

// Held is an interface that a VM or container has according to its record.
type Held struct {
	ID    vm.ID
	Name  string // name of the VM
	Index int
	NIC   vm.NIC
}

// Stray is an interface of an unknown VM. In NIC at least network, tap and MAC are set.
type Stray struct {
	ID  vm.ID
	NIC vm.NIC
}

// Network provides interfaces on one named network. Safe for concurrent use.
type Network interface {
	// Name is the name that vm.NICSpec.Network uses.
	Name() string

	// Setup sets the network up (bridge, addresses, rules, DHCP) and adopts what an earlier run left. Idempotent. Errors:
	// FailedPrecondition if a subnet clashes with the host or a device node is missing, with the remedy.
	Setup(ctx context.Context) error

	// Run serves what needs a running daemon (DHCP) and returns when ctx ends. Links and rules stay.
	Run(ctx context.Context) error

	// Remember makes sure that addresses of VMs, running or not, are given to no other VM, even if the network has lost its
	// record of them. It must come before the first Attach after a start. It skips entries that contradict what the network
	// knows.
	Remember(ctx context.Context, held []Held) error

	// Attach gives the VM called name its tap, MAC and IP. Idempotent per (id, index): it returns the same answer again,
	// creates a missing tap again, and from then on uses the name if it has changed. The MAC and IP depend only on the first
	// name, if the address is free and the network itself decides about addresses. Errors: ResourceExhausted if no address is
	// left.
	Attach(ctx context.Context, id vm.ID, name string, index int, spec vm.NICSpec) (vm.NIC, error)

	// Detach removes the tap and keeps the address reserved. Idempotent. Like Release it works without Setup, so that a VM can
	// be removed when its network is gone.
	Detach(ctx context.Context, nic vm.NIC) error

	// Release frees the address. Idempotent; call Detach first.
	Release(ctx context.Context, nic vm.NIC) error

	// Sweep removes our taps that are not in keep (tap names) and whose VM known reports as known, and returns their names. It
	// may also release addresses. So a VM that only has its address reserved must be in keep; call Detach if its tap is to go.
	// Interfaces of unknown VMs stay unchanged, with their addresses, and are returned as strays.
	Sweep(ctx context.Context, keep []string, known func(vm.ID) bool) (removed []string, strays []Stray, err error)

	// Teardown removes every link and rule of the network. Leases stay on disk.
	Teardown(ctx context.Context) error
}

// OwnLink is a Network that says who is on its link.
type OwnLink interface {
	// OwnLink reports whether only VMs and this node are. On another link, a VM with a hardware address of its choice could get the frames
	// of another machine.
	OwnLink() bool
}

// NamespaceAttacher is a Network that also gives interfaces to network namespaces, as those of containers. It is optional.
type NamespaceAttacher interface {
	// AttachNamespace is Attach for the network namespace at path netns. The interface there is Interface(index), up, and has its MAC,
	// addresses, routes and MTU: the namespace needs no DHCP client. Loopback is up, too. The link on the host is NIC.Tap. Everything
	// else is as for a tap: the same rules and ports of the host hold, and Detach, Release, Remember and Sweep are the same. The link ends
	// with the namespace, so Detach works without one. Idempotent: if the interface is in another namespace, or was changed there, it is
	// made anew.
	// Errors: those of Attach; FailedPrecondition if there is no namespace at netns, if that has another interface of the name, or if
	// (id, index) has a tap; InvalidArgument for the namespace of the network itself.
	AttachNamespace(ctx context.Context, id vm.ID, name string, index int, spec vm.NICSpec, netns string) (vm.NIC, error)
}

// Interface is the name of an interface in the namespace of a container, by its index.
func Interface(index int) string { return fmt.Sprintf("eth%d", index) }

// AlwaysClosed are the addresses at which clouds give a machine its identity and credentials: link-local ones and some others.
// Guests must not act as that machine.
func AlwaysClosed() []netip.Prefix {
	return append([]netip.Prefix{netip.MustParsePrefix("169.254.0.0/16")}, reach.Clouds()...)
}

// Closed says which networks guests cannot reach. The zero value closes nothing.
type Closed struct {
	Closed []netip.Prefix
	Open   []netip.Prefix // overrides Closed
}

// NewClosed returns the networks that are closed by default plus those in closed, except for those in open. Entries are CIDRs
// or addresses. Errors: InvalidArgument.
func NewClosed(closed, open []string) (Closed, error) {
	var out Closed
	var err error
	if out.Closed, err = Prefixes("network.closed", closed); err != nil {
		return Closed{}, err
	}
	out.Closed = append(AlwaysClosed(), out.Closed...)
	if out.Open, err = Prefixes("network.open", open); err != nil {
		return Closed{}, err
	}
	return out, nil
}

// Prefixes parses CIDRs and single addresses; setting is their source, for the error message.
func Prefixes(setting string, list []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range list {
		p, err := netip.ParsePrefix(s)
		if a, aerr := netip.ParseAddr(s); aerr == nil && a.Zone() == "" {
			p, err = netip.PrefixFrom(a, a.BitLen()), nil
		}
		switch {
		case err != nil || p.Addr().Is4In6():
			return nil, errdefs.Invalidf("%s: %q is neither an address nor a network such as 192.168.7.0/24 or fd00:7::/48", setting, s)
		case p != p.Masked():
			return nil, errdefs.Invalidf("%s: %q has bits set after its prefix length; use %s", setting, s, p.Masked())
		}
		out = append(out, p)
	}
	return out, nil
}

// The conflist with which other container runtimes of the node, and cocoond in mode cni, put interfaces on our bridge.
const (
	ConflistName = "cocoon-dhcp"
	ConflistFile = "30-" + ConflistName + ".conflist"
)

// Conflist returns a CNI configuration list that puts interfaces on bridge. It has no IPAM, because our DHCP answers there. The
// interfaces cannot reach each other on the bridge itself, and each can use only its own MAC.
func Conflist(bridge string) string {
	return fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": %q,
  "plugins": [
    {
      "type": "bridge",
      "bridge": %q,
      "isGateway": false,
      "ipMasq": false,
      "portIsolation": true,
      "macspoofchk": true,
      "capabilities": {"mac": true},
      "ipam": {}
    }
  ]
}
`, ConflistName, bridge)
}

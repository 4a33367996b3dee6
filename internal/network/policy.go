package network

import (
	"cmp"
	"context"
	"net/netip"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Policer is a network that can enforce policies on its guests. It is optional. A policed guest (vm.NICSpec.Policed) of such a
// network exchanges packets only with its host until Police names it.
type Policer interface {
	// Polices returns nil if the network enforces policies as it is configured and set up now, else the reason why not.
	Polices() error

	// Police replaces the policies of one virtual node as a whole. From then on, the guests that it names are policed, also
	// those that were attached without the flag. Guests of other networks are ignored. It also works for guests that are
	// attached later. Established connections stay. Errors: those of Polices.
	Police(ctx context.Context, p Policies) error
}

// Policies are what the guests of one virtual node may send and receive. The zero value of a direction allows everything.
// Traffic between a guest and its own host is always allowed.
type Policies struct {
	Node    string // name of the virtual node; several may share one daemon
	Guests  []Guest
	Ingress []Policy
	Egress  []Policy
}

// Guest is one policed VM. Ingress and Egress are indexes into the lists of Policies. A guest without any in one direction may
// exchange everything in that direction; with some, only what at least one of them allows.
type Guest struct {
	ID      vm.ID
	Ingress []int
	Egress  []int
}

// Policy is one direction of a policy: what the guests that it selects may send or receive. No rules allow nothing.
type Policy struct {
	Name  string // for operators who read the rules
	Rules []Rule
}

// Rule allows packets that match its peers and its ports. The peer is the other end: the sender of ingress, the receiver of
// egress.
type Rule struct {
	Anyone bool    // every peer
	Peers  []Range // otherwise

	AllPorts bool   // every protocol, also those without ports
	Ports    []Port // otherwise one of these, or of Named, is the destination
	Named    []Endpoint
}

// Range is a range of addresses of one family, both ends included.
type Range struct{ First, Last netip.Addr }

// Protocol is a protocol with ports, by its number in the IP header.
type Protocol uint8

// The protocols with ports.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// Port is a range of destination ports, both ends included.
type Port struct {
	Protocol    Protocol
	First, Last uint16
}

// Endpoint is a destination whose port has a name.
type Endpoint struct {
	Addr     netip.Addr
	Protocol Protocol
	Port     uint16
}

// Limits of Policies. They are far above what Kubernetes supports for a node and a cluster, and bound the kernel's memory.
const (
	MaxGuests   = 1 << 12
	maxPolicies = 1 << 14 // of one direction
	maxRules    = 1 << 16 // of all policies
	maxMatches  = 1 << 20 // ranges, ports and endpoints of all rules
)

// Validate checks what a client sent. Errors: InvalidArgument, ResourceExhausted.
func (p Policies) Validate() error {
	if len(p.Guests) > MaxGuests || len(p.Ingress) > maxPolicies || len(p.Egress) > maxPolicies {
		return errdefs.Exhaustedf("policies of node %s: %d guests, %d ingress and %d egress policies are too many", p.Node, len(p.Guests), len(p.Ingress), len(p.Egress))
	}
	seen := map[vm.ID]bool{}
	for _, g := range p.Guests {
		if g.ID == "" || seen[g.ID] {
			return errdefs.Invalidf("policies of node %s: guest %q has no id or is named twice", p.Node, g.ID)
		}
		seen[g.ID] = true
		if !within(g.Ingress, len(p.Ingress)) || !within(g.Egress, len(p.Egress)) {
			return errdefs.Invalidf("policies of node %s: guest %s has a policy that does not exist", p.Node, g.ID)
		}
	}
	rules, matches := 0, 0
	for _, policy := range slices.Concat(p.Ingress, p.Egress) {
		rules += len(policy.Rules)
		for _, r := range policy.Rules {
			matches += len(r.Peers) + len(r.Ports) + len(r.Named)
			if err := r.validate(); err != nil {
				return errdefs.Invalidf("policy %q: %w", policy.Name, err)
			}
		}
	}
	if rules > maxRules || matches > maxMatches {
		return errdefs.Exhaustedf("policies of node %s: %d rules with %d addresses and ports are too many", p.Node, rules, matches)
	}
	return nil
}

func within(indexes []int, n int) bool {
	return !slices.ContainsFunc(indexes, func(i int) bool { return i < 0 || i >= n })
}

func (r Rule) validate() error {
	for _, x := range r.Peers {
		if !plain(x.First) || !plain(x.Last) || x.First.Is4() != x.Last.Is4() || x.Last.Less(x.First) {
			return errdefs.Invalidf("%s to %s is not a range of addresses", x.First, x.Last)
		}
	}
	for _, x := range r.Ports {
		if !x.Protocol.known() || x.Last < x.First {
			return errdefs.Invalidf("%d to %d of protocol %d is not a range of ports", x.First, x.Last, x.Protocol)
		}
	}
	for _, x := range r.Named {
		if !plain(x.Addr) || !x.Protocol.known() || x.Port == 0 {
			return errdefs.Invalidf("port %d of %s and protocol %d is not a port", x.Port, x.Addr, x.Protocol)
		}
	}
	return nil
}

func (p Protocol) known() bool { return p == TCP || p == UDP || p == SCTP }

// plain reports whether a is an address as it stands in a packet.
func plain(a netip.Addr) bool { return a.IsValid() && !a.Is4In6() && a.Zone() == "" }

// Merge sorts ranges and joins those that overlap or touch. It changes all.
func Merge(all []Range) []Range {
	slices.SortFunc(all, func(a, b Range) int { return cmp.Or(a.First.Compare(b.First), a.Last.Compare(b.Last)) })
	var out []Range
	for _, r := range all {
		if n := len(out); n > 0 && out[n-1].First.Is4() == r.First.Is4() {
			last := &out[n-1]
			if next := last.Last.Next(); !next.IsValid() || !next.Less(r.First) {
				if last.Last.Less(r.Last) {
					last.Last = r.Last
				}
				continue
			}
		}
		out = append(out, r)
	}
	return out
}

// RangeOf returns the addresses of a prefix.
func RangeOf(p netip.Prefix) Range {
	p = p.Masked()
	last := p.Addr().AsSlice()
	for i := p.Bits(); i < p.Addr().BitLen(); i++ {
		last[i/8] |= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(last)
	return Range{p.Addr(), a}
}

// Without returns the addresses of r that are in none of the holes.
func (r Range) Without(holes []Range) []Range {
	var out []Range
	for _, h := range Merge(slices.Clone(holes)) {
		if h.First.Is4() != r.First.Is4() || h.Last.Less(r.First) || r.Last.Less(h.First) {
			continue
		}
		if r.First.Less(h.First) {
			out = append(out, Range{r.First, h.First.Prev()})
		}
		next := h.Last.Next()
		if !next.IsValid() || r.Last.Less(next) {
			return out
		}
		r.First = next
	}
	return append(out, r)
}

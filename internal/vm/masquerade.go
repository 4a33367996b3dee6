package vm

import (
	"fmt"
	"net/netip"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// The networks that a masqueraded guest is in unless its spec names others.
const (
	MasqueradeCIDR  = "10.0.2.0/24"
	MasqueradeCIDR6 = "fd10:0:2::/120"
)

// Masquerade puts a guest into a network of its own: it has the second address there, and its gateway the first. The host translates
// between that address and the one of the interface, at which others reach the guest. The zero value is none.
type Masquerade struct {
	CIDR  string      `json:"cidr,omitempty"`  // IPv4; needed
	CIDR6 string      `json:"cidr6,omitempty"` // IPv6; needed
	Ports []PortRange `json:"ports,omitempty"` // at which others reach the guest; none: all
}

// PortRange is a range of ports of a guest, both ends included.
type PortRange struct {
	Protocol Protocol `json:"protocol"`
	First    uint16   `json:"first"`
	Last     uint16   `json:"last"`
}

func (p PortRange) String() string {
	if p.First == p.Last {
		return fmt.Sprintf("%d/%s", p.First, p.Protocol)
	}
	return fmt.Sprintf("%d-%d/%s", p.First, p.Last, p.Protocol)
}

// Asked reports whether m asks for a translation.
func (m Masquerade) Asked() bool { return m.CIDR != "" || m.CIDR6 != "" || len(m.Ports) > 0 }

// Inside returns what a guest with m has instead of the addresses of its interface. Preconditions: m is valid.
func (m Masquerade) Inside() Inside {
	if !m.Asked() {
		return Inside{}
	}
	net4, net6 := netip.MustParsePrefix(m.CIDR), netip.MustParsePrefix(m.CIDR6)
	gateway, gateway6 := net4.Addr().Next(), net6.Addr().Next()
	return Inside{
		IP: gateway.Next().String(), Prefix: net4.Bits(), Gateway: gateway.String(),
		IPv6: gateway6.Next().String(), Prefix6: net6.Bits(), Gateway6: gateway6.String(),
	}
}

func (m Masquerade) validate() error {
	if !m.Asked() {
		return nil
	}
	if err := checkInside(m.CIDR, false); err != nil {
		return err
	}
	if err := checkInside(m.CIDR6, true); err != nil {
		return err
	}
	if len(m.Ports) > maxPorts {
		return errdefs.Invalidf("an interface has %d ports for others; at most %d are allowed", len(m.Ports), maxPorts)
	}
	for _, p := range m.Ports {
		if err := p.Protocol.validate(); err != nil {
			return errdefs.Invalidf("port %s: %w", p, err)
		}
		if p.First == 0 || p.Last < p.First {
			return errdefs.Invalidf("port %s: a range begins at 1 or later, and ends at no lower port", p)
		}
	}
	return nil
}

// checkInside checks a network for a guest. It needs room for the network's own address, the gateway, the guest and a broadcast.
func checkInside(cidr string, ipv6 bool) error {
	family, example, longest := "IPv4", MasqueradeCIDR, 30
	if ipv6 {
		family, example, longest = "IPv6", MasqueradeCIDR6, 126
	}
	p, err := netip.ParsePrefix(cidr)
	if err != nil || p.Addr().Is6() != ipv6 || p.Addr().Is4In6() || p != p.Masked() || p.Bits() < 8 || p.Bits() > longest || p.String() != cidr {
		return errdefs.Invalidf("%q is no %s network for a guest; use one of at least 4 addresses such as %s", cidr, family, example)
	}
	if a := p.Addr(); !a.IsGlobalUnicast() || p.Contains(netip.IPv4Unspecified()) || a.Is4() && a.As4()[0] >= 240 {
		return errdefs.Invalidf("hosts cannot use addresses of %s; use a network such as %s", cidr, example)
	}
	return nil
}

// ValidateMasquerade validates the masquerades of all interfaces together.
func (s Spec) ValidateMasquerade() error {
	for i, n := range s.NICs {
		if i > 0 && n.Masquerade.Asked() {
			return errdefs.Invalidf("interface %d has a masquerade; only the first interface can have one", i)
		}
		if err := n.Masquerade.validate(); err != nil {
			return errdefs.Invalidf("the masquerade of its interface: %w", err)
		}
	}
	return nil
}

// Inside is what a masqueraded guest has instead of the addresses of its interface. It has an IPv6 address only if its interface has one.
type Inside struct {
	IP       string `json:"ip"`
	Prefix   int    `json:"prefix"` // bits
	Gateway  string `json:"gateway"`
	IPv6     string `json:"ipv6,omitempty"`
	Prefix6  int    `json:"prefix6,omitempty"` // bits
	Gateway6 string `json:"gateway6,omitempty"`
}

// Guest returns n with the addresses that the guest itself has.
func (n NIC) Guest() NIC {
	in := n.Inside
	if in == (Inside{}) {
		return n
	}
	n.IP, n.Prefix, n.Gateway, n.Routes, n.Inside = in.IP, in.Prefix, in.Gateway, nil, Inside{}
	if n.Addresses = nil; n.IPv6 != "" {
		n.IPv6 = in.IPv6
		n.Addresses = []string{fmt.Sprintf("%s/%d", in.IPv6, in.Prefix6)} // for guests without a DHCPv6 client
	}
	return n
}

// GuestNICs returns all with the addresses that the guest itself has.
func GuestNICs(all []NIC) []NIC {
	out := cloneSlice(all)
	for i, n := range out {
		out[i] = n.Guest()
	}
	return out
}

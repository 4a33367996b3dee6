package reach

import (
	"net"
	"net/netip"
	"slices"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Kind classifies an address, as far as it matters for who may connect to it.
type Kind int

// The kinds of addresses.
const (
	Public   Kind = iota
	Private       // private networks, including the machine's own addresses in them
	Reserved      // not assigned to anybody
	Nobody        // unspecified: the kernel takes it for loopback
	Loopback
	LinkLocal
	Many     // multicast and broadcast
	Metadata // cloud services that give a machine its identity and credentials
	Node     // the machine's own; own() detects these, KindOf does not
)

// String returns the kind for an error message: … is at …, … is ….
func (k Kind) String() string {
	return [...]string{
		"a public address", "a private address", "a reserved address", "not the address of a host", "the node's loopback", "an address of the node's own link",
		"a multicast or broadcast address", "a metadata service of clouds", "an address of the node itself",
	}[k]
}

// KindOf returns the kind of addr, or of the IPv4 address that it is translated to on its way.
func KindOf(addr netip.Addr) Kind {
	a := plain(addr)
	switch {
	case !a.IsValid() || a.IsUnspecified() || in(a, thisHost):
		return Nobody
	case a.IsLoopback():
		return Loopback
	case a == linkMetadata || in(a, clouds):
		return Metadata
	case a.IsLinkLocalUnicast():
		return LinkLocal
	case a.IsMulticast() || a == broadcast:
		return Many
	case in(a, reserved):
		return Reserved
	case a.IsPrivate() || in(a, privates):
		return Private
	}
	return Public
}

// Clouds returns the metadata service addresses of clouds that are not link-local.
func Clouds() []netip.Prefix { return append([]netip.Prefix(nil), clouds...) }

var clouds = prefixes(
	"168.63.129.16/32",   // Azure
	"100.100.100.200/32", // Alibaba
	"192.0.0.192/32",     // Oracle
	"fd00:ec2::254/128",  // AWS
	"fd20:ce::254/128",   // Google
	"fd00:42::42/128",    // Scaleway
)

var (
	linkMetadata = netip.MustParseAddr("169.254.169.254") // AWS, Google, Azure, OpenStack, Oracle and most others
	broadcast    = netip.MustParseAddr("255.255.255.255")
	thisHost     = prefixes("0.0.0.0/8")
	reserved     = prefixes("240.0.0.0/4", "192.0.0.0/24", "fec0::/10", "100::/64")
	privates     = prefixes("100.64.0.0/10", "198.18.0.0/15", "64:ff9b:1::/48") // carrier-grade NAT, benchmarks, local NAT64

	nat64, sixToFour = prefixes("64:ff9b::/96"), prefixes("2002::/16")
)

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func in(a netip.Addr, list []netip.Prefix) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
}

// plain returns the address that a connection to a reaches: IPv4 within IPv6, or the translation by NAT64 or 6to4.
func plain(a netip.Addr) netip.Addr {
	a = a.WithZone("").Unmap()
	if !a.Is6() {
		return a
	}
	b := a.As16()
	switch {
	case in(a, nat64):
		return netip.AddrFrom4([4]byte(b[12:16]))
	case in(a, sixToFour):
		return netip.AddrFrom4([4]byte(b[2:6]))
	}
	return a
}

// own returns an error if the machine has the address, or if that cannot be determined. It asks the kernel each time:
// addresses change.
func own(addr netip.Addr) error {
	a := plain(addr)
	all, err := net.InterfaceAddrs()
	if err != nil {
		return errdefs.Preconditionf("the node cannot tell whether %s is its own address: %w", addr, err)
	}
	mine := errdefs.Preconditionf("%s is %s", addr, Node)
	for _, i := range all {
		if n, ok := i.(*net.IPNet); ok {
			if have, ok := netip.AddrFromSlice(n.IP); ok && have.Unmap() == a {
				return mine
			}
		}
	}
	// If a whole network is local, no link lists its addresses. The kernel then uses the destination as its own source
	// address.
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, 9))) // nothing is sent
	if err != nil {
		return nil // no route to it at all
	}
	defer c.Close()
	if from, ok := c.LocalAddr().(*net.UDPAddr); ok && from.AddrPort().Addr().Unmap() == a {
		return mine
	}
	return nil
}

package uplink

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Bounds of a configuration.
const (
	maxServers = 3 // that libc uses
	maxClocks  = 8
	maxMembers = 8
	minMTU     = 1280 // what IPv6 needs
	maxMTU     = 9216
)

var (
	linkRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$`)
	hostRE = regexp.MustCompile(`^([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.?$`)
)

// Validate returns what is wrong with a configuration in itself. Errors: InvalidArgument with a field for each fault.
func Validate(c *capsulev1.NetworkConfig) error {
	v := &faults{}
	v.links(c)
	v.that(c.GetVlan() <= 4094, "vlan", "%d is not from 1 to 4094", c.GetVlan())
	v.that(c.GetMtu() == 0 || c.GetMtu() >= minMTU && c.GetMtu() <= maxMTU, "mtu", "%d is not from %d to %d", c.GetMtu(), minMTU, maxMTU)
	v.ipv4(c)
	v.ipv6(c.GetIpv6())
	v.that(len(c.GetDns()) <= maxServers, "dns", "at most %d servers are used", maxServers)
	for i, s := range c.GetDns() {
		a, err := netip.ParseAddr(s)
		v.that(err == nil && usable(a), fmt.Sprintf("dns[%d]", i), "%.80q is not the address of a name server", s)
	}
	v.that(len(c.GetNtp()) <= maxClocks, "ntp", "at most %d servers are used", maxClocks)
	for i, s := range c.GetNtp() {
		a, err := netip.ParseAddr(s)
		v.that(err == nil && usable(a) || err != nil && len(s) <= 253 && hostRE.MatchString(s), fmt.Sprintf("ntp[%d]", i), "%.80q is neither a host name nor an address", s)
	}
	if len(*v) > 0 {
		return errdefs.New(errdefs.InvalidArgument, "the configuration of the network: %w", errors.Join(*v...))
	}
	return nil
}

type faults []error

func (v *faults) that(ok bool, field, format string, args ...any) {
	if !ok {
		*v = append(*v, fmt.Errorf("%s: %s", field, fmt.Sprintf(format, args...)))
	}
}

func usable(a netip.Addr) bool {
	return a.IsValid() && a.Zone() == "" && !a.Is4In6() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback()
}

func (v *faults) links(c *capsulev1.NetworkConfig) {
	if c.GetBond() == nil {
		v.that(c.GetLink() == "" || isLink(c.GetLink()), "link", "%.80q is neither a link's name nor a hardware address", c.GetLink())
		return
	}
	v.that(c.GetLink() == "", "link", "the links of a bond are in bond.links")
	_, known := capsulev1.BondMode_name[int32(c.GetBond().GetMode())]
	v.that(known, "bond.mode", "there is no mode %d", c.GetBond().GetMode())
	all := c.GetBond().GetLinks()
	v.that(len(all) > 0 && len(all) <= maxMembers, "bond.links", "a bond has 1 to %d links", maxMembers)
	for i, l := range all {
		v.that(isLink(l), fmt.Sprintf("bond.links[%d]", i), "%.80q is neither a link's name nor a hardware address", l)
		v.that(!slices.Contains(all[:i], l), fmt.Sprintf("bond.links[%d]", i), "%.80q is there twice", l)
	}
}

func isLink(s string) bool {
	mac, err := net.ParseMAC(s)
	return err == nil && len(mac) == 6 || linkRE.MatchString(s)
}

func (v *faults) ipv4(c *capsulev1.NetworkConfig) {
	x := c.GetIpv4()
	switch x.GetMethod() {
	case capsulev1.IPv4Method_IPV4_METHOD_STATIC:
		v.static("ipv4", x.GetAddress(), x.GetGateway(), true)
		return
	case capsulev1.IPv4Method_IPV4_METHOD_OFF:
		v.that(c.GetIpv6().GetMethod() == capsulev1.IPv6Method_IPV6_METHOD_STATIC, "ipv4.method", "without IPv4 the machine needs a static IPv6 address, by which operators find it")
	case capsulev1.IPv4Method_IPV4_METHOD_UNSPECIFIED, capsulev1.IPv4Method_IPV4_METHOD_DHCP:
	default:
		v.that(false, "ipv4.method", "there is no method %d", x.GetMethod())
	}
	v.that(x.GetAddress() == "" && x.GetGateway() == "", "ipv4", "address and gateway are for the method STATIC")
}

func (v *faults) ipv6(x *capsulev1.NetworkIPv6) {
	switch x.GetMethod() {
	case capsulev1.IPv6Method_IPV6_METHOD_STATIC:
		v.static("ipv6", x.GetAddress(), x.GetGateway(), false)
		return
	case capsulev1.IPv6Method_IPV6_METHOD_UNSPECIFIED, capsulev1.IPv6Method_IPV6_METHOD_SLAAC, capsulev1.IPv6Method_IPV6_METHOD_OFF:
	default:
		v.that(false, "ipv6.method", "there is no method %d; DHCPv6 is not among them", x.GetMethod())
	}
	v.that(x.GetAddress() == "" && x.GetGateway() == "", "ipv6", "address and gateway are for the method STATIC")
}

// static checks an address with its prefix, and a gateway.
func (v *faults) static(at, address, gateway string, four bool) {
	family := map[bool]string{true: "IPv4", false: "IPv6"}[four]
	p, err := netip.ParsePrefix(address)
	a := p.Addr()
	if err != nil || a.Is4() != four || !usable(a) || p.Bits() == 0 || a.IsLinkLocalUnicast() {
		v.that(false, at+".address", "%.80q is not an %s address with its prefix length, such as %s", address, family, map[bool]string{true: "192.0.2.7/24", false: "2001:db8::7/64"}[four])
		return
	}
	ends := p.Bits() < a.BitLen()-1 // a shorter subnet has no addresses that are nobody's
	v.that(!ends || a != p.Masked().Addr(), at+".address", "%s is the address of the network itself", a)
	v.that(!four || !ends || a != last(p), at+".address", "%s is the broadcast address of its network", a)
	if gateway == "" {
		return
	}
	g, err := netip.ParseAddr(gateway)
	v.that(err == nil && usable(g) && (p.Contains(g) || g.Is6() && g.IsLinkLocalUnicast()), at+".gateway", "%.80q is not an address in %s, so it cannot be reached", gateway, p.Masked())
	v.that(g != a, at+".gateway", "%s is the machine itself", g)
	v.that(!four || !ends || g != last(p) && g != p.Masked().Addr(), at+".gateway", "%s is not the address of a machine", g)
}

// last returns the last address of an IPv4 prefix.
func last(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i, m := range net.CIDRMask(p.Bits(), 8*len(b)) {
		b[i] |= ^m
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// Machine is what a configuration has to fit to.
type Machine struct {
	Links []*capsulev1.NetworkLink // Ethernet links of hardware
	Inner []netip.Prefix           // of the workloads' network
}

// Check returns why a valid configuration cannot work on the machine. Errors: FailedPrecondition.
func Check(c *capsulev1.NetworkConfig, m Machine) error {
	v := &faults{}
	names := []string{c.GetLink()}
	if b := c.GetBond(); b != nil {
		names = b.GetLinks()
	}
	var seen []string
	alive := 0
	for _, name := range names {
		if name == "" { // the first one
			v.that(len(m.Links) > 0, "link", "the machine has no Ethernet link")
			alive++
			continue
		}
		l := find(m.Links, name)
		if l == nil {
			v.that(false, "link", "the machine has no Ethernet link %s; it has %s", name, strings.Join(namesOf(m.Links), ", "))
			continue
		}
		v.that(!slices.Contains(seen, l.GetName()), "bond.links", "%s is there twice", l.GetName())
		seen = append(seen, l.GetName())
		if !l.GetUp() || l.GetCarrier() {
			alive++
		}
	}
	v.that(alive > 0 || len(*v) > 0, "link", "no cable is connected to %s", strings.Join(names, ", "))
	for _, p := range static(c) {
		for _, inner := range m.Inner {
			v.that(!inner.Overlaps(p), "address", "%s overlaps %s, the network of the workloads", p.Masked(), inner)
		}
	}
	if len(*v) > 0 {
		return errdefs.New(errdefs.FailedPrecondition, "the configuration of the network cannot work here: %w", errors.Join(*v...))
	}
	return nil
}

// static returns the static addresses of a configuration with their prefixes.
func static(c *capsulev1.NetworkConfig) (out []netip.Prefix) {
	for _, s := range []string{c.GetIpv4().GetAddress(), c.GetIpv6().GetAddress()} {
		if p, err := netip.ParsePrefix(s); err == nil {
			out = append(out, p)
		}
	}
	return out
}

func namesOf(links []*capsulev1.NetworkLink) (out []string) {
	for _, l := range links {
		out = append(out, l.GetName())
	}
	return out
}

// find returns the link with a name or hardware address; nil if there is none.
func find(links []*capsulev1.NetworkLink, name string) *capsulev1.NetworkLink {
	mac, err := net.ParseMAC(name)
	for _, l := range links {
		if l.GetName() == name || err == nil && l.GetMac() == mac.String() {
			return l
		}
	}
	return nil
}

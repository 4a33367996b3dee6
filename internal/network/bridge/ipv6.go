package bridge

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/dhcp"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/network/radv"
)

// IPv6 is on if the configuration has a prefix for it. Guests make their address from the prefix and their MAC, or DHCPv6
// assigns the same address. So it is as stable as the MAC, and nothing needs to be recorded.

// router6 is our address on every link. Guests use it as their router.
var router6 = netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 15: 1})

// prefix6 returns the configured prefix; the zero value if there is none.
func (c Config) prefix6() (netip.Prefix, error) {
	switch {
	case c.IPv6Mode != "" && c.IPv6Mode != IPv6SLAAC && c.IPv6Mode != IPv6Stateful:
		return netip.Prefix{}, errdefs.Invalidf("network %s: invalid ipv6Mode %q; use %s or %s", c.Name, c.IPv6Mode, IPv6SLAAC, IPv6Stateful)
	case c.Subnet6 == "" && c.IPv6Mode != "":
		return netip.Prefix{}, errdefs.Invalidf("network %s: ipv6Mode %s needs subnet6; set both, or neither", c.Name, c.IPv6Mode)
	case c.Subnet6 == "":
		return netip.Prefix{}, nil
	}
	p, err := netip.ParsePrefix(c.Subnet6)
	switch {
	case err != nil || !p.Addr().Is6() || p.Addr().Is4In6() || p.Addr().Zone() != "" || p.Bits() != radv.Prefix || p != p.Masked():
		return p, errdefs.Invalidf("network %s: invalid subnet6 %q; use a /%d subnet such as fd12:3456:789a::/64", c.Name, c.Subnet6, radv.Prefix)
	case !p.Addr().IsGlobalUnicast():
		return p, errdefs.Invalidf("network %s: subnet6 %s is not usable for hosts; use a prefix of your own, or one in fd00::/8", c.Name, p)
	case c.Adopt:
		return p, errdefs.Invalidf("network %s: an adopted bridge gets no IPv6 subnet from Cocoon; omit subnet6", c.Name)
	}
	return p, nil
}

// gateway6 returns our address in the prefix; the zero value without a prefix.
func gateway6(prefix netip.Prefix) netip.Addr {
	if !prefix.IsValid() {
		return netip.Addr{}
	}
	return prefix.Addr().Next()
}

// address6 returns the address of a guest with that MAC; the zero value without IPv6.
func address6(prefix netip.Prefix, mac string) netip.Addr {
	m, err := net.ParseMAC(mac)
	if err != nil || len(m) != 6 || !prefix.IsValid() {
		return netip.Addr{}
	}
	return radv.Address(prefix, m)
}

// checkIPv6 refuses a prefix that the host uses elsewhere, and a host that would lose its own router: a host that forwards
// ignores router advertisements unless it is configured to accept them.
func (n *Network) checkIPv6(prefix netip.Prefix) error {
	if !prefix.IsValid() {
		return nil
	}
	forwards, err := host.Sysctl(forward6Key)
	if err != nil {
		return errdefs.Preconditionf("network %s: this kernel has no IPv6; omit subnet6, or boot without ipv6.disable", n.cfg.Name)
	}
	links, err := host.ListLinks()
	if err != nil {
		return err
	}
	for _, l := range links {
		name := l.Attrs().Name
		if name == n.cfg.Bridge {
			continue
		}
		addrs, err := retryDump(func() ([]netlink.Addr, error) { return netlink.AddrList(l, netlink.FAMILY_V6) })
		if err != nil {
			return fmt.Errorf("list addresses of %s: %w", name, err)
		}
		routes, err := retryDump(func() ([]netlink.Route, error) { return netlink.RouteList(l, netlink.FAMILY_V6) })
		if err != nil {
			return fmt.Errorf("list routes of %s: %w", name, err)
		}
		for _, a := range addrs {
			if addr, ok := netip.AddrFromSlice(a.IP); ok && prefix.Contains(addr) {
				return errdefs.Preconditionf("network %s: subnet6 %s clashes with address %s of %s; configure another", n.cfg.Name, prefix, a.IPNet, name)
			}
		}
		for _, r := range routes {
			if p, ok := prefix6Of(r.Dst); ok && p.Bits() >= 16 && p.Overlaps(prefix) {
				return errdefs.Preconditionf("network %s: subnet6 %s clashes with route %s through %s; configure another", n.cfg.Name, prefix, p, name)
			}
			accepts, _ := host.Sysctl("ipv6/conf/" + name + "/accept_ra") // "" does not count as "1"
			if r.Protocol == unix.RTPROT_RA && forwards == "0" && accepts == "1" {
				return errdefs.Preconditionf("network %s: IPv6 for guests makes this host a router, and the host would lose its own route through %s, which comes from router advertisements; run `sysctl -w net.ipv6.conf.%s.accept_ra=2` to keep the route, and make that setting permanent",
					n.cfg.Name, name, name)
			}
		}
	}
	return nil
}

func prefix6Of(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP)
	ones, bits := n.Mask.Size()
	return netip.PrefixFrom(a, ones), ok && bits == 128
}

// ensureIPv6 gives the bridge our addresses, or switches IPv6 off on it: otherwise the host would answer guests on a link-local
// address. The kernel makes no address of its own on the bridge and ignores routers there.
func (n *Network) ensureIPv6(br netlink.Link, prefix netip.Prefix) error {
	conf := "ipv6/conf/" + n.cfg.Bridge + "/"
	off := "1"
	if prefix.IsValid() {
		off = "0"
	}
	if _, err := host.Sysctl(conf + "disable_ipv6"); err != nil {
		return nil //nolint:nilerr // a kernel without IPv6, which checkIPv6 refuses where it matters
	}
	if err := host.SetSysctl(conf+"disable_ipv6", off); err != nil || !prefix.IsValid() {
		return err
	}
	for key, value := range map[string]string{"accept_ra": "0", "addr_gen_mode": "1"} {
		if err := host.SetSysctl(conf+key, value); err != nil {
			return err
		}
	}
	return setAddresses6(br, netip.PrefixFrom(router6, radv.Prefix), netip.PrefixFrom(gateway6(prefix), radv.Prefix))
}

// setAddresses6 makes want the only IPv6 addresses of l.
func setAddresses6(l netlink.Link, want ...netip.Prefix) error {
	name := l.Attrs().Name
	have, err := netlink.AddrList(l, netlink.FAMILY_V6)
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", name, err)
	}
	for _, a := range have {
		if !slices.ContainsFunc(want, func(p netip.Prefix) bool { return a.IPNet.String() == p.String() }) {
			if err := netlink.AddrDel(l, &a); err != nil {
				return fmt.Errorf("remove address %s from %s: %w", a.IPNet, name, err)
			}
		}
	}
	for _, p := range want {
		ipnet := &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 128)}
		// No duplicate detection: no guest can use an address other than its own.
		if err := netlink.AddrReplace(l, &netlink.Addr{IPNet: ipnet, Flags: unix.IFA_F_NODAD}); err != nil {
			return fmt.Errorf("give %s the address %s: %w", name, p, err)
		}
	}
	return nil
}

// linkLocal is the link-local address of a guest with that MAC.
func linkLocal(mac net.HardwareAddr) netip.Prefix {
	return netip.PrefixFrom(radv.Address(radv.LinkLocal, mac), radv.Prefix)
}

// ICMP messages: the echo of both versions, and those of neighbours and routers (RFC 4861).
const (
	icmpRedirect4    = 5
	icmpEchoRequest4 = 8
	icmpEchoRequest6 = 128
	routerSolicit    = 133
	routerAdvert     = 134
	neighbourSolicit = 135
	neighbourAdvert  = 136
	redirect         = 137
	portDHCPv6Server = 547
)

func sport(port uint16) []expr.Any {
	return join([]expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2}}, equal([]byte{byte(port >> 8), byte(port)}))
}

// sender6 checks IPv6 from our taps. Sources and neighbour advertisements must have the guest's own addresses. Messages that
// only a router or DHCP server sends are dropped. From the unspecified address only ICMPv6 is allowed.
func (r rules) sender6() [][]expr.Any {
	if !r.prefix6.IsValid() {
		return nil
	}
	v6 := etherType(unix.ETH_P_IPV6)
	lookup := func(invert bool) []expr.Any {
		return []expr.Any{&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: setGuests6, SetID: setGuests6ID, Invert: invert}}
	}
	const target, address = 8, 16
	told := []expr.Any{&expr.Payload{DestRegister: unix.NFT_REG32_06, Base: expr.PayloadBaseTransportHeader, Offset: target, Len: address}}
	return [][]expr.Any{
		join(v6, icmpKind(unix.IPPROTO_ICMPV6, routerAdvert), drop()),
		join(v6, icmpKind(unix.IPPROTO_ICMPV6, redirect), drop()),
		join(v6, proto(unix.IPPROTO_UDP), sport(portDHCPv6Server), drop()),
		join(v6, icmpKind(unix.IPPROTO_ICMPV6, neighbourAdvert), loadTap(), loadEther(), told, lookup(true), drop()),
		join(v6, loadTap(), loadEther(), loadNetwork(8, address, unix.NFT_REG32_06), lookup(false), accept()),
		join(v6, source(netip.PrefixFrom(netip.IPv6Unspecified(), 128)), proto(unix.IPPROTO_ICMPV6), accept()),
	}
}

// neighbours matches what machines on one link tell each other about themselves and the router. No router has forwarded it.
func neighbours() []expr.Any {
	const hops = 7 // the offset of the hop limit
	return join(etherType(unix.ETH_P_IPV6), proto(unix.IPPROTO_ICMPV6), loadNetwork(hops, 1, 1), equal([]byte{255}), []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 1},
		&expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: []byte{routerSolicit}, ToData: []byte{neighbourAdvert}},
	})
}

// input6 is what guests may get from the host by IPv6: neighbour discovery, the router's answer, ping, and DHCPv6, which all guests use or only masqueraded ones.
func (r rules) input6(from []expr.Any) (out [][]expr.Any) {
	if !r.prefix6.IsValid() {
		return nil
	}
	for _, kind := range []byte{routerSolicit, neighbourSolicit, neighbourAdvert} {
		out = append(out, join(from, overIP(unix.NFPROTO_IPV6), icmpKind(unix.IPPROTO_ICMPV6, kind), accept()))
	}
	for _, a := range []netip.Addr{router6, gateway6(r.prefix6)} {
		out = append(out, join(from, destination(a), icmpKind(unix.IPPROTO_ICMPV6, icmpEchoRequest6), accept()))
	}
	return append(out, join(from, destination(dhcp.AllServers), proto(unix.IPPROTO_UDP), dport(portDHCPv6Server), accept()))
}

func (r rules) guests6(t *nftables.Table) *nftables.Set {
	return &nftables.Set{
		Table: t, Name: setGuests6, ID: setGuests6ID,
		KeyType: nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeEtherAddr, nftables.TypeIP6Addr),
	}
}

// elements6 returns the set elements for guests' addresses: the one in the prefix and the link-local one.
func (r rules) elements6(guests []ipam.Lease) (out []nftables.SetElement) {
	for _, l := range guests {
		mac, err := net.ParseMAC(l.MAC)
		if err != nil {
			continue // leases are validated where they are read
		}
		key := append(append(linkName(l.Tap), mac...), 0, 0)
		for _, p := range []netip.Prefix{r.prefix6, radv.LinkLocal} {
			out = append(out, nftables.SetElement{Key: append(append([]byte{}, key...), radv.Address(p, mac).AsSlice()...)})
		}
	}
	return out
}

package bridge

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"iter"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/host"
)

// autoRanges are the ranges in which SubnetAuto looks for a free /24, in this order.
var autoRanges = [...]netip.Prefix{
	netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 88, 0, 0}), 16),
	netip.PrefixFrom(netip.AddrFrom4([4]byte{172, 30, 0, 0}), 16),
	netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, 128, 0}), 17),
}

// use is a part of the address space that the host already uses.
type use struct {
	prefix netip.Prefix
	by     string // for error messages: "address 10.0.0.5/24 of eth0"
}

// hostUses lists the addresses and routes of the namespace except those of our own bridge. Routes wider than /8 are ignored:
// like the default route, they only lead elsewhere.
func hostUses(bridge string) ([]use, error) {
	links, err := host.ListLinks()
	if err != nil {
		return nil, err
	}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	addrs, err := retryDump(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var out []use
	for _, a := range addrs {
		if p, ok := prefixOf(a.IPNet); ok && names[a.LinkIndex] != bridge {
			out = append(out, use{p, fmt.Sprintf("address %s of %s", a.IPNet, names[a.LinkIndex])})
		}
	}
	routes, err := retryDump(func() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		if p, ok := prefixOf(r.Dst); ok && p.Bits() >= 8 && (r.LinkIndex == 0 || names[r.LinkIndex] != bridge) {
			out = append(out, use{p, fmt.Sprintf("route %s through %s", p, cmp.Or(names[r.LinkIndex], "no link"))})
		}
	}
	return out, nil
}

func retryDump[T any](list func() ([]T, error)) ([]T, error) {
	for {
		out, err := list()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return out, err
		}
	}
}

func prefixOf(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP.To4())
	ones, bits := n.Mask.Size()
	if !ok || bits != 32 {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(a, ones).Masked(), true
}

// clash returns what p overlaps, "" if it is free.
func clash(p netip.Prefix, uses []use) string {
	for _, u := range uses {
		if u.prefix.Overlaps(p) {
			return u.by
		}
	}
	return ""
}

// chooseSubnet is pure: it returns the configured subnet, else the one chosen before, else the first free one. keep says that
// leases exist, so the earlier choice must not change any more.
func chooseSubnet(cfg Config, before netip.Prefix, keep bool, uses []use) (netip.Prefix, error) {
	if cfg.Subnet != SubnetAuto {
		p, err := netip.ParsePrefix(cfg.Subnet)
		if err != nil {
			return p, errdefs.Invalidf("network %s: subnet %q: %v", cfg.Name, cfg.Subnet, err)
		}
		if by := clash(p, uses); by != "" {
			return p, errdefs.Preconditionf("network %s: subnet %s clashes with %s of this host; configure another subnet, or %q", cfg.Name, p, by, SubnetAuto)
		}
		return p, nil
	}
	if before.IsValid() {
		by := clash(before, uses)
		if by == "" {
			return before, nil
		}
		if keep {
			return before, errdefs.Preconditionf("network %s: subnet %s is in use by its VMs, but now clashes with %s of this host; remove one of the two", cfg.Name, before, by)
		}
	}
	for _, r := range autoRanges {
		for p := range cfg.candidates(r) {
			if clash(p, uses) == "" {
				return p, nil
			}
		}
	}
	return netip.Prefix{}, errdefs.Preconditionf("network %s: no free subnet in %v, the host uses parts of all of them; configure a free subnet", cfg.Name, autoRanges)
}

// candidates returns the subnets of r in the order in which they are tried. Each instance starts at a different place, so that
// it does not take a subnet that another instance, which is down now, will use again.
func (c Config) candidates(r netip.Prefix) iter.Seq[netip.Prefix] {
	var first uint32
	if c.Instance != defaultName {
		h := fnv.New32a()
		_, _ = h.Write([]byte(c.Instance)) // never fails
		first = h.Sum32()
	}
	count, base := uint32(1)<<(24-r.Bits()), r.Addr().As4()
	return func(yield func(netip.Prefix) bool) {
		for i := range count {
			a := base
			binary.BigEndian.PutUint32(a[:], binary.BigEndian.Uint32(base[:])+(first+i)%count<<8)
			if !yield(netip.PrefixFrom(netip.AddrFrom4(a), 24)) {
				return
			}
		}
	}
}

// defaultMTU returns the MTU of the link with the default route, at most 1500, which every link supports.
func defaultMTU() int {
	const ethernet = 1500
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return ethernet
	}
	for _, r := range routes {
		if p, ok := prefixOf(r.Dst); r.Dst != nil && (!ok || p.Bits() != 0) {
			continue
		}
		if l, err := netlink.LinkByIndex(r.LinkIndex); err == nil && l.Attrs().MTU >= 576 && l.Attrs().MTU < ethernet {
			return l.Attrs().MTU
		}
	}
	return ethernet
}

// resolvers returns the name servers for guests: those configured, otherwise the host's own, except those on the host's
// loopback, which guests cannot reach. systemd-resolved keeps the real ones in another file.
func resolvers(cfg Config) []netip.Addr {
	if cfg.DNS != nil {
		var out []netip.Addr
		for _, d := range cfg.DNS {
			if a, err := netip.ParseAddr(d); err == nil {
				out = append(out, a)
			}
		}
		return out
	}
	return host.Resolvers()
}

// ofFamily returns the IPv6 addresses among addrs, or the IPv4 ones.
func ofFamily(addrs []netip.Addr, ipv6 bool) (out []netip.Addr) {
	for _, a := range addrs {
		if a.Is6() == ipv6 {
			out = append(out, a)
		}
	}
	return out
}

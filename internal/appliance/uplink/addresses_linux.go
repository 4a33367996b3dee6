package uplink

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
)

// given is what the link shall have.
type given struct {
	addresses []netip.Prefix
	gateways  []netip.Addr
}

// fixed returns the static part of a configuration.
func fixed(c *capsulev1.NetworkConfig) (g given) {
	g.addresses = static(c)
	for _, s := range []string{c.GetIpv4().GetGateway(), c.GetIpv6().GetGateway()} {
		if a, err := netip.ParseAddr(s); err == nil {
			g.gateways = append(g.gateways, a)
		}
	}
	return g
}

// assign gives a link its addresses and default routes, and takes others away, except those that routers advertise.
func assign(l netlink.Link, g given, six capsulev1.IPv6Method) error {
	name := l.Attrs().Name
	if err := setIPv6(name, six); err != nil {
		return err
	}
	// First: with an address, the kernel may remove others of the same subnet. What routers advertise is the kernel's, which forgets it when
	// the method changes.
	if err := flush(l, g.addresses, six == capsulev1.IPv6Method_IPV6_METHOD_STATIC); err != nil {
		return err
	}
	for _, p := range g.addresses {
		a := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
		if err := netlink.AddrReplace(l, a); err != nil {
			return fmt.Errorf("give %s the address %s: %w", name, p, err)
		}
	}
	return routes(l, g.gateways)
}

// routes sets the default routes by a link.
func routes(l netlink.Link, gateways []netip.Addr) error {
	all, err := netlink.RouteList(l, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("list the routes of %s: %w", l.Attrs().Name, err)
	}
	wanted := map[netip.Addr]bool{}
	var errs []error
	for _, g := range gateways {
		wanted[g] = true
		to := &net.IPNet{IP: make(net.IP, len(g.AsSlice())), Mask: net.CIDRMask(0, g.BitLen())}
		if err := netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: to, Gw: g.AsSlice()}); err != nil {
			errs = append(errs, fmt.Errorf("route by %s: %w", g, err))
		}
	}
	for _, r := range all {
		gw, ok := netip.AddrFromSlice(r.Gw)
		if p, isPrefix := prefix(r.Dst); isPrefix && p.Bits() != 0 || !ok || wanted[gw.Unmap()] || r.Protocol == unix.RTPROT_RA {
			continue
		}
		if err := netlink.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("remove the route by %s: %w", gw, err))
		}
	}
	return errors.Join(errs...)
}

// setIPv6 says how the kernel makes IPv6 addresses on a link. Without IPv6 in the kernel it does nothing.
func setIPv6(link string, m capsulev1.IPv6Method) error {
	dir := filepath.Join("/proc/sys/net/ipv6/conf", link)
	if _, err := os.Stat(dir); err != nil {
		return nil //nolint:nilerr // without IPv6 there is no such folder
	}
	read := func(key string) string {
		b, _ := os.ReadFile(filepath.Join(dir, key)) // "" differs from all values
		return strings.TrimSpace(string(b))
	}
	changed := false
	set := func(key, value string) error {
		if read(key) == value {
			return nil
		}
		changed = true
		return os.WriteFile(filepath.Join(dir, key), []byte(value+"\n"), 0o644)
	}
	switch m {
	case capsulev1.IPv6Method_IPV6_METHOD_OFF:
		return set("disable_ipv6", "1")
	case capsulev1.IPv6Method_IPV6_METHOD_STATIC:
		if err := errors.Join(set("accept_ra", "0"), set("autoconf", "0")); err != nil {
			return err
		}
	default:
		if err := errors.Join(set("accept_ra", "2"), set("autoconf", "1")); err != nil { // 2: also on a machine that routes
			return err
		}
	}
	if changed && read("disable_ipv6") == "0" { // the kernel forgets what routers advertised, and asks them anew
		if err := set("disable_ipv6", "1"); err != nil {
			return err
		}
	}
	return set("disable_ipv6", "0")
}

// look returns how a link is.
func (g given) look(l netlink.Link) (*capsulev1.NetworkState, error) {
	s := &capsulev1.NetworkState{Link: l.Attrs().Name}
	all, err := netlink.AddrList(l, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list the addresses of %s: %w", s.Link, err)
	}
	for _, a := range all {
		if p, ok := prefix(a.IPNet); ok && !p.Addr().IsLinkLocalUnicast() {
			s.Addresses = append(s.Addresses, p.String())
		}
	}
	for _, a := range g.gateways {
		s.Gateways = append(s.Gateways, a.String())
	}
	return s, nil
}

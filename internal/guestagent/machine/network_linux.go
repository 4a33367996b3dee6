package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// nic is the parsed target configuration of an interface.
type nic struct {
	mac, old net.HardwareAddr // old is nil, or the current MAC of a clone's interface
	addrs    []netip.Prefix   // empty keeps the addresses
	routes   []route
	mtu      int
}

type route struct {
	to  netip.Prefix
	via netip.Addr // the zero value for destinations on the link
}

// link returns the route socket, which stays open. To open and close one would be a tenth of the work of setting up a
// resumed guest, whose code is cold.
func (m *Machine) link() (*netlink, error) {
	if m.net == nil {
		s, err := openNetlink()
		if err != nil {
			return nil, err
		}
		m.net = s
	}
	return m.net, nil
}

func (m *Machine) configure(ctx context.Context, nics []vm.NIC, olds []string) error {
	s, err := m.link()
	if err != nil {
		return err
	}
	return s.configure(ctx, nics, olds)
}

// configure gives the interfaces with the MACs of nics their new addresses and default routes in place of the old ones.
// With olds, an interface that still has the MAC at the same index of olds first gets the MAC of nics. Everything is
// parsed before anything is changed.
func (s *netlink) configure(ctx context.Context, nics []vm.NIC, olds []string) error {
	if len(nics) == 0 {
		return nil
	}
	want := make([]nic, len(nics))
	for i, n := range nics {
		old := ""
		if i < len(olds) {
			old = olds[i]
		}
		var err error
		if want[i], err = parse(n, old); err != nil {
			return fmt.Errorf("configure interface %s: %w", n.MAC, err)
		}
	}
	links, err := s.waitLinks(ctx, want)
	if err != nil {
		return err
	}
	addrs, err := s.addresses()
	if err != nil {
		return err
	}
	for i, n := range want {
		if err := s.apply(links[i], n, addrs); err != nil {
			return fmt.Errorf("configure interface %s: %w", n.mac, err)
		}
	}
	return nil
}

func parse(v vm.NIC, old string) (nic, error) {
	n := nic{mtu: v.MTU}
	var err error
	if n.mac, err = net.ParseMAC(v.MAC); err != nil {
		return nic{}, errdefs.Invalidf("%q is not a MAC address", v.MAC)
	}
	if old != "" {
		if n.old, err = net.ParseMAC(old); err != nil {
			return nic{}, errdefs.Invalidf("%q is not a MAC address", old)
		}
	}
	if v.IP == "" {
		return n, nil
	}
	addr, err := netip.ParseAddr(v.IP)
	if err != nil {
		return nic{}, errdefs.Invalidf("%q is not an IP address", v.IP)
	}
	if v.Prefix < 1 || v.Prefix > addr.BitLen() {
		return nic{}, errdefs.Invalidf("invalid prefix length /%d for %s", v.Prefix, addr)
	}
	n.addrs = append(n.addrs, netip.PrefixFrom(addr, v.Prefix))
	if v.Gateway != "" {
		gateway, err := netip.ParseAddr(v.Gateway)
		if err != nil || gateway.Is4() != addr.Is4() {
			return nic{}, errdefs.Invalidf("invalid gateway %q for %s", v.Gateway, addr)
		}
		n.routes = append(n.routes, route{netip.PrefixFrom(anyOf(gateway), 0), gateway})
	}
	return n, n.further(v)
}

// further parses the fields of v other than its address and gateway.
func (n *nic) further(v vm.NIC) error {
	for _, s := range v.Addresses {
		p, err := netip.ParsePrefix(s)
		if err != nil || p.Bits() == 0 {
			return errdefs.Invalidf("%q is not an address with a prefix length", s)
		}
		n.addrs = append(n.addrs, p)
	}
	for _, r := range v.Routes {
		to, err := netip.ParsePrefix(r.To)
		if err != nil {
			return errdefs.Invalidf("invalid route destination %q", r.To)
		}
		var via netip.Addr
		if r.Via != "" {
			if via, err = netip.ParseAddr(r.Via); err != nil || via.Is4() != to.Addr().Is4() {
				return errdefs.Invalidf("invalid gateway %q for the route to %s", r.Via, to)
			}
		}
		n.routes = append(n.routes, route{to.Masked(), via})
	}
	return nil
}

// waitLinks finds the interfaces of nics; it waits for one that is just being plugged in.
func (s *netlink) waitLinks(ctx context.Context, nics []nic) ([]device, error) {
	found, missing, err := s.find(nics)
	if err != nil || missing == nil {
		return found, err
	}
	ctx, cancel := context.WithTimeout(ctx, linkPatience)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, noLink(missing.String())
		}
		if found, missing, err = s.find(nics); err != nil || missing == nil {
			return found, err
		}
	}
}

// find looks for the interfaces of nics, by the new MAC first, then by the old one. missing is a MAC that no interface
// has.
func (s *netlink) find(nics []nic) (found []device, missing net.HardwareAddr, err error) {
	if found, missing = pick(s.nearby(), nics); missing == nil {
		return found, nil, nil
	}
	all, err := s.links()
	if err != nil {
		return nil, nil, err
	}
	found, missing = pick(all, nics)
	return found, missing, nil
}

func pick(all []device, nics []nic) (found []device, missing net.HardwareAddr) {
	found = make([]device, len(nics))
	for i, n := range nics {
		d, ok := withMAC(all, n.mac)
		if !ok && n.old != nil {
			d, ok = withMAC(all, n.old)
		}
		if !ok {
			return nil, n.mac
		}
		found[i] = d
	}
	return found, nil
}

func withMAC(all []device, mac net.HardwareAddr) (device, bool) {
	for _, d := range all {
		if bytes.Equal(d.mac, mac) {
			return d, true
		}
	}
	return device{}, false
}

// apply configures the interface d as n says.
func (s *netlink) apply(d device, n nic, addrs []address) error {
	other := !bytes.Equal(d.mac, n.mac)
	if other { // down first: that drops every route, neighbour and cached address of the old identity
		if err := s.setLink(d.index, linkChange{down: true}); err != nil {
			return err
		}
	}
	if other || len(n.addrs) > 0 {
		if err := s.dropAddresses(d.index, n.addrs, other, addrs); err != nil {
			return err
		}
	}
	change := linkChange{mtu: n.mtu}
	if other {
		change.mac = n.mac
	}
	if err := s.setLink(d.index, change); err != nil {
		return err
	}
	for _, a := range n.addrs {
		if err := s.address(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, d.index, a); err != nil {
			return err
		}
	}
	for _, r := range n.routes {
		if r.via.IsValid() && !n.near(r.via) { // as in clouds with /32 addresses: reach the gateway on the link
			if err := s.addRoute(d.index, netip.PrefixFrom(r.via, r.via.BitLen()), netip.Addr{}); err != nil {
				return err
			}
		}
		if err := s.addRoute(d.index, r.to, r.via); err != nil {
			return err
		}
	}
	return nil
}

// near reports whether the addresses of n put a on the link.
func (n nic) near(a netip.Addr) bool {
	return slices.ContainsFunc(n.addrs, func(p netip.Prefix) bool { return p.Masked().Contains(a) }) || a.Is6() && a.IsLinkLocalUnicast()
}

func anyOf(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// Loopback sets lo up.
func Loopback() error {
	s, err := openNetlink()
	if err != nil {
		return err
	}
	defer s.close()
	return s.setLink(1, linkChange{}) // lo always has index 1
}

// dropAddresses removes the addresses of an interface except keep: those of the families in keep, or of all families
// with all. Link-local IPv6 addresses stay: the kernel manages them by the MAC.
func (s *netlink) dropAddresses(index int, keep []netip.Prefix, all bool, addrs []address) error {
	var four, six bool
	for _, k := range keep {
		four, six = four || k.Addr().Is4(), six || k.Addr().Is6()
	}
	for _, a := range addrs {
		ip := a.prefix.Addr()
		switch {
		case a.index != index || slices.Contains(keep, a.prefix):
			continue
		case ip.Is6() && ip.IsLinkLocalUnicast():
			continue
		case !all && (ip.Is4() && !four || ip.Is6() && !six):
			continue
		case !all && ip.IsLinkLocalUnicast():
			continue
		}
		err := s.address(unix.RTM_DELADDR, 0, index, a.prefix)
		if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) { // the kernel may have dropped it when the link went down
			return err
		}
	}
	return nil
}

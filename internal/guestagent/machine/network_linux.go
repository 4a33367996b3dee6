package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// nic is what an interface shall be, read.
type nic struct {
	mac, old net.HardwareAddr // old is nil, or what the interface of a clone has
	addr     netip.Prefix     // the zero value leaves the addresses alone
	gateway  netip.Addr
	mtu      int
}

// link returns the route socket that the machine keeps: to open and close one is a tenth of what a guest does, whose code
// is cold, before it is itself.
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

// configure gives the interfaces with the MACs of nics their addresses and default routes instead of their own. With
// olds, an interface that has the MAC of the same place in it is given the one of nics first. Everything is read before
// anything is changed.
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
		return nic{}, errdefs.Invalidf("/%d is not a prefix length for %s", v.Prefix, addr)
	}
	n.addr = netip.PrefixFrom(addr, v.Prefix)
	if v.Gateway != "" {
		if n.gateway, err = netip.ParseAddr(v.Gateway); err != nil || n.gateway.Is4() != addr.Is4() {
			return nic{}, errdefs.Invalidf("%q is not a gateway for %s", v.Gateway, addr)
		}
	}
	return n, nil
}

// waitLinks finds the interfaces of nics; one that is just being plugged in is waited for.
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

// find looks for the interfaces of nics, by their new MAC before the old one. missing is a MAC that nobody has.
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

// apply makes the interface d what n says.
func (s *netlink) apply(d device, n nic, addrs []address) error {
	other := !bytes.Equal(d.mac, n.mac)
	if other { // down first: that drops every route, neighbour and cached address of the machine it was
		if err := s.setLink(d.index, linkChange{down: true}); err != nil {
			return err
		}
	}
	if other || n.addr.IsValid() {
		if err := s.dropAddresses(d.index, n.addr, other, addrs); err != nil {
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
	if !n.addr.IsValid() {
		return nil
	}
	if err := s.address(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, d.index, n.addr); err != nil {
		return err
	}
	if !n.gateway.IsValid() {
		return nil
	}
	if !n.addr.Masked().Contains(n.gateway) { // as clouds do with /32 addresses: reach it on the link
		if err := s.addRoute(d.index, netip.PrefixFrom(n.gateway, n.gateway.BitLen()), netip.Addr{}); err != nil {
			return err
		}
	}
	return s.addRoute(d.index, netip.PrefixFrom(anyOf(n.gateway), 0), n.gateway)
}

func anyOf(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// Loopback brings up lo.
func Loopback() error {
	s, err := openNetlink()
	if err != nil {
		return err
	}
	defer s.close()
	return s.setLink(1, linkChange{}) // lo is always the first
}

// dropAddresses removes the addresses of an interface but keep: those of keep's family, or with all those of every one.
// Link-local ones of IPv6 are the kernel's own and follow the MAC.
func (s *netlink) dropAddresses(index int, keep netip.Prefix, all bool, addrs []address) error {
	for _, a := range addrs {
		ip := a.prefix.Addr()
		switch {
		case a.index != index || a.prefix == keep:
			continue
		case ip.Is6() && ip.IsLinkLocalUnicast():
			continue
		case !all && ip.Is4() != keep.Addr().Is4():
			continue
		case !all && ip.IsLinkLocalUnicast():
			continue
		}
		err := s.address(unix.RTM_DELADDR, 0, index, a.prefix)
		if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) { // the kernel may have dropped it with the link
			return err
		}
	}
	return nil
}

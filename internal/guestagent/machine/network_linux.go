package machine

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// configure brings up the interface with nic's MAC and gives it nic's address and default route instead of its own.
func configure(ctx context.Context, nic vm.NIC) error {
	link, err := waitLink(ctx, nic.MAC)
	if err != nil {
		return err
	}
	s, err := openNetlink()
	if err != nil {
		return err
	}
	defer s.close()
	if err := s.setLink(link.Index, nic.MTU); err != nil {
		return err
	}
	if nic.IP == "" {
		return nil
	}
	addr, err := netip.ParseAddr(nic.IP)
	if err != nil {
		return errdefs.Invalidf("%q is not an IP address", nic.IP)
	}
	if nic.Prefix < 1 || nic.Prefix > addr.BitLen() {
		return errdefs.Invalidf("/%d is not a prefix length for %s", nic.Prefix, addr)
	}
	want := netip.PrefixFrom(addr, nic.Prefix)
	if err := s.replaceAddress(link, want); err != nil {
		return err
	}
	if nic.Gateway == "" {
		return nil
	}
	gateway, err := netip.ParseAddr(nic.Gateway)
	if err != nil || gateway.Is4() != addr.Is4() {
		return errdefs.Invalidf("%q is not a gateway for %s", nic.Gateway, addr)
	}
	if !want.Masked().Contains(gateway) { // as clouds do with /32 addresses: reach it on the link
		if err := s.addRoute(link.Index, netip.PrefixFrom(gateway, gateway.BitLen()), netip.Addr{}); err != nil {
			return err
		}
	}
	return s.addRoute(link.Index, netip.PrefixFrom(anyOf(addr), 0), gateway)
}

func anyOf(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// waitLink finds the interface with a MAC address; one that is just being plugged in is waited for.
func waitLink(ctx context.Context, mac string) (net.Interface, error) {
	hw, err := net.ParseMAC(mac)
	if err != nil {
		return net.Interface{}, errdefs.Invalidf("%q is not a MAC address", mac)
	}
	ctx, cancel := context.WithTimeout(ctx, linkPatience)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		links, err := net.Interfaces()
		if err != nil {
			return net.Interface{}, err
		}
		for _, l := range links {
			if bytes.Equal(l.HardwareAddr, hw) {
				return l, nil
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return net.Interface{}, noLink(mac)
		}
	}
}

// Loopback brings up lo.
func Loopback() error {
	s, err := openNetlink()
	if err != nil {
		return err
	}
	defer s.close()
	return s.setLink(1, 0) // lo is always the first
}

// replaceAddress makes want the only address of its family (link-local ones stay).
func (s *netlink) replaceAddress(link net.Interface, want netip.Prefix) error {
	addrs, err := link.Addrs()
	if err != nil {
		return err
	}
	have := false
	for _, a := range addrs {
		old, err := netip.ParsePrefix(a.String())
		switch {
		case err != nil || old.Addr().Is4() != want.Addr().Is4() || old.Addr().IsLinkLocalUnicast():
		case old == want:
			have = true
		default:
			if err := s.address(unix.RTM_DELADDR, 0, link.Index, old); err != nil {
				return err
			}
		}
	}
	if have {
		return nil
	}
	return s.address(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, link.Index, want)
}

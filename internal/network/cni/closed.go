package cni

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// A packet of a guest to a closed network is redirected to the guest's own tap, where it came in, and ends there. The drop
// action is a separate module, which not every kernel has. A packet without any action would reach the kernel of the namespace.
// The plugins' own link and rules are not changed. There is no connection tracking here, so guests cannot answer closed
// networks either.

// The order in which filters see a frame: those of one protocol come first.
const (
	priorityIPv4 = 1 + iota
	priorityIPv6
	priorityAll
)

// match is a filter of IP packets. pass says that matching packets are redirected normally.
type match struct {
	protocol uint16
	keys     []nl.TcU32Key
	pass     bool
}

// plan is pure: it returns the matches that apply, in this order, before a packet of the guest behind nic is redirected. The
// guest may always reach its name servers, and its own subnet is open, because the node sends its probes from there.
func plan(c network.Closed, nic vm.NIC) (out []match) {
	open := func(p netip.Prefix, keys ...nl.TcU32Key) {
		m := to(p)
		m.pass, m.keys = true, append(m.keys, keys...)
		out = append(out, m)
	}
	for _, s := range append([]string{fmt.Sprintf("%s/%d", nic.IP, nic.Prefix)}, nic.Addresses...) {
		if p, err := netip.ParsePrefix(s); err == nil && !p.Addr().IsLinkLocalUnicast() {
			open(p.Masked())
		}
	}
	for _, d := range nic.DNS {
		a, err := netip.ParseAddr(d)
		if err != nil {
			continue // not an address, so no guest can query it
		}
		for _, p := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			open(netip.PrefixFrom(a, a.BitLen()), port(a.Is6(), p, 53)...)
		}
	}
	for _, p := range c.Open {
		open(p)
	}
	for _, p := range c.Closed {
		out = append(out, to(p))
	}
	return out
}

// to matches packets to p.
func to(p netip.Prefix) match {
	m, offset := match{protocol: unix.ETH_P_IP}, int32(16)
	if p.Addr().Is6() {
		m.protocol, offset = unix.ETH_P_IPV6, 24
	}
	addr, mask := p.Addr().AsSlice(), net.CIDRMask(p.Bits(), p.Addr().BitLen())
	for i := 0; i < len(addr); i += 4 {
		m.keys = append(m.keys, nl.TcU32Key{Mask: binary.BigEndian.Uint32(mask[i:]), Val: binary.BigEndian.Uint32(addr[i:]), Off: offset + int32(i)})
	}
	return m
}

// port matches a destination port of a transport protocol, in packets without IPv4 options and IPv6 extension headers.
func port(ipv6 bool, transport byte, number uint32) []nl.TcU32Key {
	if ipv6 {
		return []nl.TcU32Key{{Mask: 0xff00, Val: uint32(transport) << 8, Off: 4}, {Mask: 0xffff, Val: number, Off: 40}}
	}
	return []nl.TcU32Key{
		{Mask: 0x0f000000, Val: 5 << 24}, // header length of five words
		{Mask: 0xff0000, Val: uint32(transport) << 16, Off: 8},
		{Mask: 0xffff, Val: number, Off: 20},
	}
}

// fence adds the filters of a plan to the ingress of tap; packets that pass go out of to.
func fence(tap, to netlink.Link, plan []match) error {
	for _, m := range plan {
		priority := uint16(priorityIPv4)
		if m.protocol == unix.ETH_P_IPV6 {
			priority = priorityIPv6
		}
		end := tap
		if m.pass {
			end = to
		}
		err := netlink.FilterAdd(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: tap.Attrs().Index, Parent: ingress, Priority: priority, Protocol: m.protocol},
			Sel:         &nl.TcU32Sel{Flags: nl.TC_U32_TERMINAL, Keys: m.keys},
			Actions:     []netlink.Action{netlink.NewMirredAction(end.Attrs().Index)},
		})
		if err != nil {
			return fmt.Errorf("close networks at tap %s: %w", tap.Attrs().Name, err)
		}
	}
	return nil
}

package mdns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	port       = 5353
	maxPacket  = 9000 // bytes (RFC 6762, 17)
	hops       = 255  // of what we send
	sendTime   = time.Second
	ifaceLimit = 64
)

var (
	group4 = net.IPv4(224, 0, 0, 251)
	group6 = net.ParseIP("ff02::fb")
)

// packet is a datagram that came to the multicast group.
type packet struct {
	data  []byte
	iface int // index
	from  *net.UDPAddr
}

// socket is in the multicast group on some interfaces, in one version of IP.
type socket struct {
	four   *ipv4.PacketConn
	six    *ipv6.PacketConn
	closer net.PacketConn
	joined []int // indices of interfaces
}

// interfaces returns the interfaces with these names; without names, all that are up, have multicast, lead to other machines and have an
// address that these can use. except names interfaces that are not meant then.
func interfaces(names, except []string) ([]net.Interface, error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, errdefs.New(errdefs.Internal, "list the network interfaces: %w", err)
	}
	var chosen []net.Interface
	for _, i := range all {
		named := slices.Contains(names, i.Name)
		usual := len(names) == 0 && i.Flags&net.FlagLoopback == 0 && i.Flags&net.FlagPointToPoint == 0
		usual = usual && !slices.Contains(except, i.Name) && slices.ContainsFunc(addressesOf(i.Index), func(a netip.Addr) bool { return a.Is4() || !a.IsLinkLocalUnicast() })
		if (named || usual) && i.Flags&net.FlagUp != 0 && (i.Flags&net.FlagMulticast != 0 || named) && len(chosen) < ifaceLimit {
			chosen = append(chosen, i)
		}
	}
	if len(chosen) == 0 {
		return nil, errdefs.Unavailablef("no network interface is up that has multicast (asked for: %q)", names)
	}
	return chosen, nil
}

// open joins the group on the interfaces, in IPv4 and IPv6 where they have it.
func open(ifaces []net.Interface) ([]*socket, error) {
	var out []*socket
	var errs []error
	for _, network := range []string{"udp4", "udp6"} {
		s, err := join(network, ifaces)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		out = append(out, s)
	}
	if len(out) == 0 {
		return nil, errdefs.New(errdefs.Unavailable, "join multicast DNS: %w", errors.Join(errs...))
	}
	return out, nil
}

func join(network string, ifaces []net.Interface) (s *socket, err error) {
	group := group4
	if network == "udp6" {
		group = group6
	}
	// The port is shared with other programs that speak multicast DNS.
	conn, err := net.ListenUDP(network, &net.UDPAddr{IP: group, Port: port})
	if err != nil {
		return nil, err
	}
	s = &socket{closer: conn}
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	var joinGroup func(*net.Interface, net.Addr) error
	if network == "udp4" {
		s.four = ipv4.NewPacketConn(conn)
		err = errors.Join(s.four.SetControlMessage(ipv4.FlagInterface|ipv4.FlagDst, true), s.four.SetMulticastTTL(hops), s.four.SetMulticastLoopback(true))
		joinGroup = s.four.JoinGroup
	} else {
		s.six = ipv6.NewPacketConn(conn)
		err = errors.Join(s.six.SetControlMessage(ipv6.FlagInterface|ipv6.FlagDst, true), s.six.SetMulticastHopLimit(hops), s.six.SetMulticastLoopback(true))
		joinGroup = s.six.JoinGroup
	}
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, i := range ifaces {
		if err := joinGroup(&i, &net.UDPAddr{IP: group}); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", i.Name, err))
			continue
		}
		s.joined = append(s.joined, i.Index)
	}
	if len(s.joined) == 0 {
		return nil, errors.Join(errs...)
	}
	return s, nil
}

// read returns the next datagram that came to the group on one of the interfaces.
func (s *socket) read(buf []byte) (packet, error) {
	for {
		var n, iface int
		var dst net.IP
		var from net.Addr
		var err error
		if s.four != nil {
			var cm *ipv4.ControlMessage
			if n, cm, from, err = s.four.ReadFrom(buf); cm != nil {
				iface, dst = cm.IfIndex, cm.Dst
			}
		} else {
			var cm *ipv6.ControlMessage
			if n, cm, from, err = s.six.ReadFrom(buf); cm != nil {
				iface, dst = cm.IfIndex, cm.Dst
			}
		}
		if err != nil {
			return packet{}, err
		}
		udp, ok := from.(*net.UDPAddr)
		if ok && slices.Contains(s.joined, iface) && dst.IsMulticast() {
			return packet{data: buf[:n], iface: iface, from: udp}, nil
		}
	}
}

// send sends data on an interface: to the group, or to one address.
func (s *socket) send(data []byte, iface int, to *net.UDPAddr) error {
	if err := s.closer.SetWriteDeadline(time.Now().Add(sendTime)); err != nil {
		return err
	}
	if s.four != nil {
		if to == nil {
			to = &net.UDPAddr{IP: group4, Port: port}
		}
		_, err := s.four.WriteTo(data, &ipv4.ControlMessage{IfIndex: iface}, to)
		return err
	}
	if to == nil {
		to = &net.UDPAddr{IP: group6, Port: port}
	}
	_, err := s.six.WriteTo(data, &ipv6.ControlMessage{IfIndex: iface}, to)
	return err
}

func (s *socket) close() error { return s.closer.Close() }

// addressesOf returns the addresses of an interface.
func addressesOf(index int) (out []netip.Addr) {
	i, err := net.InterfaceByIndex(index)
	if err != nil {
		return nil
	}
	addrs, err := i.Addrs()
	if err != nil {
		return nil
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			out = append(out, p.Addr().Unmap())
		}
	}
	return out
}

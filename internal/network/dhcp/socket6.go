package dhcp

import (
	"errors"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

const (
	serverPort6 = 547
	clientPort6 = 546
)

// AllServers is the address to which guests send DHCPv6 (All_DHCP_Relay_Agents_and_Servers of RFC 8415, section 7.1).
var AllServers = netip.MustParseAddr("ff02::1:2")

// Socket6 is a DHCPv6 server's socket: UDP port 547 of one link, for packets to AllServers. Unicast does not arrive, as RFC
// 8415 section 18.4 requires if no server has offered it.
type Socket6 struct{ udp *net.UDPConn }

// Listen6 opens the socket on the link called name, in the network namespace of the calling thread. The link must have one
// link-local address, the source of answers. It returns FailedPrecondition if another program serves there.
func Listen6(name string) (*Socket6, error) {
	udp, _, err := listen("DHCPv6", name, unix.AF_INET6, serverPort6, func(fd int, link *net.Interface) error {
		return errors.Join(
			unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1),
			unix.SetsockoptIPv6Mreq(fd, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP, &unix.IPv6Mreq{Multiaddr: AllServers.As16(), Interface: uint32(link.Index)}),
			unix.Bind(fd, &unix.SockaddrInet6{Port: serverPort6, Addr: AllServers.As16(), ZoneId: uint32(link.Index)}),
		)
	})
	if err != nil {
		return nil, err
	}
	return &Socket6{udp}, nil
}

// Close closes the socket; a pending receive returns.
func (s *Socket6) Close() { s.udp.Close() }

// send sends a to the guest. The socket is bound to the link, so the address needs no zone.
func (s *Socket6) send(a Answer) error {
	_, err := s.udp.WriteToUDPAddrPort(a.Packet, netip.AddrPortFrom(a.To, clientPort6))
	return err
}

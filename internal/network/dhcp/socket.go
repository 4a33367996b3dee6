package dhcp

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	serverPort = 67
	clientPort = 68
)

// Socket is a server's socket: UDP port 67 of one link, plus a packet socket on the same link for guests that do not answer ARP
// yet.
type Socket struct {
	udp   *net.UDPConn
	raw   int // packet socket, used for sending only
	index int // index of the link
}

// Listen opens the sockets on the link called name, in the network namespace of the calling thread. It returns
// FailedPrecondition if another program serves there.
func Listen(name string) (*Socket, error) {
	udp, link, err := listen("DHCP", name, unix.AF_INET, serverPort, func(fd int, _ *net.Interface) error {
		return errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BROADCAST, 1),
			unix.Bind(fd, &unix.SockaddrInet4{Port: serverPort}),
		)
	})
	if err != nil {
		return nil, err
	}
	raw, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) // protocol 0 receives nothing
	if err != nil {
		udp.Close()
		return nil, fmt.Errorf("open a packet socket for DHCP on %s: %w", name, err)
	}
	return &Socket{udp: udp, raw: raw, index: link.Index}, nil
}

// listen opens the UDP socket of a protocol on the link called name. bind sets its options and binds it to port.
func listen(protocol, name string, family, port int, bind func(fd int, link *net.Interface) error) (*net.UDPConn, *net.Interface, error) {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return nil, nil, fmt.Errorf("listen for %s on %s: %w", protocol, name, err)
	}
	udp, err := listenUDP(link, family, bind)
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, nil, errdefs.Preconditionf("listen for %s on %s: another program uses UDP port %d; stop it or exclude %s in it (dnsmasq: except-interface=%s)", protocol, name, port, name, name)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("listen for %s on %s: %w", protocol, name, err)
	}
	return udp, link, nil
}

func listenUDP(link *net.Interface, family int, bind func(fd int, link *net.Interface) error) (*net.UDPConn, error) {
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_UDP)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "dhcp")
	defer f.Close() // FilePacketConn duplicates it
	if err := errors.Join(unix.BindToDevice(fd, link.Name), bind(fd, link)); err != nil {
		return nil, err
	}
	c, err := net.FilePacketConn(f)
	if err != nil {
		return nil, err
	}
	return c.(*net.UDPConn), nil
}

// Close closes both sockets; a pending receive returns.
func (s *Socket) Close() {
	s.udp.Close()
	_ = unix.Close(s.raw)
}

// send sends a to the guest.
func (s *Socket) send(from netip.Addr, a Answer) error {
	if a.To == broadcast {
		_, err := s.udp.WriteToUDPAddrPort(a.Packet, netip.AddrPortFrom(a.To, clientPort))
		return err
	}
	to := unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_IP), Ifindex: s.index, Halen: 6}
	copy(to.Addr[:], a.MAC)
	return unix.Sendto(s.raw, datagram(from, a.To, a.Packet), 0, &to)
}

// datagram returns the IPv4 packet with payload from our server port to a guest's client port.
func datagram(from, to netip.Addr, payload []byte) []byte {
	const header = 20 + 8
	b := make([]byte, header, header+len(payload))
	b[0] = 0x45
	b[1] = 0xc0 // internetwork control, as other DHCP servers use
	binary.BigEndian.PutUint16(b[2:], uint16(header+len(payload)))
	b[8] = 64
	b[9] = unix.IPPROTO_UDP
	copy(b[12:], from.AsSlice())
	copy(b[16:], to.AsSlice())
	binary.BigEndian.PutUint16(b[10:], checksum(b[:20]))
	binary.BigEndian.PutUint16(b[20:], serverPort)
	binary.BigEndian.PutUint16(b[22:], clientPort)
	binary.BigEndian.PutUint16(b[24:], uint16(8+len(payload)))
	b = append(b, payload...)

	// The UDP checksum covers a pseudo header. Zero would mean no checksum, so its complement is sent, which is equivalent.
	pseudo := append(append(append([]byte{}, b[12:20]...), 0, unix.IPPROTO_UDP), b[24:26]...)
	sum := cmp.Or(checksum(append(pseudo, b[20:]...)), 0xffff)
	binary.BigEndian.PutUint16(b[26:], sum)
	return b
}

// checksum is the Internet checksum of RFC 1071.
func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(b[0])<<8 | uint32(b[1])
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

func htons(v uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], v)
	return binary.NativeEndian.Uint16(b[:])
}

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

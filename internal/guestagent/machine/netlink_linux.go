package machine

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// netlink is a route socket with the four requests we need. A library would add a megabyte to every guest's memory.
type netlink struct {
	fd  int
	seq uint32
}

func openNetlink() (*netlink, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open route socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("bind route socket: %w", err)
	}
	return &netlink{fd: fd}, nil
}

func (s *netlink) close() { unix.Close(s.fd) }

// setLink sets the interface up, and its MTU unless mtu is 0.
func (s *netlink) setLink(index, mtu int) error {
	// struct ifinfomsg: family, pad, type, index, flags, change
	body := []byte{unix.AF_UNSPEC, 0, 0, 0}
	body = binary.NativeEndian.AppendUint32(body, uint32(index))
	body = binary.NativeEndian.AppendUint32(body, unix.IFF_UP)
	body = binary.NativeEndian.AppendUint32(body, unix.IFF_UP)
	if mtu > 0 {
		body = attribute(body, unix.IFLA_MTU, binary.NativeEndian.AppendUint32(nil, uint32(mtu)))
	}
	if err := s.request(unix.RTM_NEWLINK, 0, body); err != nil {
		return fmt.Errorf("set it up: %w", err)
	}
	return nil
}

// address adds or deletes an address.
func (s *netlink) address(kind, flags uint16, index int, p netip.Prefix) error {
	// struct ifaddrmsg: family, prefixlen, flags, scope, index
	body := []byte{family(p.Addr()), byte(p.Bits()), unix.IFA_F_NODAD, 0}
	body = binary.NativeEndian.AppendUint32(body, uint32(index))
	body = attribute(body, unix.IFA_LOCAL, p.Addr().AsSlice())
	body = attribute(body, unix.IFA_ADDRESS, p.Addr().AsSlice())
	if err := s.request(kind, flags, body); err != nil {
		return fmt.Errorf("change address %s: %w", p, err)
	}
	return nil
}

// addRoute adds or replaces a route to dst, on the link itself when gateway is not valid.
func (s *netlink) addRoute(index int, dst netip.Prefix, gateway netip.Addr) error {
	scope := byte(unix.RT_SCOPE_UNIVERSE)
	if !gateway.IsValid() {
		scope = unix.RT_SCOPE_LINK
	}
	// struct rtmsg: family, dst_len, src_len, tos, table, protocol, scope, type, flags
	body := []byte{
		family(dst.Addr()), byte(dst.Bits()), 0, 0,
		unix.RT_TABLE_MAIN, unix.RTPROT_BOOT, scope, unix.RTN_UNICAST,
		0, 0, 0, 0,
	}
	if dst.Bits() > 0 {
		body = attribute(body, unix.RTA_DST, dst.Addr().AsSlice())
	}
	if gateway.IsValid() {
		body = attribute(body, unix.RTA_GATEWAY, gateway.AsSlice())
	}
	body = attribute(body, unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, uint32(index)))
	if err := s.request(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, body); err != nil {
		return fmt.Errorf("add the route to %s: %w", dst, err)
	}
	return nil
}

func family(a netip.Addr) byte {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func attribute(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, make([]byte, (4-len(value)%4)%4)...)
}

// request sends one message and waits for the kernel's acknowledgement.
func (s *netlink) request(kind, flags uint16, body []byte) error {
	s.seq++
	m := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, unix.NLM_F_REQUEST|unix.NLM_F_ACK|flags)
	m = binary.NativeEndian.AppendUint32(m, s.seq)
	m = binary.NativeEndian.AppendUint32(m, 0)
	m = append(m, body...)
	if err := unix.Sendto(s.fd, m, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buf := make([]byte, 8192)
	for {
		n, _, err := unix.Recvfrom(s.fd, buf, 0)
		if err != nil {
			return err
		}
		if n < unix.NLMSG_HDRLEN+4 || binary.NativeEndian.Uint16(buf[4:]) != unix.NLMSG_ERROR ||
			binary.NativeEndian.Uint32(buf[8:]) != s.seq {
			continue
		}
		if code := int32(binary.NativeEndian.Uint32(buf[unix.NLMSG_HDRLEN:])); code != 0 {
			return unix.Errno(-code)
		}
		return nil
	}
}

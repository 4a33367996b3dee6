package machine

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// netlink is a route socket with the six requests that we need. A library would add a megabyte to every guest's memory.
type netlink struct {
	fd  int
	seq uint32
	buf []byte
}

// device is an interface of the machine.
type device struct {
	index int
	mac   net.HardwareAddr
}

// address is an address of an interface.
type address struct {
	index  int
	prefix netip.Prefix
}

// replySize is the largest message that the kernel sends to a reader with a buffer of this size, in bytes.
const replySize = 8192

func openNetlink() (*netlink, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open route socket: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("bind route socket: %w", err)
	}
	return &netlink{fd: fd, buf: make([]byte, replySize)}, nil
}

func (s *netlink) close() { unix.Close(s.fd) }

// linkChange is what setLink does in addition to setting the interface up.
type linkChange struct {
	down bool // set it down instead
	mac  net.HardwareAddr
	mtu  int // bytes; 0 keeps it
}

// setLink changes an interface. The kernel applies the MAC and the MTU before it sets the interface up.
func (s *netlink) setLink(index int, c linkChange) error {
	flags := uint32(unix.IFF_UP)
	if c.down {
		flags = 0
	}
	// struct ifinfomsg: family, pad, type, index, flags, change
	body := []byte{unix.AF_UNSPEC, 0, 0, 0}
	body = binary.NativeEndian.AppendUint32(body, uint32(index))
	body = binary.NativeEndian.AppendUint32(body, flags)
	body = binary.NativeEndian.AppendUint32(body, unix.IFF_UP)
	if c.mac != nil {
		body = attribute(body, unix.IFLA_ADDRESS, c.mac)
	}
	if c.mtu > 0 {
		body = attribute(body, unix.IFLA_MTU, binary.NativeEndian.AppendUint32(nil, uint32(c.mtu)))
	}
	err := s.request(unix.RTM_NEWLINK, 0, body)
	switch {
	case err == nil:
		return nil
	case c.down:
		return fmt.Errorf("set it down: %w", err)
	case c.mac != nil:
		return fmt.Errorf("give it its MAC and set it up: %w", err)
	}
	return fmt.Errorf("set it up: %w", err)
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

// addRoute adds or replaces a route to dst; without a valid gateway, on the link itself.
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

// firstIndexes is the range that nearby searches: the interfaces that a guest has since boot.
const firstIndexes = 8

// nearby lists the first interfaces. It reads nothing else about them, so in a guest with cold code it takes a tenth of
// the time of links.
func (s *netlink) nearby() []device {
	var all []device
	for index := 1; index <= firstIndexes; index++ {
		var r struct { // struct ifreq
			name  [unix.IFNAMSIZ]byte
			value [24]byte
		}
		binary.NativeEndian.PutUint32(r.value[:], uint32(index))
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s.fd), unix.SIOCGIFNAME, uintptr(unsafe.Pointer(&r))); errno != 0 {
			continue
		}
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s.fd), unix.SIOCGIFHWADDR, uintptr(unsafe.Pointer(&r))); errno != 0 {
			continue
		}
		if binary.NativeEndian.Uint16(r.value[:]) == unix.ARPHRD_ETHER { // struct sockaddr: family, data
			all = append(all, device{index: index, mac: append(net.HardwareAddr(nil), r.value[2:8]...)})
		}
	}
	return all
}

// links lists the interfaces.
func (s *netlink) links() ([]device, error) {
	var all []device
	// struct ifinfomsg
	err := s.dump(unix.RTM_GETLINK, make([]byte, unix.SizeofIfInfomsg), func(kind uint16, m []byte) {
		if kind != unix.RTM_NEWLINK || len(m) < unix.SizeofIfInfomsg {
			return
		}
		d := device{index: int(binary.NativeEndian.Uint32(m[4:]))}
		attributes(m[unix.SizeofIfInfomsg:], func(kind uint16, value []byte) {
			if kind == unix.IFLA_ADDRESS {
				d.mac = append(net.HardwareAddr(nil), value...)
			}
		})
		all = append(all, d)
	})
	if err != nil {
		return nil, fmt.Errorf("list the interfaces: %w", err)
	}
	return all, nil
}

// addresses lists the addresses of all interfaces.
func (s *netlink) addresses() ([]address, error) {
	var all []address
	// struct ifaddrmsg
	err := s.dump(unix.RTM_GETADDR, make([]byte, unix.SizeofIfAddrmsg), func(kind uint16, m []byte) {
		if kind != unix.RTM_NEWADDR || len(m) < unix.SizeofIfAddrmsg {
			return
		}
		var addr, local netip.Addr
		attributes(m[unix.SizeofIfAddrmsg:], func(kind uint16, value []byte) {
			switch kind {
			case unix.IFA_ADDRESS: // that of the peer, on a point-to-point link
				addr, _ = netip.AddrFromSlice(value)
			case unix.IFA_LOCAL:
				local, _ = netip.AddrFromSlice(value)
			}
		})
		if local.IsValid() {
			addr = local
		}
		if p := netip.PrefixFrom(addr, int(m[1])); p.IsValid() {
			all = append(all, address{index: int(binary.NativeEndian.Uint32(m[4:])), prefix: p})
		}
	})
	if err != nil {
		return nil, fmt.Errorf("list the addresses: %w", err)
	}
	return all, nil
}

// attributes calls fn with every attribute in b.
func attributes(b []byte, fn func(kind uint16, value []byte)) {
	for len(b) >= unix.SizeofRtAttr {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofRtAttr || n > len(b) {
			return
		}
		fn(binary.NativeEndian.Uint16(b[2:])&^uint16(unix.NLA_F_NESTED), b[unix.SizeofRtAttr:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}

var errTruncated = errors.New("an answer of the kernel is longer than a page")

// request sends one message and waits for the kernel's acknowledgement.
func (s *netlink) request(kind, flags uint16, body []byte) error {
	if err := s.send(kind, unix.NLM_F_ACK|flags, body); err != nil {
		return err
	}
	return s.receive(nil)
}

// dump sends a query and calls fn with each part of the answer. fn may use that part only until it returns.
func (s *netlink) dump(kind uint16, body []byte, fn func(kind uint16, m []byte)) error {
	if err := s.send(kind, unix.NLM_F_DUMP, body); err != nil {
		return err
	}
	return s.receive(fn)
}

func (s *netlink) send(kind, flags uint16, body []byte) error {
	s.seq++
	m := make([]byte, 0, unix.NLMSG_HDRLEN+len(body))
	m = binary.NativeEndian.AppendUint32(m, uint32(unix.NLMSG_HDRLEN+len(body)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, unix.NLM_F_REQUEST|flags)
	m = binary.NativeEndian.AppendUint32(m, s.seq)
	m = binary.NativeEndian.AppendUint32(m, 0)
	m = append(m, body...)
	return unix.Sendto(s.fd, m, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

// receive reads the answer to the last message up to its end: an acknowledgement, or the end of a dump.
func (s *netlink) receive(fn func(kind uint16, m []byte)) error {
	for {
		n, _, flags, _, err := unix.Recvmsg(s.fd, s.buf, nil, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		if flags&unix.MSG_TRUNC != 0 {
			return errTruncated
		}
		if done, err := s.messages(s.buf[:n], fn); done || err != nil {
			return err
		}
	}
}

// messages handles the messages of one read, and reports whether the answer is complete.
func (s *netlink) messages(b []byte, fn func(kind uint16, m []byte)) (bool, error) {
	for len(b) >= unix.NLMSG_HDRLEN {
		n := int(binary.NativeEndian.Uint32(b))
		if n < unix.NLMSG_HDRLEN || n > len(b) {
			return false, errTruncated
		}
		kind, seq, m := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint32(b[8:]), b[unix.NLMSG_HDRLEN:n]
		b = b[min((n+3)&^3, len(b)):]
		switch {
		case seq != s.seq: // of an earlier query
		case kind == unix.NLMSG_DONE:
			return true, nil
		case kind == unix.NLMSG_ERROR && len(m) >= 4:
			if code := int32(binary.NativeEndian.Uint32(m)); code != 0 {
				return true, unix.Errno(-code)
			}
			return true, nil
		case fn != nil:
			fn(kind, m)
		}
	}
	return false, nil
}

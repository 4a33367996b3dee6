package probe

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Socket is the kind of socket for pings of guests. The strings are the values of a metric's label.
type Socket string

// The kinds of sockets.
const (
	SocketRaw  Socket = "raw"  // needs CAP_NET_RAW
	SocketPing Socket = "ping" // needs a group in the sysctl net.ipv4.ping_group_range
	SocketNone Socket = "none" // neither can be opened
)

const (
	protocolICMP   = 1
	protocolICMPv6 = 58
)

// Pinger sends echo requests to any number of addresses over one socket per address family. It matches a reply with its
// request by a number in the packet. It is safe for concurrent use.
type Pinger struct {
	kind   Socket
	v4, v6 *icmp.PacketConn // v6 is nil on a host without IPv6
	secret [8]byte          // part of every request, so that nobody can forge replies

	mu      sync.Mutex
	count   uint64
	waiting map[uint64]echo
}

// echo is an echo request without a reply yet.
type echo struct {
	to   netip.Addr
	done chan struct{}
}

// OpenPinger opens raw sockets or, if that is refused, ping sockets. The error says why neither could be opened. The caller
// runs Run, which closes them.
func OpenPinger() (*Pinger, error) {
	p, err := openRaw()
	if err == nil {
		return p, nil
	}
	p, also := openPing()
	if also != nil {
		return nil, fmt.Errorf("open ICMP socket: %w", errors.Join(err, also))
	}
	return p, nil
}

func openRaw() (*Pinger, error) {
	p, err := newPinger(SocketRaw)
	if err != nil {
		return nil, err
	}
	if p.v4, err = icmp.ListenPacket("ip4:icmp", "0.0.0.0"); err != nil {
		return nil, err
	}
	p.v6, _ = icmp.ListenPacket("ip6:ipv6-icmp", "::") // a host may have no IPv6
	if err := p.filter(); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func openPing() (*Pinger, error) {
	p, err := newPinger(SocketPing)
	if err != nil {
		return nil, err
	}
	if p.v4, err = icmp.ListenPacket("udp4", "0.0.0.0"); err != nil {
		return nil, err
	}
	p.v6, _ = icmp.ListenPacket("udp6", "::")
	return p, nil
}

func newPinger(kind Socket) (*Pinger, error) {
	p := &Pinger{kind: kind, waiting: map[uint64]echo{}}
	if _, err := rand.Read(p.secret[:]); err != nil {
		return nil, fmt.Errorf("create a secret for pings: %w", err)
	}
	return p, nil
}

// filter makes the kernel drop all packets except echo replies, because a raw socket gets a copy of all ICMP packets of the
// host.
func (p *Pinger) filter() error {
	var f4 ipv4.ICMPFilter
	f4.SetAll(true)
	f4.Accept(ipv4.ICMPTypeEchoReply)
	if err := p.v4.IPv4PacketConn().SetICMPFilter(&f4); err != nil {
		return fmt.Errorf("filter ICMP socket: %w", err)
	}
	if p.v6 == nil {
		return nil
	}
	var f6 ipv6.ICMPFilter
	f6.SetAll(true)
	f6.Accept(ipv6.ICMPTypeEchoReply)
	if err := p.v6.IPv6PacketConn().SetICMPFilter(&f6); err != nil {
		return fmt.Errorf("filter ICMPv6 socket: %w", err)
	}
	return nil
}

// Kind returns the kind of socket that p uses. A nil Pinger has none.
func (p *Pinger) Kind() Socket {
	if p == nil {
		return SocketNone
	}
	return p.kind
}

// Run receives replies until ctx ends, and closes the sockets. A nil Pinger only waits.
func (p *Pinger) Run(ctx context.Context) error {
	if p == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	var readers sync.WaitGroup
	fail := make(chan error, 2)
	for _, c := range []*icmp.PacketConn{p.v4, p.v6} {
		if c != nil {
			readers.Go(func() { fail <- p.read(c) })
		}
	}
	defer readers.Wait()
	defer p.close()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case err := <-fail:
		return err
	}
}

func (p *Pinger) close() {
	p.v4.Close()
	if p.v6 != nil {
		p.v6.Close()
	}
}

// read receives replies until the socket is closed. It ignores errors of single packets (such as an unreachable host).
func (p *Pinger) read(c *icmp.PacketConn) error {
	protocol := protocolICMP
	if c == p.v6 {
		protocol = protocolICMPv6
	}
	buf := make([]byte, 512)
	for {
		n, from, err := c.ReadFrom(buf)
		switch {
		case errors.Is(err, net.ErrClosed):
			return nil
		case err != nil && n == 0 && !soft(err):
			return fmt.Errorf("read ICMP socket: %w", err)
		case err == nil:
			p.take(protocol, buf[:n], addrOf(from))
		}
	}
}

// soft reports whether err concerns a single packet, so that the socket can still be used.
func soft(err error) bool {
	var call *os.SyscallError
	return errors.As(err, &call)
}

func addrOf(a net.Addr) netip.Addr {
	var addr netip.Addr
	switch a := a.(type) {
	case *net.IPAddr:
		addr, _ = netip.AddrFromSlice(a.IP)
	case *net.UDPAddr:
		addr, _ = netip.AddrFromSlice(a.IP)
	}
	return addr.Unmap()
}

// take handles one packet. The packet may come from any sender.
func (p *Pinger) take(protocol int, packet []byte, from netip.Addr) {
	m, err := icmp.ParseMessage(protocol, packet)
	if err != nil || m.Type != ipv4.ICMPTypeEchoReply && m.Type != ipv6.ICMPTypeEchoReply {
		return
	}
	body, ok := m.Body.(*icmp.Echo)
	if !ok || len(body.Data) != 16 || [8]byte(body.Data[:8]) != p.secret {
		return
	}
	number := binary.BigEndian.Uint64(body.Data[8:])
	p.mu.Lock()
	defer p.mu.Unlock()
	if e, ok := p.waiting[number]; ok && e.to == from {
		delete(p.waiting, number)
		close(e.done)
	}
}

// Ping sends one echo request to addr and waits for the reply. Errors: Unavailable if the request cannot be sent, or if ctx
// ends before the reply arrives.
func (p *Pinger) Ping(ctx context.Context, addr netip.Addr) error {
	addr = addr.Unmap()
	c, kind := p.v4, icmp.Type(ipv4.ICMPTypeEcho)
	if addr.Is6() {
		c, kind = p.v6, ipv6.ICMPTypeEchoRequest
	}
	if c == nil {
		return errdefs.Unavailablef("this host has no IPv6")
	}
	e := echo{to: addr.WithZone(""), done: make(chan struct{})}
	p.mu.Lock()
	p.count++
	number := p.count
	p.waiting[number] = e
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.waiting, number)
	}()
	// The kernel fills in the ICMPv6 checksum, and the identifier for ping sockets.
	packet, err := (&icmp.Message{Type: kind, Body: &icmp.Echo{
		ID: int(binary.BigEndian.Uint16(p.secret[:])), Seq: int(number & 0xffff),
		Data: binary.BigEndian.AppendUint64(p.secret[:8:8], number),
	}}).Marshal(nil)
	if err != nil {
		return fmt.Errorf("encode echo: %w", err)
	}
	var to net.Addr = &net.IPAddr{IP: addr.AsSlice(), Zone: addr.Zone()}
	if p.kind == SocketPing {
		to = &net.UDPAddr{IP: addr.AsSlice(), Zone: addr.Zone()}
	}
	if _, err := c.WriteTo(packet, to); err != nil {
		return errdefs.Unavailablef("send echo: %w", err)
	}
	select {
	case <-e.done:
		return nil
	case <-ctx.Done():
		return errdefs.Unavailablef("no answer: %w", ctx.Err())
	}
}

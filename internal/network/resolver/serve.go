package resolver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Sockets receive the questions that arrive on one link, and no others: a packet from elsewhere that is addressed to us reaches nobody.
type Sockets struct {
	udp []net.PacketConn
	tcp []net.Listener
}

// Listen opens the sockets at addrs on the link called name, in the network namespace of the calling thread.
// Errors: FailedPrecondition if another program answers there.
func Listen(ctx context.Context, name string, addrs []netip.AddrPort) (_ *Sockets, err error) {
	s := &Sockets{}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	l := &net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var bound error
		called := c.Control(func(fd uintptr) {
			bound = errors.Join(unix.BindToDevice(int(fd), name), unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1))
		})
		return errors.Join(called, bound)
	}}
	for _, a := range addrs {
		udp, err := l.ListenPacket(ctx, "udp", a.String())
		if err != nil {
			return nil, taken(name, a, err)
		}
		s.udp = append(s.udp, udp)
		tcp, err := l.Listen(ctx, "tcp", a.String())
		if err != nil {
			return nil, taken(name, a, err)
		}
		s.tcp = append(s.tcp, &bounded{Listener: tcp, of: map[netip.Addr]int{}})
	}
	return s, nil
}

func taken(name string, a netip.AddrPort, err error) error {
	if errors.Is(err, unix.EADDRINUSE) {
		return errdefs.Preconditionf("answer DNS on %s: another program uses %s; stop it or exclude %s in it (dnsmasq: except-interface=%s)", name, a, name, name)
	}
	return fmt.Errorf("answer DNS on %s: %w", name, err)
}

// Close closes the sockets.
func (s *Sockets) Close() {
	for _, c := range s.udp {
		_ = c.Close()
	}
	for _, l := range s.tcp {
		_ = l.Close()
	}
}

// Addr returns the first address on which it listens.
func (s *Sockets) Addr() net.Addr { return s.udp[0].LocalAddr() }

// Serve answers on s until ctx ends, then closes s and returns nil. If it cannot go on, it closes s and returns the reason.
func (r *Resolver) Serve(ctx context.Context, s *Sockets) error {
	defer s.Close()
	g, gctx := errgroup.WithContext(ctx)
	run := func(d *dns.Server) {
		d.Handler, d.UDPSize, d.MaxTCPQueries = r, maxUDP, 64
		d.ReadTimeout, d.WriteTimeout, d.IdleTimeout = 5*time.Second, 5*time.Second, func() time.Duration { return 5 * time.Second }
		g.Go(d.ActivateAndServe)
	}
	for _, c := range s.udp {
		run(&dns.Server{PacketConn: c})
	}
	for _, l := range s.tcp {
		run(&dns.Server{Listener: l})
	}
	stop := context.AfterFunc(gctx, s.Close)
	defer stop()
	if err := g.Wait(); err != nil && ctx.Err() == nil {
		return fmt.Errorf("answer DNS: %w", err)
	}
	return nil
}

// bounded is a listener with a bound on its connections, of all and of each guest. More are closed at once.
type bounded struct {
	net.Listener

	mu  sync.Mutex
	of  map[netip.Addr]int
	all int
}

// Accept implements net.Listener.
func (b *bounded) Accept() (net.Conn, error) {
	for {
		c, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from, ok := sender(c.RemoteAddr())
		if ok && b.add(from) {
			return &counted{Conn: c, done: sync.OnceFunc(func() { b.remove(from) })}, nil
		}
		_ = c.Close()
	}
}

func (b *bounded) add(from netip.Addr) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.all >= maxConns || b.of[from] >= maxConnsGuest {
		return false
	}
	b.all++
	b.of[from]++
	return true
}

func (b *bounded) remove(from netip.Addr) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all--
	if b.of[from]--; b.of[from] <= 0 {
		delete(b.of, from)
	}
}

// counted is a connection that is counted until it is closed.
type counted struct {
	net.Conn
	done func()
}

// Close implements net.Conn.
func (c *counted) Close() error {
	defer c.done()
	return c.Conn.Close()
}

// Package radv advertises the IPv6 prefix and router to the guests of one link (RFC 4861, RFC 4862, RFC 8106).
//
// It assigns no addresses: a guest makes its own from the prefix and its MAC, or is directed to a DHCPv6 server. So prefix and
// MAC are enough to know the address. The package sets no address and no route of the host.
package radv

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/mdlayher/ndp"
	"golang.org/x/net/ipv6"
)

// Prefix is the length of a prefix from which guests make addresses, in bits (RFC 4862, 5.5.3 with RFC 2464, 4).
const Prefix = 64

const (
	lifetime    = 9000 * time.Second // of the router, the maximum: guests keep it over our restarts
	minInterval = 200 * time.Second  // between unsolicited advertisements
	maxInterval = 600 * time.Second
	gather      = 20 * time.Millisecond // a burst of requests gets one answer
)

// Config is what guests are told.
type Config struct {
	Router netip.Addr   // our link-local address, the source of advertisements
	Prefix netip.Prefix // a /64
	DNS    []netip.Addr // IPv4 servers are left out
	Search []string
	MTU    int // bytes

	// Managed directs guests to DHCPv6 for their address and all other settings, and forbids addresses made from the prefix.
	Managed bool
	// Routed tells guests to send to each other through the router too.
	Routed bool
	// Apart returns the MACs of guests that have no address in the prefix. They get advertisements of their own, which direct them to DHCPv6.
	// Advertisements to all must be kept from them. nil: there are none.
	Apart func() []net.HardwareAddr
}

// apart returns what guests without an address in the prefix are told.
func (c Config) apart(mac net.HardwareAddr) *ndp.RouterAdvertisement {
	c.Managed = true
	return c.message(mac)
}

// Address returns the address that a guest with that MAC makes from a prefix: its modified EUI-64 (RFC 4291, appendix A). The
// MAC has 6 bytes.
func Address(prefix netip.Prefix, mac net.HardwareAddr) netip.Addr {
	b := prefix.Masked().Addr().As16()
	copy(b[8:], []byte{mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]})
	return netip.AddrFrom16(b)
}

// MAC is the inverse of Address for link-local addresses; false if the address is not made from a MAC.
func MAC(a netip.Addr) (net.HardwareAddr, bool) {
	b := a.As16()
	mac := net.HardwareAddr{b[8] ^ 2, b[9], b[10], b[13], b[14], b[15]}
	return mac, a == Address(LinkLocal, mac)
}

// LinkLocal is the prefix of addresses that are valid on one link.
var LinkLocal = netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80}), Prefix)

// message returns an advertisement from a link with that MAC.
func (c Config) message(mac net.HardwareAddr) *ndp.RouterAdvertisement {
	m := &ndp.RouterAdvertisement{
		CurrentHopLimit: 64, RouterLifetime: lifetime, ManagedConfiguration: c.Managed, OtherConfiguration: c.Managed,
		Options: []ndp.Option{
			&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: mac},
			&ndp.MTU{MTU: uint32(c.MTU)},
			&ndp.PrefixInformation{
				PrefixLength: Prefix, OnLink: !c.Routed, AutonomousAddressConfiguration: !c.Managed,
				ValidLifetime: ndp.Infinity, PreferredLifetime: ndp.Infinity, Prefix: c.Prefix.Masked().Addr(),
			},
		},
	}
	var servers []netip.Addr
	for _, a := range c.DNS {
		if a.Is6() && !a.Is4In6() {
			servers = append(servers, a)
		}
	}
	if len(servers) > 0 {
		m.Options = append(m.Options, &ndp.RecursiveDNSServer{Lifetime: lifetime, Servers: servers})
	}
	if len(c.Search) > 0 {
		m.Options = append(m.Options, &ndp.DNSSearchList{Lifetime: lifetime, DomainNames: c.Search})
	}
	return m
}

// Socket receives the requests of guests.
type Socket struct {
	conn *ndp.Conn
	mac  net.HardwareAddr
}

// Close closes the socket, if Serve has not.
func (s *Socket) Close() error { return s.conn.Close() }

var everybody, routers = netip.IPv6LinkLocalAllNodes(), netip.IPv6LinkLocalAllRouters()

// Listen opens a socket on the link called name, in the network namespace of the calling thread. The link must already have the
// router's address.
func Listen(name string, router netip.Addr) (*Socket, error) {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return nil, fmt.Errorf("listen for router solicitations on %s: %w", name, err)
	}
	// Use the index: package net caches link names for a minute, and our link may have been created again.
	zone := *link
	zone.Name = strconv.Itoa(link.Index)
	c, _, err := ndp.Listen(&zone, ndp.Addr(router.String()))
	if err != nil {
		return nil, fmt.Errorf("listen for router solicitations on %s: %w", name, err)
	}
	var only ipv6.ICMPFilter
	only.SetAll(true)
	only.Accept(ipv6.ICMPTypeRouterSolicitation)
	if err := errors.Join(c.SetICMPFilter(&only), c.JoinGroup(routers)); err != nil {
		c.Close()
		return nil, fmt.Errorf("listen for router solicitations on %s: %w", name, err)
	}
	return &Socket{conn: c, mac: link.HardwareAddr}, nil
}

// requests are the addresses from which guests have asked since the last answer.
type requests struct {
	mu    sync.Mutex
	from  map[netip.Addr]bool
	asked chan struct{} // capacity 1
}

func (r *requests) add(from netip.Addr) {
	r.mu.Lock()
	r.from[from.WithZone("")] = true
	r.mu.Unlock()
	select {
	case r.asked <- struct{}{}:
	default:
	}
}

func (r *requests) take() map[netip.Addr]bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.from
	r.from = map[netip.Addr]bool{}
	return out
}

// receivers says who gets an advertisement: all guests, and which of those apart. from is nil if nobody has asked. Who asks without an
// address may be any guest.
func (c Config) receivers(from map[netip.Addr]bool) (all bool, apart []netip.Addr) {
	every := from == nil || from[netip.IPv6Unspecified()]
	all = every
	others := len(from)
	if c.Apart != nil {
		for _, mac := range c.Apart() {
			a := Address(LinkLocal, mac)
			if from[a] {
				others--
			}
			if every || from[a] {
				apart = append(apart, a)
			}
		}
	}
	return all || others > 0, apart
}

// advertise sends what is due.
func (c Config) advertise(s *Socket, from map[netip.Addr]bool) error {
	all, apart := c.receivers(from)
	var errs []error
	if all {
		errs = append(errs, s.conn.WriteTo(c.message(s.mac), nil, everybody))
	}
	for _, a := range apart {
		errs = append(errs, s.conn.WriteTo(c.apart(s.mac), nil, a))
	}
	return errors.Join(errs...)
}

// Serve sends advertisements until ctx ends, and closes s. A request gets an immediate answer, sent to all guests, or to the one apart
// that asks. Answers are at least gather apart.
func Serve(ctx context.Context, s *Socket, c Config, log *slog.Logger) {
	stop := context.AfterFunc(ctx, func() { s.conn.Close() })
	defer stop()
	defer s.conn.Close()
	r := requests{from: map[netip.Addr]bool{}, asked: make(chan struct{}, 1)}
	go func() {
		for ctx.Err() == nil {
			_, _, from, err := s.conn.ReadFrom()
			if err != nil { // malformed, or the link is down, or ctx ended
				select {
				case <-ctx.Done():
				case <-time.After(gather):
				}
				continue
			}
			r.add(from)
		}
	}()
	failing := false
	var from map[netip.Addr]bool
	for {
		err := c.advertise(s, from)
		if err != nil && !failing && ctx.Err() == nil {
			log.Warn("router advertisement not sent", "err", err)
		}
		failing = err != nil
		select {
		case <-ctx.Done():
			return
		case <-time.After(gather):
		}
		select {
		case <-ctx.Done():
			return
		case <-r.asked:
			from = r.take()
		case <-time.After(minInterval + rand.N(maxInterval-minInterval)):
			from = nil
		}
	}
}

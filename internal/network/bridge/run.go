package bridge

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"cocoonstack.io/cocoon/internal/network/dhcp"
	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/network/radv"
	"cocoonstack.io/cocoon/internal/vm"
)

// gather is how long Run waits after a change before it writes the lease file, so that a burst causes one write. If writing is
// slow, it waits gatherShare times as long as the last write took, but at most gatherMost.
const (
	gather      = 50 * time.Millisecond
	gatherMost  = time.Second
	gatherShare = 20
)

// Run implements network.Network: it answers DHCP and keeps the lease file current.
// Preconditions: Setup succeeded.
func (n *Network) Run(ctx context.Context) error {
	lv, err := n.up()
	if err != nil {
		return err
	}
	var on sockets
	if err := n.space.Do(func() error {
		on, err = n.listen(lv)
		return err
	}); err != nil {
		return fmt.Errorf("run network %s: %w", n.cfg.Name, err)
	}
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return dhcp.Serve(gctx, on.dhcp, n.dhcpConfig(lv), reservations{n, lv.pool}, n.log) })
	if on.dhcp6 != nil {
		g.Go(func() error {
			return dhcp.Serve6(gctx, on.dhcp6, n.dhcpConfig6(lv), reservations6{n, lv}, n.log)
		})
	}
	if on.router != nil {
		g.Go(func() error {
			radv.Serve(gctx, on.router, radv.Config{
				Router: router6, Prefix: lv.prefix6, DNS: lv.dns, Search: n.cfg.Search, MTU: lv.mtu, Managed: lv.rules.stateful6, Routed: lv.rules.meeting == routed,
				Apart: n.inside.macs,
			}, n.log)
			return nil
		})
	}
	if n.cfg.Domain != "" {
		g.Go(func() error { n.resolve(gctx, lv); return nil })
	}
	n.keepFile(gctx, lv.pool)
	if err := errors.Join(g.Wait(), n.file.Sync(lv.pool)); err != nil {
		return fmt.Errorf("run network %s: %w", n.cfg.Name, err)
	}
	return nil
}

// sockets receive the requests of guests. A socket is nil if the network does not have its protocol.
type sockets struct {
	dhcp   *dhcp.Socket
	dhcp6  *dhcp.Socket6
	router *radv.Socket
}

func (s sockets) close() {
	if s.dhcp != nil {
		s.dhcp.Close()
	}
	if s.dhcp6 != nil {
		s.dhcp6.Close()
	}
	if s.router != nil {
		s.router.Close()
	}
}

func (n *Network) listen(lv *live) (on sockets, err error) {
	defer func() {
		if err != nil {
			on.close()
		}
	}()
	if on.dhcp, err = dhcp.Listen(n.cfg.Bridge); err != nil {
		return on, err
	}
	if !lv.prefix6.IsValid() {
		return on, nil
	}
	if on.router, err = radv.Listen(n.cfg.Bridge, router6); err != nil {
		return on, err
	}
	if on.dhcp6, err = dhcp.Listen6(n.cfg.Bridge); err != nil && !lv.rules.stateful6 {
		n.log.Warn("masqueraded guests get no ipv6 address by dhcp", "network", n.cfg.Name, "err", err)
		return on, nil
	}
	return on, err
}

func (n *Network) dhcpConfig(lv *live) dhcp.Config {
	return dhcp.Config{
		Server: lv.gateway, Router: lv.gateway, Prefix: lv.prefix, DNS: ofFamily(lv.dns, false), Search: n.cfg.Search, Routes: lv.routes,
		MTU: lv.mtu, LeaseTime: leaseTime,
	}
}

// dhcpConfig6 identifies the server by the bridge's MAC. That is constant over restarts and equal on every node, so a guest
// that migrates renews as before.
func (n *Network) dhcpConfig6(lv *live) dhcp.Config6 {
	return dhcp.Config6{Server: n.mac, Prefix: lv.prefix6, DNS: ofFamily(lv.dns, true), Search: n.cfg.Search, LeaseTime: leaseTime}
}

// keepFile writes the lease file after changes and keeps expiries in the future, until ctx ends.
func (n *Network) keepFile(ctx context.Context, pool *ipam.Pool) {
	renew := time.NewTicker(leaseTime / 8)
	defer renew.Stop()
	var took time.Duration // duration of the last write
	for {
		select {
		case <-ctx.Done():
			return
		case <-renew.C:
			pool.Refresh(time.Now())
		case <-n.dirty:
			select {
			case <-ctx.Done():
				return
			case <-time.After(min(max(gather, took*gatherShare), gatherMost)):
			}
		}
		began := time.Now()
		if err := n.file.Sync(pool); err != nil {
			n.log.Error("lease file not written", "network", n.cfg.Name, "err", err)
		}
		took = time.Since(began)
	}
}

// reservations makes a pool available to the DHCP server.
type reservations struct {
	n    *Network
	pool *ipam.Pool
}

func (r reservations) Lookup(mac net.HardwareAddr) (dhcp.Reservation, bool) {
	l, ok := r.pool.ByMAC(mac.String())
	res := dhcp.Reservation{IP: l.IP, Hostname: hostname(l.VM)}
	if g, inside := r.n.inside.at(l.Tap); ok && inside {
		in := g.inner4()
		res.IP, res.Router, res.Prefix = in.guest, in.gateway, g.net4()
	}
	return res, ok
}

func (r reservations) Answered(a dhcp.Answer) {
	r.n.answers.add(string(a.Kind))
	if a.Kind == dhcp.Ack && r.pool.Renew(a.MAC.String(), time.Now()) {
		r.n.markDirty()
	}
	if l, _ := r.pool.ByMAC(a.MAC.String()); a.Kind == dhcp.Declined && a.IP == l.IP { // an address inside is nobody else's
		r.pool.Decline(a.MAC.String(), time.Now())
	}
}

// reservations6 makes a pool available to the DHCPv6 server. Where guests make their own addresses, only masqueraded ones get one. The addresses need no record: they are made from the MAC, and a
// guest that declines its address always gets the same one again.
type reservations6 struct {
	n  *Network
	lv *live
}

func (r reservations6) Lookup(mac net.HardwareAddr) (dhcp.Reservation, bool) {
	l, ok := r.lv.pool.ByMAC(mac.String())
	if g, inside := r.n.inside.at(l.Tap); ok && inside && g.outer6.IsValid() {
		return dhcp.Reservation{IP: g.inner6().guest}, true
	}
	if !r.lv.rules.stateful6 {
		return dhcp.Reservation{}, ok
	}
	return dhcp.Reservation{IP: radv.Address(r.lv.prefix6, mac)}, ok
}

func (r reservations6) Answered(a dhcp.Answer) { r.n.answers6.add(string(a.Kind)) }

// tally counts messages by the kind of answer.
type tally struct {
	mu     sync.Mutex
	byKind map[string]uint64
}

func (t *tally) add(kind string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byKind == nil {
		t.byKind = map[string]uint64{}
	}
	t.byKind[kind]++
}

func (t *tally) counts() map[string]uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.byKind)
}

// DHCPMessages returns how many DHCP messages guests have sent since the daemon started, by kind of answer.
func (n *Network) DHCPMessages() map[string]uint64 { return n.answers.counts() }

// DHCPv6Messages does the same for DHCPv6.
func (n *Network) DHCPv6Messages() map[string]uint64 { return n.answers6.counts() }

// hostname turns a VM's name into a DNS label.
func hostname(name string) string {
	return strings.Trim(strings.NewReplacer(".", "-", "_", "-").Replace(name), "-")
}

// leaseOf returns the lease data in a NIC.
func leaseOf(nic vm.NIC) ipam.Lease {
	ip, _ := netip.ParseAddr(nic.IP)
	return ipam.Lease{MAC: nic.MAC, IP: ip, Tap: nic.Tap}
}

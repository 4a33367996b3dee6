package bridge

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/network/dhcp"
	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/network/radv"
	"cocoonstack.io/cocoon/internal/vm"
)

// gather is how long Run waits after a change before it writes the lease file, so that a burst is one write.
const gather = 50 * time.Millisecond

// Run implements network.Network: it answers DHCP and keeps the lease file current.
// Preconditions: Setup succeeded.
func (n *Network) Run(ctx context.Context) error {
	lv, err := n.up()
	if err != nil {
		return err
	}
	var sock *dhcp.Socket
	var router *radv.Socket
	if err := n.space.Do(func() error {
		if lv.prefix6.IsValid() {
			if router, err = radv.Listen(n.cfg.Bridge, router6); err != nil {
				return err
			}
		}
		sock, err = dhcp.Listen(n.cfg.Bridge)
		if err != nil && router != nil {
			router.Close()
		}
		return err
	}); err != nil {
		return fmt.Errorf("run network %s: %w", n.cfg.Name, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if router != nil {
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		wg.Go(func() {
			radv.Serve(ctx, router, radv.Config{Router: router6, Prefix: lv.prefix6, DNS: lv.dns, Search: n.cfg.Search, MTU: lv.mtu}, n.log)
		})
	}
	served := make(chan error, 1)
	go func() {
		defer cancel()
		served <- dhcp.Serve(ctx, sock, n.dhcpConfig(lv), reservations{n, lv.pool}, n.log)
	}()
	n.keepFile(ctx, lv.pool)
	if err := errors.Join(<-served, n.file.Sync(lv.pool)); err != nil {
		return fmt.Errorf("run network %s: %w", n.cfg.Name, err)
	}
	return nil
}

func (n *Network) dhcpConfig(lv *live) dhcp.Config {
	return dhcp.Config{
		Server: lv.gateway, Router: lv.gateway, Prefix: lv.prefix, DNS: lv.dns, Search: n.cfg.Search, Routes: lv.routes,
		MTU: lv.mtu, LeaseTime: leaseTime,
	}
}

// keepFile writes the lease file after changes and keeps expiries ahead of time, until ctx ends.
func (n *Network) keepFile(ctx context.Context, pool *ipam.Pool) {
	renew := time.NewTicker(leaseTime / 8)
	defer renew.Stop()
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
			case <-time.After(gather):
			}
		}
		if err := n.file.Sync(pool); err != nil {
			n.log.Error("lease file not written", "network", n.cfg.Name, "err", err)
		}
	}
}

// reservations shows a pool to the DHCP server.
type reservations struct {
	n    *Network
	pool *ipam.Pool
}

func (r reservations) Lookup(mac net.HardwareAddr) (dhcp.Reservation, bool) {
	l, ok := r.pool.ByMAC(mac.String())
	return dhcp.Reservation{IP: l.IP, Hostname: hostname(l.VM)}, ok
}

func (r reservations) Answered(a dhcp.Answer) {
	r.n.answers.add(a.Kind)
	if a.Kind == dhcp.Ack && r.pool.Renew(a.MAC.String(), time.Now()) {
		r.n.markDirty()
	}
	if a.Kind == dhcp.Declined {
		r.pool.Decline(a.MAC.String(), time.Now())
	}
}

// tally counts DHCP messages by what was done about them.
type tally struct {
	mu     sync.Mutex
	byKind map[dhcp.Kind]uint64
}

func (t *tally) add(k dhcp.Kind) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byKind == nil {
		t.byKind = map[dhcp.Kind]uint64{}
	}
	t.byKind[k]++
}

// DHCPMessages returns how many messages guests sent since the daemon started, by what was done about them.
func (n *Network) DHCPMessages() map[string]uint64 {
	n.answers.mu.Lock()
	defer n.answers.mu.Unlock()
	out := map[string]uint64{}
	for k, v := range n.answers.byKind {
		out[string(k)] = v
	}
	return out
}

// hostname is a VM's name as a DNS label.
func hostname(name string) string {
	return strings.Trim(strings.NewReplacer(".", "-", "_", "-").Replace(name), "-")
}

// leaseOf is what a NIC tells of its lease.
func leaseOf(nic vm.NIC) ipam.Lease {
	ip, _ := netip.ParseAddr(nic.IP)
	return ipam.Lease{MAC: nic.MAC, IP: ip, Tap: nic.Tap}
}

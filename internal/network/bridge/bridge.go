// Package bridge is the network of one machine: a bridge with our address, one persistent tap per VM interface, DHCP,
// masquerading, and rules that guard the host.
//
// Everything happens in one configurable network namespace, through netlink and nftables, without external programs. Everything
// created there has our mark, and nothing without the mark is ever changed. The package starts no VM and opens no tap for one:
// the hypervisor driver does. Protocols other than IPv4, ARP and, if configured, IPv6 are dropped at the tap.
//
// After a crash: taps have VM, MAC and address in their alias, so that Setup finds them again even if the lease file is older.
// Release writes the lease file durably, and Run writes it shortly after Attach.
package bridge

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/dhcp"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/network/resolver"
)

// leaseTime is the lease time that guests get. Leases end with their VM, so it only sets how often guests renew.
const leaseTime = 24 * time.Hour

// Network implements network.Network with a Linux bridge.
type Network struct {
	cfg   Config
	log   *slog.Logger
	space host.Space
	mac   net.HardwareAddr // MAC of the bridge
	file  *ipam.File
	dirty chan struct{} // capacity 1: set if the lease file is out of date

	police *policing
	inside *inside

	answers, answers6 tally // counts of DHCPv4 and DHCPv6 messages

	zone      atomic.Pointer[resolver.Zone] // nil: not known yet
	questions tally                         // counts of DNS questions

	damaged atomic.Uint64 // number of lease files set aside

	mu    host.TapLock // different taps change in parallel, except their links (see turns)
	live  *live        // nil until Setup has succeeded; under mu
	turns turns
	ports *ports // of the host that lead to guests
	flows *flows
}

// live is what Setup decided and found. It is never changed, only replaced.
type live struct {
	prefix  netip.Prefix
	gateway netip.Addr
	prefix6 netip.Prefix // the zero value if there is no IPv6
	dns     []netip.Addr
	routes  []dhcp.Route
	mtu     int
	rules   rules
	gate    *gate // holds the sets of allowed senders; nil if senders are not checked
	pool    *ipam.Pool
	damage  error // why the lease file is unusable; nil if it is usable
}

var _ network.Network = (*Network)(nil)

// New checks the configuration. It touches neither links nor files.
func New(cfg Config, log *slog.Logger) (*Network, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	space := host.Space{Path: nsPath(cfg.NetNS)}
	known := &flows{}
	return &Network{
		cfg:    cfg,
		log:    log,
		space:  space,
		mac:    bridgeMAC(cfg.owner()),
		file:   ipam.NewFile(cfg.LeasePath),
		dirty:  make(chan struct{}, 1),
		police: newPolicing(cfg.policyTable(), filepath.Join(cfg.StateDir, "policies-"+cfg.Name+".json"), space),
		inside: newInside(cfg.insideTable(), space),
		ports:  &ports{table: cfg.table() + "_ports", flows: known},
		flows:  known,
	}, nil
}

// OwnLink implements network.OwnLink: an adopted bridge is somebody else's.
func (n *Network) OwnLink() bool { return !n.cfg.Adopt }

// Name implements network.Network.
func (n *Network) Name() string { return n.cfg.Name }

// Subnet returns the subnet and gateway in use; the zero values before Setup.
func (n *Network) Subnet() (netip.Prefix, netip.Addr) {
	lv, err := n.up()
	if err != nil {
		return netip.Prefix{}, netip.Addr{}
	}
	return lv.prefix, lv.gateway
}

// Subnet6 returns the IPv6 prefix of guests, "" if they have none.
func (n *Network) Subnet6() string { return n.cfg.Subnet6 }

// Addresses returns the number of leased addresses and the number of addresses for VMs; zeros before Setup.
func (n *Network) Addresses() (leased, total int) {
	lv, err := n.up()
	if err != nil {
		return 0, 0
	}
	return lv.pool.Size()
}

// up returns the result of Setup, or an error if the network is not set up.
func (n *Network) up() (*live, error) {
	defer n.mu.Read()()
	if n.live == nil {
		return nil, n.notUp()
	}
	return n.live, nil
}

func (n *Network) notUp() error {
	return errdefs.Preconditionf("network %s is not set up", n.cfg.Name)
}

// spaceGone reports whether err says that the configured namespace no longer exists, and with it everything inside.
func (n *Network) spaceGone(err error) bool {
	return n.cfg.NetNS != "" && errors.Is(err, os.ErrNotExist) && errdefs.IsFailedPrecondition(err)
}

// whole runs fn in the namespace while nothing else changes the network.
func (n *Network) whole(ctx context.Context, fn func() error) error {
	defer n.mu.Whole()()
	if err := ctx.Err(); err != nil {
		return err
	}
	return n.space.Do(fn)
}

// single runs fn in the namespace while nothing else changes the tap. fn gets nil if the network is not set up.
func (n *Network) single(ctx context.Context, tap string, fn func(*live) error) error {
	defer n.mu.Tap(tap)()
	if err := ctx.Err(); err != nil {
		return err
	}
	return n.space.Do(func() error { return fn(n.live) })
}

func (n *Network) markDirty() {
	select {
	case n.dirty <- struct{}{}:
	default:
	}
}

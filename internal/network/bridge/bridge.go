// Package bridge is the network of one machine: a bridge with our address on it, one persistent tap per VM interface,
// DHCP, masquerading and a guard in front of the host.
//
// Everything happens in one configurable network namespace, through netlink and nftables in process; what is made there
// carries our mark, and nothing without it is ever changed. The package starts no VM and opens no tap for one: the
// hypervisor driver does. Other protocols than IPv4, ARP and, where it is configured, IPv6 are dropped at the tap.
//
// What survives a crash: taps carry VM, MAC and address in their alias, so that Setup finds them again even when the
// lease file is older; the lease file is written durably by Release, and shortly after Attach by Run.
package bridge

import (
	"context"
	"errors"
	"hash/fnv"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/dhcp"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/ipam"
)

// leaseTime is what guests are told. Leases end with their VM, so it only decides how often guests renew.
const leaseTime = 24 * time.Hour

// Network implements network.Network with a Linux bridge.
type Network struct {
	cfg   Config
	log   *slog.Logger
	space host.Space
	mac   net.HardwareAddr // of the bridge
	file  *ipam.File
	dirty chan struct{} // capacity 1: the lease file is behind

	answers, answers6 tally // of DHCPv4 and DHCPv6

	damaged atomic.Uint64 // lease files that were set aside

	mu   sync.RWMutex // held for reading by changes of single taps, for writing by those of the network
	live *live        // nil until Setup succeeded

	// One change at a time per tap, by a hash of its name. Different taps in parallel, but for their links.
	perTap [64]sync.Mutex
	turns  turns
}

// live is what Setup decided and found. It is not changed afterwards, only replaced.
type live struct {
	prefix  netip.Prefix
	gateway netip.Addr
	prefix6 netip.Prefix // the zero value without IPv6
	dns     []netip.Addr
	routes  []dhcp.Route
	mtu     int
	rules   rules
	gate    *gate // checks senders at the taps; nil when nobody does
	pool    *ipam.Pool
	damage  error // why the lease file cannot be used; nil: it can
}

var _ network.Network = (*Network)(nil)

// New checks the configuration. It touches neither links nor files.
func New(cfg Config, log *slog.Logger) (*Network, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	return &Network{
		cfg:   cfg,
		log:   log,
		space: host.Space{Path: nsPath(cfg.NetNS)},
		mac:   bridgeMAC(cfg.owner()),
		file:  ipam.NewFile(cfg.LeasePath),
		dirty: make(chan struct{}, 1),
	}, nil
}

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

// Subnet6 returns the IPv6 prefix of guests, "" when they have none.
func (n *Network) Subnet6() string { return n.cfg.Subnet6 }

// Addresses returns how many addresses are leased, and how many there are for VMs; zeros before Setup.
func (n *Network) Addresses() (leased, total int) {
	lv, err := n.up()
	if err != nil {
		return 0, 0
	}
	return lv.pool.Size()
}

// up returns what Setup found, or why nothing can be done yet.
func (n *Network) up() (*live, error) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if n.live == nil {
		return nil, n.notUp()
	}
	return n.live, nil
}

func (n *Network) notUp() error {
	return errdefs.Preconditionf("network %s is not set up", n.cfg.Name)
}

// spaceGone reports whether err says that the configured namespace is no more, and everything in it with it.
func (n *Network) spaceGone(err error) bool {
	return n.cfg.NetNS != "" && errors.Is(err, os.ErrNotExist) && errdefs.IsFailedPrecondition(err)
}

// whole runs fn in the namespace while nothing else changes the network.
func (n *Network) whole(ctx context.Context, fn func() error) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	return n.space.Do(fn)
}

// single runs fn in the namespace while nothing else changes the tap. fn gets nil when the network is not set up.
func (n *Network) single(ctx context.Context, tap string, fn func(*live) error) error {
	n.mu.RLock()
	defer n.mu.RUnlock()
	h := fnv.New32a()
	_, _ = h.Write([]byte(tap)) // never fails
	mu := &n.perTap[h.Sum32()%uint32(len(n.perTap))]
	mu.Lock()
	defer mu.Unlock()
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

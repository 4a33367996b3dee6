// Package fake is a network without links: it gives, keeps and sweeps addresses as a real one does, but creates nothing on the
// host.
//
// It is for tests of the code above a network, up to thousands of VMs. It can be slow or fail on demand. No packet ever passes
// it, and it keeps nothing when the process ends.
package fake

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/vm"
)

// Config describes a fake. The zero value is a network called default with room for 65,533 VMs.
type Config struct {
	Name    string                // "default"
	Subnet  string                // "10.99.0.0/16"
	Latency time.Duration         // of Attach, Detach and Release; a cancelled context cuts it short
	Fault   func(op string) error // called before every operation (setup, attach, detach, release, sweep, teardown); may be nil
}

// Network implements network.Network in memory.
type Network struct {
	cfg    Config
	prefix netip.Prefix
	pool   *ipam.Pool

	mu   sync.Mutex
	up   bool
	taps map[string]vm.NIC
}

var _ network.Network = (*Network)(nil)

// New returns a fake that is not set up.
func New(cfg Config) (*Network, error) {
	cfg.Name = cmp.Or(cfg.Name, "default")
	cfg.Subnet = cmp.Or(cfg.Subnet, "10.99.0.0/16")
	prefix, err := netip.ParsePrefix(cfg.Subnet)
	if err != nil {
		return nil, errdefs.Invalidf("subnet %q: %v", cfg.Subnet, err)
	}
	pool, err := ipam.New(ipam.Config{
		Salt: cfg.Name, Prefix: prefix, Gateway: prefix.Addr().Next(),
		ReservedMAC: net.HardwareAddr{2, 0, 0, 0, 0, 0}, TTL: 24 * time.Hour,
	})
	if err != nil {
		return nil, err
	}
	return &Network{cfg: cfg, prefix: prefix, pool: pool, taps: map[string]vm.NIC{}}, nil
}

// Name implements network.Network.
func (n *Network) Name() string { return n.cfg.Name }

// Setup implements network.Network.
func (n *Network) Setup(ctx context.Context) error {
	if err := n.begin(ctx, "setup"); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.up = true
	return nil
}

// Run implements network.Network.
func (n *Network) Run(ctx context.Context) error {
	if err := n.mustBeUp(); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// Remember implements network.Network.
func (n *Network) Remember(_ context.Context, held []network.Held) error {
	for _, h := range held {
		if ip, err := netip.ParseAddr(h.NIC.IP); err == nil && h.NIC.Network == n.cfg.Name {
			n.pool.Remember(ipam.Lease{MAC: h.NIC.MAC, IP: ip, VM: h.Name, ID: h.ID, Index: h.Index, Tap: h.NIC.Tap}, time.Now())
		}
	}
	return n.mustBeUp()
}

// Attach implements network.Network.
func (n *Network) Attach(ctx context.Context, id vm.ID, name string, index int, spec vm.NICSpec) (vm.NIC, error) {
	fail := func(err error) (vm.NIC, error) {
		return vm.NIC{}, fmt.Errorf("attach vm %s to network %s: %w", name, n.cfg.Name, err)
	}
	if err := n.change(ctx, "attach"); err != nil {
		return fail(err)
	}
	if err := n.mustBeUp(); err != nil {
		return fail(err)
	}
	l, _, err := n.pool.Reserve(ipam.Request{ID: id, Name: name, Index: index, MAC: spec.MAC}, time.Now())
	if err != nil {
		return fail(err)
	}
	nic := vm.NIC{
		Network: n.cfg.Name, Tap: tapName(n.cfg.Name, id, index), MAC: l.MAC, IP: l.IP.String(),
		Prefix: n.prefix.Bits(), Gateway: n.prefix.Addr().Next().String(), MTU: 1500,
	}
	n.pool.Attach(id, index, nic.Tap)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.taps[nic.Tap] = nic
	return nic, nil
}

// Detach implements network.Network.
func (n *Network) Detach(ctx context.Context, nic vm.NIC) error {
	if err := n.change(ctx, "detach"); err != nil {
		return fmt.Errorf("detach tap %s from network %s: %w", nic.Tap, n.cfg.Name, err)
	}
	n.pool.Detach(nic.MAC, nic.Tap)
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.taps, nic.Tap)
	return nil
}

// Release implements network.Network.
func (n *Network) Release(ctx context.Context, nic vm.NIC) error {
	if err := n.change(ctx, "release"); err != nil {
		return fmt.Errorf("release %s of network %s: %w", nic.IP, n.cfg.Name, err)
	}
	n.pool.Release(nic.MAC, nic.Tap)
	return nil
}

// Sweep implements network.Network.
func (n *Network) Sweep(ctx context.Context, keep []string, known func(vm.ID) bool) (removed []string, strays []network.Stray, err error) {
	if err := n.begin(ctx, "sweep"); err != nil {
		return nil, nil, err
	}
	kept := make(map[string]bool, len(keep))
	for _, k := range keep {
		kept[k] = true
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for tap, nic := range n.taps {
		if kept[tap] {
			continue
		}
		if l, _ := n.pool.ByMAC(nic.MAC); !known(l.ID) {
			strays = append(strays, network.Stray{ID: l.ID, NIC: nic})
			continue
		}
		n.pool.Detach(nic.MAC, tap)
		delete(n.taps, tap)
		removed = append(removed, tap)
	}
	slices.Sort(removed)
	return removed, strays, nil
}

// Teardown implements network.Network.
func (n *Network) Teardown(ctx context.Context) error {
	if err := n.begin(ctx, "teardown"); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for tap, nic := range n.taps {
		n.pool.Detach(nic.MAC, tap)
	}
	clear(n.taps)
	n.up = false
	return nil
}

// Taps returns the taps that would exist, sorted, so that tests can check for leaks.
func (n *Network) Taps() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := make([]string, 0, len(n.taps))
	for tap := range n.taps {
		out = append(out, tap)
	}
	slices.Sort(out)
	return out
}

// Leases returns the held addresses in ascending order.
func (n *Network) Leases() []ipam.Lease {
	leases, _ := n.pool.Snapshot()
	return leases
}

func (n *Network) begin(ctx context.Context, op string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if n.cfg.Fault != nil {
		return n.cfg.Fault(op)
	}
	return nil
}

// change is begin for operations on one VM.
func (n *Network) change(ctx context.Context, op string) error {
	if err := n.begin(ctx, op); err != nil {
		return err
	}
	if n.cfg.Latency <= 0 {
		return nil
	}
	timer := time.NewTimer(n.cfg.Latency)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

func (n *Network) mustBeUp() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.up {
		return errdefs.Preconditionf("network %s is not set up", n.cfg.Name)
	}
	return nil
}

func tapName(network string, id vm.ID, index int) string {
	sum := sha256.Sum256([]byte(network + "\x00" + string(id) + "\x00" + strconv.Itoa(index)))
	return "fk" + hex.EncodeToString(sum[:6])
}

package cocoond

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/bridge"
	"cocoonstack.io/cocoon/internal/network/cni"
	"cocoonstack.io/cocoon/internal/nodewire"
)

// The modes of a node's network.
const (
	modeBridge = "bridge" // our own bridge, and conflists beside it when a folder is named
	modeCNI    = "cni"    // conflists only
)

// CNIConfig says which conflists are networks.
type CNIConfig struct {
	ConfDir, Default   string
	BinDirs, Exclusive []string
}

// networks are all networks of the node, including those of conflists that were added after the daemon started. The
// first is the default network and must come up. If another one fails to, only its users get the error. No networks:
// VMs have no interfaces.
type networks struct {
	cfg    Config
	bridge *bridge.Network // nil without a bridge
	log    *slog.Logger

	mu  sync.Mutex
	all []*keptNetwork // only grows: VMs with interfaces of a removed conflist must still be able to release them
}

var _ network.Networks = (*networks)(nil)

// newNetworks makes the configured networks. It reads the names of conflists and changes nothing on the host.
func newNetworks(cfg Config, log *slog.Logger) (*networks, error) {
	n := &networks{cfg: cfg, log: log.With("component", "network")}
	if !yes(cfg.Network.Enabled) {
		return n, nil
	}
	if cfg.Network.Mode == modeBridge {
		b, err := bridge.New(cfg.bridge(), n.log)
		if err != nil {
			return nil, err
		}
		n.bridge, n.all = b, []*keptNetwork{keep(b)}
	}
	if cfg.Network.CNI.ConfDir == "" {
		return n, nil
	}
	names, err := cni.Names(cfg.Network.CNI.ConfDir)
	if err != nil {
		return nil, err
	}
	if want := cfg.Network.CNI.Default; want != "" {
		i := slices.Index(names, want)
		if i < 0 {
			return nil, errdefs.NotFoundf("no conflist in %s is called %q", cfg.Network.CNI.ConfDir, want)
		}
		names = slices.Insert(slices.Delete(names, i, i+1), 0, want)
	}
	for _, name := range names {
		if err := n.add(name); err != nil {
			return nil, err
		}
	}
	if len(n.all) == 0 {
		return nil, errdefs.Preconditionf("there is no conflist in %s, and network.mode is %s; put one there, or set the mode %s", cfg.Network.CNI.ConfDir, modeCNI, modeBridge)
	}
	return n, nil
}

// add adopts a conflist. Preconditions: mu is held, or n is not shared yet.
func (n *networks) add(name string) error {
	if n.bridge != nil && name == n.bridge.Name() {
		return errdefs.Invalidf("a conflist in %s is called %q like the bridge network; set network.name", n.cfg.Network.CNI.ConfDir, name)
	}
	c, err := cni.New(n.cni(name), n.log)
	if err != nil {
		return err
	}
	n.all = append(n.all, keep(c))
	return nil
}

func (n *networks) cni(name string) cni.Config {
	c := n.cfg.Network
	out := cni.Config{
		Name: name, Instance: c.Instance, ConfDir: c.CNI.ConfDir, BinDirs: c.CNI.BinDirs, DNS: c.DNS, Closed: c.Closed, Open: c.Open,
		StateDir: filepath.Join(n.cfg.StateDir, "network", "cni", name), Exclusive: slices.Contains(c.CNI.Exclusive, name),
	}
	if n.bridge != nil {
		out.Addresses = map[string]cni.Addresses{n.bridge.Bridge(): n.bridge}
	}
	return out
}

// look adopts new conflists. If one fails, the others are still adopted.
func (n *networks) look() {
	if n.cfg.Network.CNI.ConfDir == "" || !yes(n.cfg.Network.Enabled) {
		return
	}
	names, err := cni.Names(n.cfg.Network.CNI.ConfDir)
	if err != nil {
		n.log.Warn("conflists not reloaded", "err", err)
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, name := range names {
		if n.find(name) != nil {
			continue
		}
		if err := n.add(name); err != nil {
			n.log.Warn("new conflist not used", "network", name, "err", err)
			continue
		}
		n.log.Info("new conflist in use", "network", name)
	}
}

// find returns the network called name, nil for none. Preconditions: mu is held.
func (n *networks) find(name string) *keptNetwork {
	for _, k := range n.all {
		if k.Name() == name {
			return k
		}
	}
	return nil
}

// Get implements network.Networks. If it does not know a name, it looks for new conflists.
func (n *networks) Get(name string) network.Network {
	for looked := false; ; looked = true {
		n.mu.Lock()
		k := n.find(name)
		n.mu.Unlock()
		switch {
		case k != nil:
			return k
		case looked || name == "":
			return nil
		}
		n.look()
	}
}

// All implements network.Networks.
func (n *networks) All() []network.Network {
	var out []network.Network
	for _, k := range n.known() {
		out = append(out, k)
	}
	return out
}

func (n *networks) known() []*keptNetwork {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.all)
}

// first is the name of the default network; "" for none.
func (n *networks) first() string {
	if all := n.known(); len(all) > 0 {
		return all[0].Name()
	}
	return ""
}

func (n *networks) setup(ctx context.Context) error {
	for i, k := range n.known() {
		err := k.Setup(ctx)
		if err != nil && i == 0 {
			return err
		}
		if err != nil {
			n.log.Warn("network is not usable", "network", k.Name(), "err", err)
		}
	}
	return nil
}

// run serves the networks that exist now. Networks that are added later are CNI's and need no service.
func (n *networks) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, k := range n.known() {
		g.Go(func() error {
			if err := k.Run(ctx); err != nil {
				return fmt.Errorf("network %s: %w", k.Name(), err)
			}
			return nil
		})
	}
	return g.Wait()
}

// teardown works in reverse order: networks that use the bridge are removed before it.
func (n *networks) teardown(ctx context.Context) error {
	var errs []error
	for _, k := range slices.Backward(n.known()) {
		errs = append(errs, k.Teardown(ctx))
	}
	return errors.Join(errs...)
}

// police sets the policies on every network that enforces them. Errors: FailedPrecondition if there is none.
func (n *networks) police(ctx context.Context, p network.Policies) error {
	var errs []error
	var reasons []string
	enforced := false
	for _, k := range n.known() {
		if why := unpoliced(k.Network); why != "" {
			reasons = append(reasons, k.Name()+": "+why)
			continue
		}
		enforced = true
		errs = append(errs, k.Network.(network.Policer).Police(ctx, p))
	}
	if !enforced {
		return errdefs.Preconditionf("no network of this node enforces policies (%s)", strings.Join(reasons, "; "))
	}
	return errors.Join(errs...)
}

// unpoliced returns why a network does not enforce policies, "" if it does.
func unpoliced(n network.Network) string {
	p, ok := n.(network.Policer)
	if !ok {
		return "policies are enforced by the CNI plugins, if they do"
	}
	if err := p.Polices(); err != nil {
		return err.Error()
	}
	return ""
}

// describe reports the networks to the doors, including new conflists.
func (n *networks) describe(ctx context.Context) []nodewire.Network {
	n.look()
	var out []nodewire.Network
	for i, k := range n.known() {
		if i > 0 {
			_ = k.Setup(ctx) // errors are reported below
		}
		d := nodewire.Network{Name: k.Name(), Kind: modeCNI, Default: i == 0, Unpoliced: unpoliced(k.Network)}
		d.Polices = d.Unpoliced == ""
		k.mu.Lock()
		d.Up = k.up
		if k.why != nil {
			d.Error = k.why.Error()
		}
		k.mu.Unlock()
		if i == 0 && n.bridge != nil {
			d.Kind, d.Bridge = modeBridge, n.bridge.Bridge()
			if prefix, gateway := n.bridge.Subnet(); prefix.IsValid() {
				leased, total := n.bridge.Addresses()
				d.Subnet6 = n.bridge.Subnet6()
				d.Subnet, d.Gateway, d.Leased, d.Free = prefix.String(), gateway.String(), leased, total-leased
			}
		}
		out = append(out, d)
	}
	return out
}

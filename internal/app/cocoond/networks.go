package cocoond

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"

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

// CNIConfig says where CNI files are.
type CNIConfig struct {
	ConfDir   string   `json:"confDir,omitempty"`   // conflists, each a network of its name; mode cni: /etc/cni/net.d
	BinDirs   []string `json:"binDirs,omitempty"`   // plugins
	Default   string   `json:"default,omitempty"`   // conflist of VMs that name no network in mode cni; the first one
	Exclusive []string `json:"exclusive,omitempty"` // conflists that only this daemon uses: leftovers are collected
}

// networks are all networks of the node. The first is the default one and must come up; that another does not is told
// to those who ask for it. No networks: VMs have no interfaces.
type networks struct {
	all    []*keptNetwork
	bridge *bridge.Network // nil without
	log    *slog.Logger
}

// newNetworks makes what the configuration says. It reads the names of conflists and touches nothing.
func newNetworks(cfg Config, log *slog.Logger) (*networks, error) {
	n := &networks{log: log.With("component", "network")}
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
		if n.bridge != nil && name == n.bridge.Name() {
			return nil, errdefs.Invalidf("a conflist in %s is called %q like the bridge network; set network.name", cfg.Network.CNI.ConfDir, name)
		}
		c, err := cni.New(n.cni(cfg, name), n.log)
		if err != nil {
			return nil, err
		}
		n.all = append(n.all, keep(c))
	}
	if len(n.all) == 0 {
		return nil, errdefs.Preconditionf("there is no conflist in %s, and network.mode is %s; put one there, or set the mode %s", cfg.Network.CNI.ConfDir, modeCNI, modeBridge)
	}
	return n, nil
}

func (n *networks) cni(cfg Config, name string) cni.Config {
	c := cfg.Network
	out := cni.Config{
		Name: name, Instance: c.Instance, ConfDir: c.CNI.ConfDir, BinDirs: c.CNI.BinDirs, DNS: c.DNS,
		StateDir: filepath.Join(cfg.StateDir, "network", "cni", name), Exclusive: slices.Contains(c.CNI.Exclusive, name),
	}
	if n.bridge != nil {
		out.Addresses = map[string]cni.Addresses{n.bridge.Bridge(): n.bridge}
	}
	return out
}

// byName is what the engine wants, with the name of the default network; "" for none.
func (n *networks) byName() (all map[string]network.Network, first string) {
	all = map[string]network.Network{}
	for _, k := range n.all {
		all[k.Name()] = k
	}
	if len(n.all) > 0 {
		first = n.all[0].Name()
	}
	return all, first
}

func (n *networks) names() []string {
	var out []string
	for _, k := range n.all {
		out = append(out, k.Name())
	}
	return out
}

func (n *networks) setup(ctx context.Context) error {
	for i, k := range n.all {
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

func (n *networks) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, k := range n.all {
		g.Go(func() error {
			if err := k.Run(ctx); err != nil {
				return fmt.Errorf("network %s: %w", k.Name(), err)
			}
			return nil
		})
	}
	return g.Wait()
}

// teardown goes backwards: what stands on the bridge goes before it.
func (n *networks) teardown(ctx context.Context) error {
	var errs []error
	for _, k := range slices.Backward(n.all) {
		errs = append(errs, k.Teardown(ctx))
	}
	return errors.Join(errs...)
}

// describe tells the doors about the networks.
func (n *networks) describe() []nodewire.Network {
	var out []nodewire.Network
	for i, k := range n.all {
		d := nodewire.Network{Name: k.Name(), Kind: modeCNI, Default: i == 0}
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

// Package cni is a network that the node's CNI plugins provide: each VM interface is an attachment of one conflist.
//
// A VM has a named network namespace, cocoon-<id>. It contains eth<n>, which the plugins put there, and a tap. Every frame is
// redirected from one to the other, and the guest has the MAC and address that the plugins chose. The package runs plugins and
// joins links; it writes no conflist, chooses no address and answers no packet.
//
// After a crash there are: a record per attachment, written before ADD and after it, and libcni's cache of what DEL needs.
package cni

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/vm"
)

// Locations of CNI files by the conventions of Kubernetes and Debian.
const (
	DefaultConfDir = "/etc/cni/net.d"
	namespaces     = "/run/netns"
)

// DefaultBinDirs are searched for plugins.
var DefaultBinDirs = []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"}

// Config describes one network.
type Config struct {
	Name     string   // name of the conflist, also used by vm.NICSpec.Network
	Instance string   // "default"; part of the mark of the taps
	ConfDir  string   // folder of conflists; default DefaultConfDir
	BinDirs  []string // folders of plugins; default DefaultBinDirs
	DNS      []string // for guests whose plugins name no server; nil: the host's resolvers
	StateDir string   // our own folder: records and libcni's cache
	NetNSDir string   // folder of the VMs' namespaces; default /run/netns

	// CIDRs and addresses. Guests cannot reach clouds' metadata services and Closed, except for Open and their own subnet.
	Closed []string
	Open   []string

	// Exclusive says that no other program uses the conflist. Then Sweep tells the plugins to drop attachments that are not
	// ours (GC).
	Exclusive bool

	// Addresses assigns addresses for conflists without IPAM whose result names this bridge. If nil, their guests use DHCP.
	Addresses map[string]Addresses
}

// Addresses assigns addresses on a bridge on which CNI plugins put interfaces.
type Addresses interface {
	// Lease returns a NIC with the address, prefix, gateway, DNS and DHCP for an interface. Idempotent.
	Lease(ctx context.Context, id vm.ID, name string, index int, mac string) (vm.NIC, error)
	// Unlease is the inverse of Lease. Idempotent.
	Unlease(ctx context.Context, id vm.ID, index int, mac string) error
}

// Network implements network.Network with CNI plugins.
type Network struct {
	cfg    Config
	closed network.Closed
	log    *slog.Logger
	cni    *libcni.CNIConfig

	mu host.TapLock
	up bool // under mu
}

var _ network.Network = (*Network)(nil)

var nameRE = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$`)

// New checks the configuration. It reads no file and runs no plugin.
func New(cfg Config, log *slog.Logger) (*Network, error) {
	switch {
	case !nameRE.MatchString(cfg.Name):
		return nil, errdefs.Invalidf("network name %q of a conflist must be up to 63 letters, digits, '_', '.' and '-'", cfg.Name)
	case cfg.StateDir == "":
		return nil, errdefs.Invalidf("network %s: a state folder is needed", cfg.Name)
	}
	cfg.Instance = cmp.Or(cfg.Instance, "default")
	cfg.ConfDir = cmp.Or(cfg.ConfDir, DefaultConfDir)
	cfg.NetNSDir = cmp.Or(cfg.NetNSDir, namespaces)
	if len(cfg.BinDirs) == 0 {
		cfg.BinDirs = DefaultBinDirs
	}
	closed, err := network.NewClosed(cfg.Closed, cfg.Open)
	if err != nil {
		return nil, fmt.Errorf("network %s: %w", cfg.Name, err)
	}
	// Without an Exec, libcni creates one at the first use, without a lock.
	run := &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: os.Stderr}}
	return &Network{cfg: cfg, closed: closed, log: log, cni: libcni.NewCNIConfigWithCacheDir(cfg.BinDirs, filepath.Join(cfg.StateDir, "cache"), run)}, nil
}

// Names returns the names of the conflists in dir, in the order of the file names. If two have the same name, the first counts,
// as usual with CNI. A missing folder has no conflists. Errors: InvalidArgument if a file is not a conflist.
func Names(dir string) ([]string, error) {
	files, err := confFiles(dir)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, f := range files {
		list, err := libcni.NetworkConfFromFile(f)
		if err != nil {
			return nil, errdefs.New(errdefs.InvalidArgument, "CNI configuration %s: %w", f, err)
		}
		if !slices.Contains(out, list.Name) {
			out = append(out, list.Name)
		}
	}
	return out, nil
}

func confFiles(dir string) ([]string, error) {
	files, err := libcni.ConfFiles(dir, []string{".conflist"})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read CNI configurations: %w", err)
	}
	slices.Sort(files)
	return files, nil
}

// conflist reads the network's current configuration.
func (n *Network) conflist() (*libcni.NetworkConfigList, error) {
	files, err := confFiles(n.cfg.ConfDir)
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		// A broken file of another network does not matter here.
		if list, err := libcni.NetworkConfFromFile(f); err == nil && list.Name == n.cfg.Name {
			return list, nil
		}
	}
	return nil, errdefs.Preconditionf("no conflist in %s is called %q", n.cfg.ConfDir, n.cfg.Name)
}

// Name implements network.Network.
func (n *Network) Name() string { return n.cfg.Name }

// Setup implements network.Network: it checks whether the plugins can be run. They create what they need with each interface.
func (n *Network) Setup(ctx context.Context) error {
	defer n.mu.Whole()()
	if err := n.probe(ctx); err != nil {
		return fmt.Errorf("set up network %s: %w", n.cfg.Name, err)
	}
	n.up = true
	return nil
}

func (n *Network) probe(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := host.CheckCaps(); err != nil {
		return err
	}
	tun, err := host.OpenTun()
	if err != nil {
		return err
	}
	tun.Close()
	list, err := n.conflist()
	if err != nil {
		return err
	}
	for _, p := range list.Plugins {
		if _, err := invoke.FindInPath(p.Network.Type, n.cfg.BinDirs); err != nil {
			return errdefs.Preconditionf("CNI plugin %q not found in %v; install it (Debian: containernetworking-plugins)", p.Network.Type, n.cfg.BinDirs)
		}
	}
	if err := os.MkdirAll(n.cfg.StateDir, 0o700); err != nil {
		return fmt.Errorf("make the state folder: %w", err)
	}
	return nil
}

// Run implements network.Network. There is nothing to serve.
func (n *Network) Run(ctx context.Context) error {
	unlock := n.mu.Read()
	up := n.up
	unlock()
	if !up {
		return n.notUp()
	}
	<-ctx.Done()
	return nil
}

func (n *Network) notUp() error {
	return errdefs.Preconditionf("network %s is not set up", n.cfg.Name)
}

// single runs fn while nothing else changes the network or the interface.
func (n *Network) single(ctx context.Context, tap string, fn func(up bool) error) error {
	defer n.mu.Tap(tap)()
	if err := ctx.Err(); err != nil {
		return err
	}
	return fn(n.up)
}

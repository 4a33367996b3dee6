package cocoond

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"cocoonstack.io/cocoon/internal/app/assets"
	"cocoonstack.io/cocoon/internal/app/vkcocoon"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu"
	"cocoonstack.io/cocoon/internal/network/bridge"
	"cocoonstack.io/cocoon/internal/network/cni"
	"cocoonstack.io/cocoon/internal/nodeapi"
)

// Config is cocoond's configuration, with the keys of its YAML file. Unknown keys are an error. Flags win over the
// file.
type Config struct {
	StateDir    string        `json:"stateDir,omitempty"`    // images, disks, journal; survives a reboot
	RunDir      string        `json:"runDir,omitempty"`      // sockets; may vanish at a reboot
	Socket      string        `json:"socket,omitempty"`      // of the node API; default RunDir/cocoond.sock
	Group       string        `json:"group,omitempty"`       // group that may use the socket, if the group exists
	Listen      string        `json:"listen,omitempty"`      // host:port of the node API with mutual TLS
	TLS         nodeapi.TLS   `json:"tls,omitzero"`          // for Listen
	Peer        Peer          `json:"peer,omitzero"`         // how snapshots are fetched from other nodes
	MetricsAddr string        `json:"metricsAddr,omitempty"` // loopback host:port for Prometheus
	Driver      string        `json:"driver,omitempty"`      // hypervisor of VMs that name none: qemu; fake for scale tests
	Guest       Guest         `json:"guest,omitzero"`
	QEMU        QEMU          `json:"qemu,omitzero"`
	Fake        Fake          `json:"fake,omitzero"`
	Network     NetworkConfig `json:"network,omitzero"`
	Images      Images        `json:"images,omitzero"`
	Pool        Pool          `json:"pool,omitzero"`
	CloneDirs   []string      `json:"cloneDirs,omitempty"` // folders with exported snapshots that all namespaces may clone from
	Log         Log           `json:"log,omitzero"`

	olderJournal bool // accept a journal that is older than the other records say; for one start, by flag

	VirtualNode *vkcocoon.Config `json:"virtualNode,omitempty"` // a virtual node in this process; nil: none
}

// Guest holds the boot files of container images.
type Guest struct {
	Kernel    string `json:"kernel,omitempty"`
	Initramfs string `json:"initramfs,omitempty"`

	SilenceSeconds int `json:"silenceSeconds,omitempty"` // timeout of calls into a guest that does not answer any more; default 60
}

// QEMU configures the qemu driver. Zero values mean the driver's defaults.
type QEMU struct {
	Binary   string `json:"binary,omitempty"`
	Cgroup   string `json:"cgroup,omitempty"`   // folder in the cgroup v2 tree that holds one folder per VM
	UIDBase  uint32 `json:"uidBase,omitempty"`  // first of the user ids that VM processes get
	UIDCount uint32 `json:"uidCount,omitempty"` // number of those user ids
	TBSize   int    `json:"tbSize,omitempty"`   // MiB of translated code per emulated VM
}

// Fake configures the fake driver, whose VMs exist only as records.
type Fake struct {
	LaunchMS   int `json:"launchMS,omitempty"`   // milliseconds a launch takes
	ShutdownMS int `json:"shutdownMS,omitempty"` // milliseconds from power button to power off
}

// NetworkConfig is the node's own network. NAT and Enabled are pointers to distinguish "false" from "not set".
type NetworkConfig struct {
	Enabled        *bool          `json:"enabled,omitempty"`  // default true; without it VMs have no interfaces
	Mode           string         `json:"mode,omitempty"`     // bridge (default) or cni
	Name           string         `json:"name,omitempty"`     // default "default"
	Instance       string         `json:"instance,omitempty"` // distinguishes daemons that share a network namespace
	Bridge         string         `json:"bridge,omitempty"`   // default cocoon0
	Adopt          bool           `json:"adopt,omitempty"`    // use the existing bridge, with its address; do not change it
	Subnet         string         `json:"subnet,omitempty"`   // IPv4 CIDR; default: a free /24
	Gateway        string         `json:"gateway,omitempty"`
	Subnet6        string         `json:"subnet6,omitempty"`  // IPv6 CIDR, a /64; default: none
	IPv6Mode       string         `json:"ipv6Mode,omitempty"` // slaac (default) or stateful: how guests get their IPv6 address
	NetNS          string         `json:"netns,omitempty"`    // name or path of the network namespace
	DNS            []string       `json:"dns,omitempty"`      // IPv4, and IPv6 with subnet6; default: the host's IPv4 ones
	Search         []string       `json:"search,omitempty"`   // domains that guests complete names with
	Routes         []bridge.Route `json:"routes,omitempty"`   // of guests, in addition to the default route
	MTU            int            `json:"mtu,omitempty"`
	NAT            *bool          `json:"nat,omitempty"` // default true
	MasqueradeLink string         `json:"masqueradeLink,omitempty"`
	Isolation      bool           `json:"isolation,omitempty"` // CIDRs that guests cannot reach, besides metadata services and this host
	Closed         []string       `json:"closed,omitempty"`    // CIDRs that guests cannot reach, in addition to metadata services and this host
	Open           []string       `json:"open,omitempty"`      // CIDRs that guests can reach, even if another rule closes them
	CNI            CNIConfig      `json:"cni,omitzero"`
	Leases         string         `json:"leases,omitempty"` // path of the lease file
}

// Pool configures clones that are prepared before they are requested.
type Pool struct {
	Size   int   `json:"size,omitempty"`   // per snapshot that VMs are cloned from; default 0: none
	Memory int64 `json:"memory,omitempty"` // maximum memory of all their guests together, in bytes
}

// Log configures logging.
type Log struct {
	Level  string `json:"level,omitempty"`
	Format string `json:"format,omitempty"`
}

// Defaults for a machine-wide daemon.
const (
	DefaultStateDir = "/var/lib/cocoon"
	DefaultRunDir   = "/run/cocoon"
	DefaultGroup    = "cocoon"
)

// load reads the file into an empty configuration, if a file is named.
func load(path string) (Config, error) {
	var c Config
	if path == "" {
		return c, nil
	}
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return c, errdefs.NotFoundf("there is no configuration file %s", path)
	case err != nil:
		return c, errdefs.New(errdefs.InvalidArgument, "read the configuration: %w", err)
	}
	if err := yaml.UnmarshalStrict(data, &c); err != nil {
		return c, errdefs.New(errdefs.InvalidArgument, "configuration %s: %w", path, err)
	}
	return c, nil
}

// flags binds the configuration to the command line. Only flags that were given override the file: the flag defaults
// are empty here, and complete fills them in.
func (c *Config) flags(f *pflag.FlagSet) {
	f.StringVar(&c.StateDir, "state-dir", "", "images, disks and journal (default "+DefaultStateDir+")")
	f.StringVar(&c.RunDir, "run-dir", "", "sockets (default "+DefaultRunDir+")")
	f.StringVar(&c.Socket, "socket", "", "socket of the node API (default RUN-DIR/cocoond.sock)")
	f.StringVar(&c.Group, "group", "", "group that may use the socket, if it exists (default "+DefaultGroup+")")
	f.StringVar(&c.Listen, "listen", "", "also serve the node API on this host:port, with the certificates of the configuration's tls")
	f.StringVar(&c.MetricsAddr, "metrics-addr", "", "serve Prometheus metrics on this loopback host:port")
	f.StringVar(&c.Driver, "driver", "", "hypervisor: qemu, or fake for scale tests without guests (default qemu)")
	f.StringVar(&c.Guest.Kernel, "kernel", "", "kernel of container images (default: guest/vmlinux beside the binary or in ../lib/cocoon)")
	f.StringVar(&c.Guest.Initramfs, "initramfs", "", "initramfs of container images (default: likewise)")
	f.StringVar(&c.Images.Mappings, "image-mappings", "", "folder of files that map image names to URLs (default "+DefaultMappings+")")
	f.StringVar(&c.Images.DownloadProtocol, "image-download-protocol", "", "protocol of image URLs that name none [VIRTLET_DOWNLOAD_PROTOCOL] (default https)")
	f.StringVar((*string)(&c.Images.RegexpTranslation), "image-regexp-translation", "", "whether mappings by regular expression count [IMAGE_REGEXP_TRANSLATION] (default no)")
	f.StringVar(&c.Log.Level, "log-level", "", "debug, info, warn or error (default info)")
	f.StringVar(&c.Log.Format, "log-format", "", "text or json (default text)")
	f.StringVar(&c.Network.NetNS, "netns", "", "network namespace of bridge and taps (default: this process's)")
	f.StringVar(&c.Network.Bridge, "bridge", "", "name of the bridge (default cocoon0)")
	f.StringVar(&c.Network.Mode, "network-mode", "", "bridge, or cni for the conflists of --cni-conf-dir alone (default bridge)")
	f.StringVar(&c.Network.CNI.ConfDir, "cni-conf-dir", "", "folder of conflists, which are further networks (default with --network-mode cni: "+cni.DefaultConfDir+")")
	f.StringSliceVar(&c.Network.CNI.BinDirs, "cni-bin-dir", nil, "folders of CNI plugins (default "+strings.Join(cni.DefaultBinDirs, ", ")+")")
	f.StringVar(&c.Network.Subnet, "subnet", "", "IPv4 subnet of the VMs (default: a free /24)")
}

// complete fills in defaults and rejects invalid settings.
func (c *Config) complete() error {
	for _, d := range []struct {
		field *string
		value string
	}{
		{&c.StateDir, DefaultStateDir},
		{&c.RunDir, DefaultRunDir},
		{&c.Group, DefaultGroup},
		{&c.Driver, qemu.Name},
		{&c.Log.Level, "info"},
		{&c.Log.Format, "text"},
		{&c.Network.Name, "default"},
		{&c.Network.Mode, modeBridge},
		{&c.Guest.Kernel, assets.Path("guest/vmlinux")},
		{&c.Guest.Initramfs, assets.Path("guest/initramfs")},
	} {
		if *d.field == "" {
			*d.field = d.value
		}
	}
	for _, dir := range []*string{&c.StateDir, &c.RunDir} {
		abs, err := filepath.Abs(*dir)
		if err != nil {
			return fmt.Errorf("locate %s: %w", *dir, err)
		}
		*dir = abs
	}
	if c.Network.Leases == "" {
		c.Network.Leases = filepath.Join(c.StateDir, "net", "leases.json")
	}
	if c.Network.Mode != modeBridge && c.Network.Mode != modeCNI {
		return errdefs.Invalidf("network mode %q is neither %s nor %s", c.Network.Mode, modeBridge, modeCNI)
	}
	if c.Network.Mode == modeCNI && c.Network.CNI.ConfDir == "" {
		c.Network.CNI.ConfDir = cni.DefaultConfDir
	}
	if c.Network.Mode == modeBridge && c.Network.CNI.Default != "" {
		return errdefs.Invalidf("network.cni.default is for mode %s; in mode %s the bridge is the default network", modeCNI, modeBridge)
	}
	if c.Socket == "" {
		c.Socket = filepath.Join(c.RunDir, "cocoond.sock")
	}
	if c.Driver != qemu.Name && c.Driver != fake.Name {
		return errdefs.Invalidf("driver %q is neither %s nor %s", c.Driver, qemu.Name, fake.Name)
	}
	if s := c.Guest.SilenceSeconds; s < 0 || s > 86400 {
		return errdefs.Invalidf("guest.silenceSeconds is %d; it must be between 1 and 86400, or 0 for 60", s)
	}
	if p := c.Pool; p.Size < 0 || p.Memory < 0 || p.Size > 0 && p.Memory == 0 {
		return errdefs.Invalidf("a pool of %d clones needs a positive size and the bytes of memory that their guests may have; they are %d", p.Size, p.Memory)
	}
	for _, dir := range c.CloneDirs {
		if !filepath.IsAbs(dir) {
			return errdefs.Invalidf("cloneDirs names %q, which is no absolute path", dir)
		}
	}
	if err := c.Images.complete(); err != nil {
		return err
	}
	if err := c.Peer.complete(); err != nil {
		return err
	}
	return loopback(c.MetricsAddr)
}

// loopback rejects metrics addresses that a network can reach: metrics are not authenticated.
func loopback(addr string) error {
	if addr == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return errdefs.Invalidf("metrics address %q is not host:port", addr)
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return errdefs.Invalidf("metrics address %q is not on loopback; metrics have no authentication, put a proxy in front", addr)
	}
	return nil
}

func yes(b *bool) bool { return b == nil || *b }

func (c *Config) bridge() bridge.Config {
	n := c.Network
	dns := n.DNS
	if len(dns) == 0 {
		dns = nil // the host's resolvers
	}
	return bridge.Config{
		Name: n.Name, Instance: n.Instance, Bridge: n.Bridge, NetNS: n.NetNS, Subnet: n.Subnet, Gateway: n.Gateway, Subnet6: n.Subnet6, IPv6Mode: n.IPv6Mode, DNS: dns,
		Search: n.Search, Routes: n.Routes, MTU: n.MTU,
		Adopt: n.Adopt, NAT: yes(n.NAT) && (!n.Adopt || n.NAT != nil), MasqueradeLink: n.MasqueradeLink, Isolation: n.Isolation,
		Closed: n.Closed, Open: n.Open,
		StateDir: filepath.Join(c.StateDir, "network", strings.ReplaceAll(n.Name, string(filepath.Separator), "_")), LeasePath: n.Leases,
	}
}

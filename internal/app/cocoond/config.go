package cocoond

import (
	"cmp"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/app/assets"
	"cocoonstack.io/cocoon/internal/app/kubeletnode"
	"cocoonstack.io/cocoon/internal/app/vkcocoon"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hostdir"
	"cocoonstack.io/cocoon/internal/hypervisor/cloudhypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/hypervisor/firecracker"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu"
	"cocoonstack.io/cocoon/internal/image/pull"
	"cocoonstack.io/cocoon/internal/logging"
	"cocoonstack.io/cocoon/internal/network/bridge"
	"cocoonstack.io/cocoon/internal/network/cni"
	"cocoonstack.io/cocoon/internal/nodeapi"
	"cocoonstack.io/cocoon/internal/settings"
	"cocoonstack.io/cocoon/internal/volume/block"
	"cocoonstack.io/cocoon/internal/volume/lvm"
)

// CSI is where CSI drivers of this machine are.
type CSI struct {
	Plugins string // folder with their registration sockets; "": no drivers are used
	Dir     string // below which they mount the volumes of VMs
}

// Config is cocoond's configuration. Its settings say what the fields mean.
type Config struct {
	StateDir, RunDir, Socket, Group, Listen, MetricsAddr, Driver, SnapshotForm string

	TLS   nodeapi.TLS
	Peer  Peer
	Guest Guest
	QEMU  QEMU
	Fake  Fake

	CloudHypervisor CloudHypervisor
	Firecracker     Program

	Network   NetworkConfig
	Images    Images
	Pool      Pool
	CloneDirs []string
	Devices   []string // volumes: NAME=PATH
	HostPaths []string // folders that VMs may share: [NAMESPACE=]/PATH[:ro]
	Log       Log

	recent *logging.Ring // the end of the log; nil: it is not kept

	olderJournal bool // accept a journal that is older than the other records say; for one start, by flag
	frozen       bool // the schemas of databases stay, because this system is on trial

	VolumePool VolumePool
	CSI        CSI

	CRI CRI

	Appliance Appliance

	VirtualNode *vkcocoon.Config // a virtual node in this process; nil: none
}

// The forms in which a node pushes snapshots. It pulls both.
const (
	formChunks = "chunks" // our own form: nothing is sent that the registry has
	formWhole  = "whole"  // the documented form
)

// Guest configures guests of container images and calls into all guests.
type Guest struct {
	Kernel, Initramfs, WindowsDrivers string
	VSOCK                             bool
	SilenceSeconds                    int
}

// QEMU configures the qemu driver. Zero values mean the driver's defaults.
type QEMU struct {
	Binary   string `json:"binary,omitempty"`
	Cgroup   string `json:"cgroup,omitempty"`   // folder in the cgroup v2 tree that holds one folder per VM
	UIDBase  uint32 `json:"uidBase,omitempty"`  // first of the user ids that VM processes get
	UIDCount uint32 `json:"uidCount,omitempty"` // number of those user ids
	TBSize   int    `json:"tbSize,omitempty"`   // MiB of translated code per emulated VM
}

// Program configures a driver whose other settings are those of QEMU.
type Program struct {
	Binary string `json:"binary,omitempty"` // looked up in PATH, or a path
}

// CloudHypervisor is Program for the driver cloud-hypervisor.
type CloudHypervisor struct {
	Program
	Firmware string `json:"firmware,omitempty"` // path of the file that boots disk images; "": the driver looks in the usual places
}

// VolumePool configures the volumes on a thin pool of LVM.
type VolumePool struct {
	Name         string // VG/POOL; "": none
	Warn, Refuse int    // percent
}

// Fake configures the fake driver, whose VMs exist only as records.
type Fake struct {
	LaunchMS   int `json:"launchMS,omitempty"`   // milliseconds a launch takes
	ShutdownMS int `json:"shutdownMS,omitempty"` // milliseconds from power button to power off
}

// NetworkConfig is the node's own network. NAT and Enabled are pointers to distinguish "false" from "not set".
type NetworkConfig struct {
	Enabled, NAT                                          *bool
	Mode, Name, Instance, Bridge, NetNS, IPv6Mode, Leases string
	Subnet, Gateway, Subnet6, MasqueradeLink              string
	Adopt, Isolation, Switched                            bool
	DNS, Search, Closed, Open, Services, Peers            []string
	Routes                                                []bridge.Route
	MTU                                                   int
	CNI                                                   CNIConfig
}

// Pool configures clones that are prepared before they are requested.
type Pool struct {
	Size   int   `json:"size,omitempty"`   // per snapshot that VMs are cloned from; default 0: none
	Memory int64 `json:"memory,omitempty"` // maximum memory of all their guests together, in bytes
}

// CRI configures the door for a kubelet.
type CRI struct {
	Socket, Containerd, Network string
	Handlers                    []string
	Size                        CRISize
}

// Appliance configures the door of an appliance.
type Appliance struct {
	Listen string // host:port; "": none
	Silent bool   // it is not announced on its networks

	Containerd string // socket of containerd; "": no containers
}

// CRISize is the size of the VM of a pod without limits. Zero values mean the defaults.
type CRISize struct {
	CPUs    int   `json:"cpus,omitempty"`
	Memory  int64 `json:"memory,omitempty"`  // bytes
	Storage int64 `json:"storage,omitempty"` // bytes
}

// Log configures logging.
type Log struct{ Level, Format string }

// settings are all settings of cocoond. The keys are those of Config.
func (c *Config) settings() []settings.Setting {
	g, n, i := &c.Guest, &c.Network, &c.Images
	return []settings.Setting{
		{Flag: "state-dir", Env: "COCOOND_STATE_DIR", Key: "stateDir", Default: "/var/lib/cocoon", Value: settings.Text(&c.StateDir), Usage: "images, disks and journal"},
		{Flag: "run-dir", Env: "COCOOND_RUN_DIR", Key: "runDir", Default: "/run/cocoon", Value: settings.Text(&c.RunDir), Usage: "sockets"},
		{Flag: "socket", Env: "COCOOND_SOCKET", Key: "socket", Value: settings.Text(&c.Socket), Usage: "socket of the node API (default: RUN-DIR/cocoond.sock)"},
		{Flag: "group", Env: "COCOOND_GROUP", Key: "group", Default: "cocoon", Value: settings.Text(&c.Group), Usage: "group that may use the socket, if it exists"},
		{Flag: "listen", Env: "COCOOND_LISTEN", Key: "listen", Value: settings.Text(&c.Listen), Usage: "also serve the node API on this host:port, with the certificates of tls in the file"},
		{Key: "tls", Value: settings.Tree(&c.TLS), Usage: "{cert, key, clientCA}: files for listen; clients have a certificate of clientCA"},
		{Key: "peer", Value: settings.Tree(&c.Peer), Usage: "{ca, cert, key}: files to fetch snapshots from other nodes' listen with; their clientCA signed cert"},
		{Flag: "metrics-addr", Env: "COCOOND_METRICS_ADDR", Key: "metricsAddr", Value: settings.Text(&c.MetricsAddr), Usage: "serve Prometheus metrics on this loopback host:port"},
		{Flag: "driver", Env: "COCOOND_DRIVER", Key: "driver", Default: qemu.Name, Value: settings.Text(&c.Driver), Usage: "hypervisor of VMs that name none: qemu, cloud-hypervisor, firecracker, or fake for scale tests without guests"},
		{Flag: "kernel", Env: "COCOOND_KERNEL", Key: "guest.kernel", Value: settings.Text(&g.Kernel), Usage: "kernel of container images (default: guest/vmlinux beside the binary or in ../lib/cocoon)"},
		{Flag: "initramfs", Env: "COCOOND_INITRAMFS", Key: "guest.initramfs", Value: settings.Text(&g.Initramfs), Usage: "initramfs of container images (default: guest/initramfs in the same folders)"},
		{Flag: "windows-drivers", Env: "COCOOND_WINDOWS_DRIVERS", Key: "guest.windowsDrivers", Value: settings.Text(&g.WindowsDrivers), Usage: "ISO image with drivers, such as virtio-win.iso, which is in the CD-ROM drive of Windows guests (default: none)"},
		{Flag: "vsock", Env: "COCOOND_VSOCK", Key: "guest.vsock", Value: settings.Bool(&g.VSOCK), Usage: "whether guests may have a virtio socket, by which they reach whatever listens for AF_VSOCK on this machine"},
		{Key: "guest.silenceSeconds", Default: "60", Value: settings.Number(&g.SilenceSeconds), Usage: "how long a guest may not answer before calls into it end"},
		{Key: "qemu", Value: settings.Tree(&c.QEMU), Usage: "{binary, cgroup, uidBase, uidCount, tbSize}: program, folder of the VMs in the cgroup tree, their user ids, MiB of translated code"},
		{Key: "cloudHypervisor", Value: settings.Tree(&c.CloudHypervisor), Usage: "{binary, firmware}: program of the driver cloud-hypervisor, and the file that boots disk images in it"},
		{Key: "firecracker", Value: settings.Tree(&c.Firecracker), Usage: "{binary}: program of the driver firecracker"},
		{Key: "fake", Value: settings.Tree(&c.Fake), Usage: "{launchMS, shutdownMS}: how long the VMs of the driver fake take"},
		{Flag: "image-mappings", Env: "COCOOND_IMAGE_MAPPINGS", Key: "images.mappings", Default: DefaultMappings, Value: settings.Text(&i.Mappings), Usage: "folder of files that map image names to URLs"},
		{Flag: "image-download-protocol", Env: "VIRTLET_DOWNLOAD_PROTOCOL", Key: "images.downloadProtocol", Default: "https", Value: settings.Text(&i.DownloadProtocol), Usage: "protocol of image URLs that name none"},
		{Flag: "image-regexp-translation", Env: "IMAGE_REGEXP_TRANSLATION", Key: "images.regexpTranslation", Default: "no", Value: settings.Text(&i.RegexpTranslation), Usage: "whether mappings by regular expression count"},
		{Key: "images.registries", Value: settings.Tree(&i.Registries), Usage: "{HOST: {mirrors, ca, insecure}}: what is special about registries"},
		{Key: "images.maxParallelPulls", Default: strconv.Itoa(pull.DefaultParallel), Value: settings.Number(&i.MaxParallelPulls), Usage: "transfers at a time"},
		{Key: "images.stallTimeout", Value: settings.Text(&i.StallTimeout), Usage: "how long a connection may deliver no data (default: 30s, and 60s for registries)"},
		{Key: "images.allow", Value: settings.List(&i.Allow), Usage: "networks, addresses and HOST[:PORT] that pods' images may come from, besides public ones"},
		{Key: "images.privateRegistries", Value: settings.Tree(&i.PrivateRegistries), Usage: "whether pods' registries may be in private networks (default: true)"},
		{Key: "images.pullCredentialsVerification", Default: string(pull.VerifyPulled), Value: settings.Text(&i.Verification), Usage: "who may use a private image that is here, or AlwaysVerify, NeverVerify"},
		{Key: "images.gc", Value: settings.Tree(&i.GC), Usage: "{interval, minAge, maxAge, maxSize, high, low}: unused images go, every 5m (or off) those older than 2m when the disk is 85% full, to 80%"},
		{Key: "pool", Value: settings.Tree(&c.Pool), Usage: "{size, memory}: clones to keep ready for each snapshot, and the bytes of memory for all (default: none)"},
		{Flag: "snapshot-form", Env: "COCOOND_SNAPSHOT_FORM", Key: "snapshotForm", Default: formChunks, Value: settings.Text(&c.SnapshotForm), Usage: "how snapshots are pushed: chunks, or whole for other programs of the documented system"},
		{Key: "cloneDirs", Value: settings.List(&c.CloneDirs), Usage: "folders with exported snapshots that pods of all namespaces may clone from (default: none)"},
		{Flag: "volume-devices", Env: "COCOOND_VOLUME_DEVICES", Key: "volumeDevices", Value: settings.List(&c.Devices), Usage: "block devices that are volumes: NAME=PATH or NAMESPACE/NAME=PATH, best by /dev/disk/by-id (default: none)"},
		{Flag: "host-paths", Env: "COCOOND_HOST_PATHS", Key: hostdir.Setting, Value: settings.List(&c.HostPaths), Usage: "folders of the node that VMs may share, with all below them: /PATH, NAMESPACE=/PATH for one namespace, with :ro at the end for reading only (default: none)"},
		{Flag: "csi-plugins", Env: "COCOOND_CSI_PLUGINS", Key: "csiPlugins", Value: settings.Text(&c.CSI.Plugins), Usage: "folder in which CSI drivers of this machine register, such as /var/lib/kubelet/plugins_registry (default: none, pods have no volumes of them)"},
		{Flag: "csi-dir", Env: "COCOOND_CSI_DIR", Key: "csiDir", Default: "/var/lib/kubelet/plugins/cocoonstack.io", Value: settings.Text(&c.CSI.Dir), Usage: "folder below which CSI drivers mount the volumes of VMs; they must see what is mounted there"},
		{Flag: "volume-pool", Env: "COCOOND_VOLUME_POOL", Key: "volumePool", Value: settings.Text(&c.VolumePool.Name), Usage: "thin pool of LVM for volumes of the kind lvm: VG/POOL (default: none)"},
		{Key: "volumePoolWarn", Default: strconv.Itoa(lvm.DefaultWarn), Value: settings.Number(&c.VolumePool.Warn), Usage: "percent of its data or metadata in use at which the log warns"},
		{Key: "volumePoolRefuse", Default: strconv.Itoa(lvm.DefaultRefuse), Value: settings.Number(&c.VolumePool.Refuse), Usage: "percent at which no volume is made or grown on it any more"},
		{Flag: "log-level", Env: "COCOOND_LOG_LEVEL", Key: "log.level", Default: "info", Value: settings.Text(&c.Log.Level), Usage: "debug, info, warn or error"},
		{Flag: "log-format", Env: "COCOOND_LOG_FORMAT", Key: "log.format", Default: "text", Value: settings.Text(&c.Log.Format), Usage: "text or json"},
		{Key: "network.enabled", Value: settings.Tree(&n.Enabled), Usage: "whether VMs have interfaces (default: true)"},
		{Key: "network.name", Default: "default", Value: settings.Text(&n.Name), Usage: "name of the network of the bridge"},
		{Key: "network.instance", Value: settings.Text(&n.Instance), Usage: "tells daemons apart that share a network namespace"},
		{Flag: "netns", Env: "COCOOND_NETNS", Key: "network.netns", Value: settings.Text(&n.NetNS), Usage: "network namespace of bridge and taps (default: that of this process)"},
		{Flag: "bridge", Env: "COCOOND_BRIDGE", Key: "network.bridge", Default: "cocoon0", Value: settings.Text(&n.Bridge), Usage: "name of the bridge"},
		{Key: "network.adopt", Value: settings.Bool(&n.Adopt), Usage: "use the bridge as it is, with its address"},
		{Flag: "network-mode", Env: "COCOOND_NETWORK_MODE", Key: "network.mode", Default: modeBridge, Value: settings.Text(&n.Mode), Usage: "bridge, or cni for the conflists of --cni-conf-dir alone"},
		{Flag: "cni-conf-dir", Env: "COCOOND_CNI_CONF_DIR", Key: "network.cni.confDir", Value: settings.Text(&n.CNI.ConfDir), Usage: "folder of conflists, which are further networks (default with --network-mode cni: " + cni.DefaultConfDir + ")"},
		{Flag: "cni-bin-dir", Env: "COCOOND_CNI_BIN_DIR", Key: "network.cni.binDirs", Default: strings.Join(cni.DefaultBinDirs, ","), Value: settings.List(&n.CNI.BinDirs), Usage: "folders of CNI plugins"},
		{Key: "network.cni.default", Value: settings.Text(&n.CNI.Default), Usage: "conflist of VMs that name no network, in mode cni (default: the first)"},
		{Key: "network.cni.exclusive", Value: settings.List(&n.CNI.Exclusive), Usage: "conflists that only this daemon uses: what they leave is collected"},
		{Flag: "subnet", Env: "COCOOND_SUBNET", Key: "network.subnet", Value: settings.Text(&n.Subnet), Usage: "IPv4 subnet of the VMs (default: a free /24)"},
		{Key: "network.gateway", Value: settings.Text(&n.Gateway), Usage: "address of the bridge in it (default: the first)"},
		{Key: "network.subnet6", Value: settings.Text(&n.Subnet6), Usage: "IPv6 /64 of the VMs (default: none)"},
		{Key: "network.ipv6Mode", Value: settings.Text(&n.IPv6Mode), Usage: "how guests get their IPv6 address: slaac or stateful (default: slaac)"},
		{Key: "network.dns", Value: settings.List(&n.DNS), Usage: "DNS servers of guests (default: those of the host with IPv4 addresses)"},
		{Key: "network.search", Value: settings.List(&n.Search), Usage: "domains that guests complete names with"},
		{Key: "network.routes", Value: settings.Tree(&n.Routes), Usage: "[{to, via}]: routes of guests besides the default route"},
		{Key: "network.mtu", Value: settings.Number(&n.MTU), Usage: "bytes (default: that of the link with the default route)"},
		{Key: "network.nat", Value: settings.Tree(&n.NAT), Usage: "whether guests reach other networks through this host's address (default: true, with adopt false)"},
		{Key: "network.masqueradeLink", Value: settings.Text(&n.MasqueradeLink), Usage: "the only link for that (default: all links)"},
		{Key: "network.isolation", Value: settings.Bool(&n.Isolation), Usage: "guests of the bridge do not reach each other"},
		{Key: "network.switched", Value: settings.Bool(&n.Switched), Usage: "guests of the bridge exchange frames directly; otherwise the host routes between them, as Services need it"},
		{Key: "network.services", Value: settings.List(&n.Services), Usage: "ADDRESS:PORT of Services by which guests reach ports of this host that they do not reach directly"},
		{Key: "network.peers", Value: settings.List(&n.Peers), Usage: "bridges of other nodes of the cluster on this machine: no address translation between their guests and these"},
		{Key: "network.closed", Value: settings.List(&n.Closed), Usage: "networks that guests do not reach, besides metadata services and this host"},
		{Key: "network.open", Value: settings.List(&n.Open), Usage: "networks that guests reach, even if another rule closes them"},
		{Key: "network.leases", Value: settings.Text(&n.Leases), Usage: "lease file (default: STATE-DIR/net/leases.json)"},
		{Flag: "cri-socket", Env: "COCOOND_CRI_SOCKET", Key: "cri.socket", Value: settings.Text(&c.CRI.Socket), Usage: "serve CRI for a kubelet here, in front of containerd: pods with the runtime handler of VMs become VMs (default: none)"},
		{Flag: "cri-containerd", Env: "COCOOND_CRI_CONTAINERD", Key: "cri.containerd", Default: kubeletnode.ContainerdSocket, Value: settings.Text(&c.CRI.Containerd), Usage: "socket of containerd, which has all other pods"},
		{Key: "cri.handlers", Default: "cocoon", Value: settings.List(&c.CRI.Handlers), Usage: "runtime handlers of VMs, as RuntimeClasses name them"},
		{Key: "cri.network", Value: settings.Text(&c.CRI.Network), Usage: "network of the VMs of these pods, such as the conflist of containerd (default: the default network)"},
		{Key: "cri.size", Value: settings.Tree(&c.CRI.Size), Usage: "{cpus, memory, storage}: of a pod without limits, in bytes (default: 1 CPU, 1 GiB, 10 GiB)"},
		{Flag: "appliance-listen", Env: "COCOOND_APPLIANCE_LISTEN", Key: "appliance.listen", Value: settings.Text(&c.Appliance.Listen), Usage: "serve capsule.v1 on this host:port, such as :50000: containers and micro-VMs without Kubernetes, for capsulectl (default: none)"},
		{Flag: "appliance-silent", Env: "COCOOND_APPLIANCE_SILENT", Key: "appliance.silent", Value: settings.Bool(&c.Appliance.Silent), Usage: "do not announce the appliance on its networks by multicast DNS, by which capsulectl discover finds it"},
		{Flag: "appliance-containerd", Env: "COCOOND_APPLIANCE_CONTAINERD", Key: "appliance.containerd", Value: settings.Text(&c.Appliance.Containerd), Usage: "socket of the containerd that runs the containers of the appliance, in a namespace of their own, such as /run/containerd/containerd.sock (default: none, only micro-VMs run)"},
		{Key: "virtualNode", Value: settings.Tree(&c.VirtualNode), Usage: "{nodeName, kubeconfig, …}: a Kubernetes node in this process, with the keys of vk-cocoon's file (default: none)"},
	}
}

// complete fills in defaults and rejects invalid settings.
func (c *Config) complete() error {
	settings.Fill(c.settings())
	c.Guest.Kernel = cmp.Or(c.Guest.Kernel, assets.Path("guest/vmlinux"))
	c.Guest.Initramfs = cmp.Or(c.Guest.Initramfs, assets.Path("guest/initramfs"))
	for _, dir := range []*string{&c.StateDir, &c.RunDir} {
		abs, err := filepath.Abs(*dir)
		if err != nil {
			return fmt.Errorf("locate %s: %w", *dir, err)
		}
		*dir = abs
	}
	c.Network.Leases = cmp.Or(c.Network.Leases, filepath.Join(c.StateDir, "net", "leases.json"))
	if c.Network.Mode != modeBridge && c.Network.Mode != modeCNI {
		return errdefs.Invalidf("invalid network mode %q; use %s or %s", c.Network.Mode, modeBridge, modeCNI)
	}
	if c.Network.Mode == modeCNI && c.Network.CNI.ConfDir == "" {
		c.Network.CNI.ConfDir = cni.DefaultConfDir
	}
	if c.Network.Mode == modeBridge && c.Network.CNI.Default != "" {
		return errdefs.Invalidf("network.cni.default is for mode %s; in mode %s the bridge is the default network", modeCNI, modeBridge)
	}
	c.Socket = cmp.Or(c.Socket, filepath.Join(c.RunDir, "cocoond.sock"))
	if known := []string{qemu.Name, cloudhypervisor.Name, firecracker.Name, fake.Name}; !slices.Contains(known, c.Driver) {
		return errdefs.Invalidf("invalid driver %q; use one of %s", c.Driver, strings.Join(known, ", "))
	}
	if c.SnapshotForm != formChunks && c.SnapshotForm != formWhole {
		return errdefs.Invalidf("invalid snapshot form %q; use %s or %s", c.SnapshotForm, formChunks, formWhole)
	}
	if s := c.Guest.SilenceSeconds; s < 0 || s > 86400 {
		return errdefs.Invalidf("guest.silenceSeconds is %d; it must be between 1 and 86400, or 0 for 60", s)
	}
	if p := c.Pool; p.Size < 0 || p.Memory < 0 || p.Size > 0 && p.Memory == 0 {
		return errdefs.Invalidf("a pool of %d clones needs a positive size and the bytes of memory that their guests may have; they are %d", p.Size, p.Memory)
	}
	if p := c.Guest.WindowsDrivers; p != "" && !filepath.IsAbs(p) {
		return errdefs.Invalidf("guest.windowsDrivers: %q is not an absolute path", p)
	}
	for _, dir := range c.CloneDirs {
		if !filepath.IsAbs(dir) {
			return errdefs.Invalidf("cloneDirs: %q is not an absolute path", dir)
		}
	}
	if _, err := c.devices(); err != nil {
		return err
	}
	if _, err := c.hostPaths(); err != nil {
		return err
	}
	if err := c.VolumePool.check(); err != nil {
		return err
	}
	if err := c.CSI.check(); err != nil {
		return err
	}
	if err := c.Images.complete(); err != nil {
		return err
	}
	if err := c.Peer.complete(); err != nil {
		return err
	}
	return loopback(c.MetricsAddr)
}

func (p VolumePool) check() error {
	err := lvm.CheckLimits(p.Warn, p.Refuse)
	if err == nil && p.Name != "" {
		err = lvm.Check(p.Name)
	}
	if err != nil {
		return fmt.Errorf("volumePool: %w", err)
	}
	return nil
}

// devices returns the paths of the devices that are volumes, by the names of the volumes.
func (c *Config) devices() (map[string]string, error) {
	paths := map[string]string{}
	for _, d := range c.Devices {
		name, path, ok := strings.Cut(d, "=")
		if _, twice := paths[name]; !ok || twice {
			return nil, errdefs.Invalidf("volumeDevices: %q is not NAME=PATH with a name of its own", d)
		}
		paths[name] = path
	}
	if err := block.Check(paths); err != nil {
		return nil, fmt.Errorf("volumeDevices: %w", err)
	}
	return paths, nil
}

// hostPaths returns the folders that VMs may share.
func (c *Config) hostPaths() (hostdir.List, error) { return hostdir.Parse(c.HostPaths) }

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
	domain := ""
	if c.Appliance.Listen != "" && !n.Adopt {
		domain = workload.Domain
	}
	return bridge.Config{
		Domain: domain,
		Name:   n.Name, Instance: n.Instance, Bridge: n.Bridge, NetNS: n.NetNS, Subnet: n.Subnet, Gateway: n.Gateway, Subnet6: n.Subnet6, IPv6Mode: n.IPv6Mode, DNS: dns,
		Search: n.Search, Routes: n.Routes, MTU: n.MTU,
		Adopt: n.Adopt, NAT: yes(n.NAT) && (!n.Adopt || n.NAT != nil), MasqueradeLink: n.MasqueradeLink, Isolation: n.Isolation,
		Closed: n.Closed, Open: n.Open, Switched: n.Switched, Services: n.Services, Peers: n.Peers,
		StateDir: filepath.Join(c.StateDir, "network", strings.ReplaceAll(n.Name, string(filepath.Separator), "_")), LeasePath: n.Leases,
	}
}

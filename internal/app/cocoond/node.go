package cocoond

import (
	"context"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/app/kubeletnode"
	"cocoonstack.io/cocoon/internal/doctor"
	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/version"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// node answers client requests about the machine and the daemon.
type node struct {
	cfg      Config
	engine   *engine.Engine
	drivers  map[string]hypervisor.Driver
	nets     *networks
	problems func(context.Context) ([]image.MappingProblem, error)
	volumes  volume.Pooled // nil: no storage of volumes has a fixed size
	started  time.Time

	strays
	kept
}

// kept is what the firmware of removed VMs has kept. The engine has it.
type kept interface {
	KeptFirmware(ctx context.Context) ([]vm.KeptFirmware, error)
	DropFirmware(ctx context.Context, k vm.KeptFirmware) error
}

// strays are the VMs on this host that the journal does not know. The engine keeps them.
type strays interface {
	Strays(ctx context.Context) ([]vm.Stray, error)
	AdoptStray(ctx context.Context, ref, name string) (vm.Record, error)
	RemoveStray(ctx context.Context, ref string) error
}

func (d *daemon) newNode(h *host) *node {
	volumes, _ := volume.As[volume.Pooled](h.volumes)
	return &node{cfg: d.cfg, volumes: volumes, engine: h.engine, strays: h.engine, kept: h.engine, drivers: h.drivers, nets: d.nets, problems: d.puller.Problems, started: time.Now()}
}

// hostSize returns the CPUs and the memory of this machine.
func hostSize() (vm.Size, error) {
	var si unix.Sysinfo_t
	if err := unix.Sysinfo(&si); err != nil {
		return vm.Size{}, fmt.Errorf("read the kernel's memory size: %w", err)
	}
	return vm.Size{CPUs: runtime.NumCPU(), Memory: int64(si.Totalram) * int64(si.Unit)}, nil
}

// Info implements nodeapi.Host.
func (n *node) Info(ctx context.Context) (nodewire.NodeInfo, error) {
	host, err := hostSize()
	if err != nil {
		return nodewire.NodeInfo{}, err
	}
	hostname, err := os.Hostname()
	if err != nil {
		return nodewire.NodeInfo{}, fmt.Errorf("read the host name: %w", err)
	}
	all, err := n.engine.List(ctx)
	if err != nil {
		return nodewire.NodeInfo{}, err
	}
	i := nodewire.NodeInfo{
		Version: version.Version, Hostname: hostname, StateDir: n.cfg.StateDir, RunDir: n.cfg.RunDir, PID: os.Getpid(), StartedAt: n.started,
		CPUs: host.CPUs, Memory: host.Memory, VMs: countByState(all),
		Strays: n.engine.StrayCount(),
	}
	i.NetworkDetails, i.VolumePools = n.nets.describe(ctx), n.pools(ctx)
	for _, d := range i.NetworkDetails {
		i.Networks = append(i.Networks, d.Name)
	}
	i.Drivers = n.described(ctx)
	return i, nil
}

// described returns what is said of the hypervisors.
func (n *node) described(ctx context.Context) (out []nodewire.Driver) {
	for _, name := range slices.Sorted(maps.Keys(n.drivers)) {
		out = append(out, n.driver(ctx, name))
	}
	return out
}

func (n *node) pools(ctx context.Context) []volume.Pool {
	if n.volumes == nil {
		return nil
	}
	return n.volumes.Pools(ctx)
}

// usable returns the names of the hypervisors that run VMs here now.
func (n *node) usable(ctx context.Context) (names []string) {
	for _, d := range n.described(ctx) {
		if d.Error == "" {
			names = append(names, d.Name)
		}
	}
	return names
}

func (n *node) driver(ctx context.Context, name string) nodewire.Driver {
	d := nodewire.Driver{Name: name, Default: name == n.cfg.Driver}
	info, err := n.drivers[name].Probe(ctx)
	if err != nil {
		d.Error = err.Error()
		return d
	}
	d.Version, d.Accel, d.Why, d.Isolated, d.Notes = info.Version, string(info.Accel), info.Why, info.Isolated, info.Notes
	for _, f := range info.Firmware {
		d.Firmware = append(d.Firmware, string(f))
	}
	for _, a := range hypervisor.Abilities(ctx, n.drivers[name]) {
		d.Abilities = append(d.Abilities, string(a))
	}
	if l, ok := hypervisor.As[hypervisor.LateLoader](n.drivers[name]); ok {
		if why := l.LoadsLate(); why != "" {
			d.Notes = append(slices.Clone(d.Notes), why)
		}
	}
	return d
}

// Doctor implements nodeapi.Host.
func (n *node) Doctor(ctx context.Context) ([]nodewire.Check, error) {
	return doctor.Run(ctx, doctor.Config{
		Kubelet:  n.kubelet(),
		StateDir: n.cfg.StateDir, RunDir: n.cfg.RunDir, Kernel: n.cfg.Guest.Kernel, Initrd: n.cfg.Guest.Initramfs,
		QEMU: n.cfg.QEMU.Binary, Group: n.cfg.Group, MappingProblems: n.problems,
		Networks: func(ctx context.Context) ([]nodewire.Network, error) { return n.nets.describe(ctx), nil },
		Drivers:  func(ctx context.Context) ([]nodewire.Driver, error) { return n.described(ctx), nil },
		Strays:   n.Strays,
		Pools:    func(ctx context.Context) ([]volume.Pool, error) { return n.pools(ctx), nil },
	}, false), nil
}

// kubelet is what the doctor examines of a kubelet's side; nil if there is no door for one.
func (n *node) kubelet() *doctor.Kubelet {
	if n.cfg.CRI.Socket == "" {
		return nil
	}
	return &doctor.Kubelet{
		Socket: n.cfg.CRI.Socket, Containerd: n.cfg.CRI.Containerd, Driver: podDriver(n.cfg.Driver), NetworkMode: n.cfg.Network.Mode,
		ConfDir: n.cfg.Network.CNI.ConfDir, BinDirs: n.cfg.Network.CNI.BinDirs, Ask: kubeletnode.Ask,
	}
}

// Police implements nodeapi.Host. Policies decide about guests of all namespaces, so only the operator sets them.
func (n *node) Police(ctx context.Context, p network.Policies) error {
	if who := vm.Behalf(ctx); !who.Operator() {
		return errdefs.Preconditionf("only the operator sets network policies, not namespace %s", who.Namespace)
	}
	if err := p.Validate(); err != nil {
		return err
	}
	return n.nets.police(ctx, p)
}

// TeardownNetworks removes everything that the networks made, unless a running VM uses it.
func (n *node) TeardownNetworks(ctx context.Context) error {
	all, err := n.engine.List(ctx)
	if err != nil {
		return err
	}
	for _, r := range all {
		if r.State == vm.StateRunning && len(r.NICs) > 0 {
			return errdefs.Preconditionf("VM %s runs and has a network; stop it first", r.Spec.Name)
		}
	}
	if err := n.noStrayTaps(ctx); err != nil {
		return err
	}
	return n.nets.teardown(ctx)
}

// noStrayTaps refuses to remove the network of stray VMs, which may be running.
func (n *node) noStrayTaps(ctx context.Context) error {
	all, err := n.Strays(ctx)
	if err != nil {
		return err
	}
	for _, s := range all {
		if len(s.Taps) > 0 {
			return errdefs.Preconditionf("VM %s is not in the records and has a network; adopt or remove it first (`cocoon recover`)", s.ID)
		}
	}
	return nil
}

package cocoond

import (
	"cmp"
	"context"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"

	"cocoonstack.io/cocoon/internal/app/vkcocoon"
	"cocoonstack.io/cocoon/internal/cri"
	"cocoonstack.io/cocoon/internal/cri/convert"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/vm"
)

// A virtual node in this process uses the engine directly, and the catalog of its snapshots.
var (
	_ podsnapshots.Snapshots = (*served)(nil)
	_ vkcocoon.Informer      = (*served)(nil)
)

// door is an API that runs in this process, on top of the engine, until ctx ends.
type door interface {
	Run(ctx context.Context) error
}

// bridgeAddress stands for this host's address on the VMs' network, which may be unknown until that network is up.
const bridgeAddress = "bridge"

func (d *daemon) gateway() (string, error) {
	if d.nets.bridge != nil {
		if _, gateway := d.nets.bridge.Subnet(); gateway.IsValid() {
			return gateway.String(), nil
		}
	}
	return "", errdefs.Preconditionf("the virtual node needs the address of the bridge, and the bridge has none")
}

// doors makes the configured doors, except the node API.
func (d *daemon) doors(s *served) (all []door, err error) {
	if d.cfg.CRI.Socket != "" {
		kubelet, err := d.criDoor(s)
		if err != nil {
			return nil, err
		}
		all = append(all, kubelet)
	}
	if d.cfg.Appliance.Listen != "" {
		all = append(all, &applianceDoor{daemon: d, engine: s, images: d.clientImages(s.Engine), log: d.log.With("component", "appliance")})
	}
	if d.cfg.VirtualNode != nil {
		node, err := d.virtualNode(s)
		if err != nil {
			return nil, err
		}
		all = append(all, node)
	}
	return all, nil
}

func (d *daemon) criDoor(s *served) (door, error) {
	c := d.cfg.CRI
	most, err := hostSize()
	if err != nil {
		return nil, err
	}
	driver := podDriver(d.cfg.Driver)
	if driver != d.cfg.Driver {
		d.log.Info("vm pods of a kubelet run in another driver than the default one, which lacks shared folders", "driver", driver)
	}
	return cri.New(cri.Config{
		Socket: c.Socket, Containerd: c.Containerd, Handlers: c.Handlers, ImageDir: filepath.Join(d.cfg.StateDir, "images"),
		Node: convert.Node{Driver: driver, Network: c.Network, CPUs: cmp.Or(c.Size.CPUs, 1), Memory: cmp.Or(c.Size.Memory, vm.DefaultMemory), Storage: c.Size.Storage, Most: most},
	}, cri.Deps{Engine: s, Images: d.clientImages(s.Engine), Recovered: s.Recovered(), Log: d.log})
}

// podDriver returns the driver of the VM pods of a kubelet. They have shared folders, and grow while they run; of the hypervisors, QEMU alone can do that.
func podDriver(byDefault string) string {
	if byDefault == fake.Name {
		return byDefault
	}
	return qemu.Name
}

func (d *daemon) virtualNode(s *served) (door, error) {
	klog.SetSlogLogger(d.log.With("component", "client-go"))
	cfg := *d.cfg.VirtualNode
	cfg.RootDir = cmp.Or(cfg.RootDir, d.cfg.StateDir)
	cfg.LeasesPath = cmp.Or(cfg.LeasesPath, d.cfg.bridge().LeasePath)
	for _, addr := range []*string{&cfg.NodeIP, &cfg.BindAddress} {
		if *addr != bridgeAddress {
			continue
		}
		var err error
		if *addr, err = d.gateway(); err != nil {
			return nil, err
		}
	}
	cfg.Environment(os.Getenv)
	return vkcocoon.New(cfg, s, d.log)
}

package fakenode

import (
	"context"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"sync"

	"cocoonstack.io/cocoon/internal/app/vkcocoon"
	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// Machine is what a virtual node runs on.
type Machine struct {
	*engine.Engine
	*catalog.Snapshots
	image.Puller
}

var (
	_ vkcocoon.Runtime       = (*Machine)(nil)
	_ podsnapshots.Snapshots = (*Machine)(nil)
)

// diskSize is the size of a VM's writable disk, in bytes. The file is sparse.
const diskSize = 16 << 20

// images are enginetest's images, with a disk that snapshots can be made of.
type images struct{ enginetest.Images }

// Prepare implements image.Store.
func (i images) Prepare(ctx context.Context, img image.Image, l image.Layout) (image.Rootfs, error) {
	fs, err := i.Images.Prepare(ctx, img, l)
	if err != nil {
		return fs, err
	}
	cow := filepath.Join(l.Dir, "cow")
	if info, err := os.Stat(cow); err != nil || info.Size() > 0 {
		return fs, err
	}
	return fs, os.Truncate(cow, diskSize)
}

// puller reports every requested image as already present. It implements image.Puller.
type puller struct{ images }

var _ image.Puller = puller{}

// Pull implements image.Puller.
func (p puller) Pull(ctx context.Context, r image.PullRequest, _ func(image.Progress)) (image.Image, error) {
	return p.Get(ctx, r.Name)
}

// Explain implements image.Puller.
func (puller) Explain(context.Context, string) (image.Explanation, error) {
	return image.Explanation{}, errdefs.Unsupportedf("nothing to explain")
}

// SyncMappings implements image.Puller.
func (puller) SyncMappings(context.Context, string, []image.Mapping) ([]image.MappingProblem, error) {
	return nil, nil
}

// Problems implements image.Puller.
func (puller) Problems(context.Context) ([]image.MappingProblem, error) { return nil, nil }

// loopback gives VMs addresses of this host's loopback, which answer pings.
type loopback struct {
	block byte // the second number of its addresses

	mu     sync.Mutex
	leases map[string]vm.NIC // by VM and number of the interface
	last   uint16
}

var _ network.Network = (*loopback)(nil)

func newLoopback(node string) *loopback {
	h := fnv.New32a()
	_, _ = h.Write([]byte(node)) // never fails
	return &loopback{block: byte(h.Sum32()%250) + 1, leases: map[string]vm.NIC{}}
}

// Name implements network.Network.
func (n *loopback) Name() string { return "loopback" }

// Setup implements network.Network.
func (n *loopback) Setup(context.Context) error { return nil }

// Run implements network.Network.
func (n *loopback) Run(ctx context.Context) error { <-ctx.Done(); return nil }

// Teardown implements network.Network.
func (n *loopback) Teardown(context.Context) error { return nil }

// Attach implements network.Network.
func (n *loopback) Attach(_ context.Context, id vm.ID, _ string, index int, _ vm.NICSpec) (vm.NIC, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	key := fmt.Sprintf("%s-%d", id, index)
	if nic, known := n.leases[key]; known {
		return nic, nil
	}
	n.last++
	hi, lo := byte(n.last>>8), byte(n.last)
	nic := vm.NIC{
		Network: n.Name(), Tap: "t" + key, IP: fmt.Sprintf("127.%d.%d.%d", n.block, hi, lo), Prefix: 8,
		MAC: fmt.Sprintf("02:00:00:%02x:%02x:%02x", n.block, hi, lo),
	}
	n.leases[key] = nic
	return nic, nil
}

// Remember implements network.Network.
func (n *loopback) Remember(context.Context, []network.Held) error { return nil }

// Detach implements network.Network.
func (n *loopback) Detach(context.Context, vm.NIC) error { return nil }

// Release implements network.Network.
func (n *loopback) Release(_ context.Context, nic vm.NIC) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.leases, nic.Tap[1:])
	return nil
}

// Sweep implements network.Network.
func (n *loopback) Sweep(context.Context, []string, func(vm.ID) bool) ([]string, []network.Stray, error) {
	return nil, nil, nil
}

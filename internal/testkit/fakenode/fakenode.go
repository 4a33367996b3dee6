// Package fakenode gives a test a virtual node whose VMs exist only as records: the real node, engine, journal and
// snapshot store, on the fake hypervisor and with guests in memory. Hundreds of pods can run on it, hibernate to a real
// registry and wake again.
//
// It runs no guest code: nothing can be executed in its VMs, and they print nothing.
package fakenode

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/app/vkcocoon"
	"cocoonstack.io/cocoon/internal/catalog"
	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/engine/enginetest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/snapshot/chunked"
	"cocoonstack.io/cocoon/internal/snapshot/local"
	"cocoonstack.io/cocoon/internal/vm"
)

// Image is the only image that these nodes have.
const Image = "demo"

// Options configure a node.
type Options struct {
	Name           string
	Pool           string // "": the default one
	Kubeconfig     string // path
	Identity       string // path of a kubeconfig with the node's own identity, instead of Kubeconfig
	Bootstrap      string // path of bootstrap credentials, for its own identity and serving certificate, instead of Kubeconfig
	EpochURL       string // registry of snapshots; "": none
	EpochTokenFile string
	Dir            string   // for all files; "": a temporary one of the test
	CloneDirs      []string // folders that namespaces may clone from

	// Images adds images and a puller to the node's own, of which Image is one; nil: nothing.
	Images func(image.Store, image.Puller) (image.Store, image.Puller)
}

// Node is one virtual node. Its VMs outlive a Stop.
type Node struct {
	opts   Options
	dir    string
	log    *slog.Logger
	host   *fake.Host
	world  *enginetest.World
	guests *guests
	net    *loopback
	port   int
	on     *Machine // nil: stopped
	end    func() error
}

// Start runs a node until the test ends.
func Start(t testing.TB, o Options) *Node {
	t.Helper()
	n := prepare(t, o)
	n.Start(t)
	t.Cleanup(func() { n.Stop(t) })
	return n
}

// Alone runs the Machine of a node until the test ends, but no node: the caller has its own provider on the Machine.
func Alone(t testing.TB, o Options) *Node {
	t.Helper()
	n := prepare(t, o)
	var err error
	if n.on, n.end, err = n.open(context.Background()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Stop(t) })
	return n
}

func prepare(t testing.TB, o Options) *Node {
	t.Helper()
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	n := &Node{opts: o, dir: o.Dir, net: newLoopback(o.Name), log: slog.New(slog.DiscardHandler)}
	if os.Getenv("FAKENODE_LOG") != "" {
		n.log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	var err, worldErr error
	n.host, err = fake.NewHost("")
	n.world, worldErr = enginetest.New(filepath.Join(n.dir, "world"))
	if err := errors.Join(err, worldErr, os.MkdirAll(n.state(), 0o700)); err != nil {
		t.Fatal(err)
	}
	n.guests = newGuests(n.host)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n.port = l.Addr().(*net.TCPAddr).Port
	l.Close()
	return n
}

// Machine is the machine that the node runs on.
func (n *Node) Machine() *Machine { return n.on }

// GuestOf is the guest of the VM with that id, nil when it does not run.
func (n *Node) GuestOf(id vm.ID) *Guest { return n.guests.of(id) }

func (n *Node) state() string { return filepath.Join(n.dir, "state") }

// Guest is the guest of the VM of that name, nil when it does not run.
func (n *Node) Guest(vmName string) *Guest { return n.guests.find(vmName) }

// Running returns the number of running VMs.
func (n *Node) Running() int { return len(n.host.Running()) }

// Addr is the address of the kubelet API.
func (n *Node) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(n.port)) }

// Crash ends the guest of the VM of that name, as a fault of its kernel would.
func (n *Node) Crash(t testing.TB, vmName string) {
	t.Helper()
	if err := n.host.End(n.guests.id(vmName), fake.Reset); err != nil {
		t.Fatal(err)
	}
}

// Save saves the VM of that name as a snapshot of this node.
func (n *Node) Save(t testing.TB, vmName, name string) {
	t.Helper()
	if _, err := n.on.SaveSnapshot(t.Context(), vmName, vm.SaveSpec{Name: name}); err != nil {
		t.Fatal(err)
	}
}

// Stop ends the node abruptly, like a machine that lost its network: its VMs keep running, and the cluster is not told.
// Stopping twice is no error.
func (n *Node) Stop(t testing.TB) {
	t.Helper()
	if n.end == nil {
		return
	}
	if err := n.end(); err != nil {
		t.Errorf("node %s: %v", n.opts.Name, err)
	}
	n.end = nil
}

// Start starts a stopped node.
func (n *Node) Start(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	machine, closeMachine, err := n.open(ctx)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	virtual, err := vkcocoon.New(vkcocoon.Config{
		Kubeconfig: cmp.Or(n.opts.Identity, n.opts.Kubeconfig), NoRole: n.opts.Identity != "", BootstrapKubeconfig: n.opts.Bootstrap, CertDir: filepath.Join(n.dir, "pki"), ServingCSR: n.opts.Bootstrap != "",
		NodeName: n.opts.Name, Pool: n.opts.Pool, NodeIP: "127.0.0.1", BindAddress: "127.0.0.1", KubeletPort: n.port, RootDir: n.state(), Orphans: "destroy",
		EpochURL: n.opts.EpochURL, EpochTokenFile: n.opts.EpochTokenFile, CPU: "10k", Memory: "100Ti", Storage: "100Ti", Pods: 10000,
	}, machine, n.log)
	if err != nil {
		cancel()
		t.Fatal(errors.Join(err, closeMachine()))
	}
	n.on = machine
	nodeEnded := make(chan error, 1)
	go func() { nodeEnded <- virtual.Run(ctx) }()
	n.end = func() error {
		cancel()
		err := <-nodeEnded
		return errors.Join(err, closeMachine()) // the machine outlives the node that runs on it
	}
}

// ownerOf is the owner of objects made before owners existed, found as cocoond does.
func ownerOf(labels map[string]string) vm.Owner {
	return vm.Owner{Namespace: labels[contract.VMLabelPodNamespace], PodUID: labels[contract.VMLabelPodUID]}
}

// open starts the machine and returns the function that stops it.
func (n *Node) open(ctx context.Context) (*Machine, func() error, error) {
	j, err := sqlite.Open(ctx, sqlite.Config{Path: filepath.Join(n.state(), "journal.db")})
	if err != nil {
		return nil, nil, err
	}
	snapshots, err := local.New(local.Config{Dir: filepath.Join(n.state(), "snapshots"), Log: n.log})
	if err != nil {
		return nil, nil, errors.Join(err, j.Close())
	}
	own := images{n.world.Images()}
	store, pulls := image.Store(own), image.Puller(puller{own})
	if n.opts.Images != nil {
		store, pulls = n.opts.Images(store, pulls)
	}
	e, err := engine.New(engine.Config{
		StateDir: n.state(), RunDir: filepath.Join(n.dir, "run"), DefaultDriver: fake.Name, DefaultNetwork: n.net.Name(), Kernel: "/k", Initrd: "/i",
		CloneDirs: n.opts.CloneDirs,
	}, engine.Deps{
		Journal: j, Drivers: map[string]hypervisor.Driver{fake.Name: fake.New(fake.Config{Guest: n.guests.dial}, n.host)}, Images: store,
		Networks: network.Fixed{n.net.Name(): n.net}, Agents: n.guests, DiskAgents: n.guests, Seeds: n.world.Seeds(), Snapshots: snapshots, Log: n.log,
	})
	if err != nil {
		return nil, nil, errors.Join(err, j.Close())
	}
	m := &Machine{Engine: e, Puller: pulls}
	m.Snapshots = &catalog.Snapshots{
		Cloner: e, Images: store, Puller: pulls, Store: snapshots,
		Remote: chunked.New(chunked.Config{Index: filepath.Join(n.state(), "index"), OwnerOf: ownerOf, Log: n.log}, snapshots),
	}
	ended := make(chan error, 1)
	ectx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	go func() { ended <- e.Run(ectx) }()
	return m, func() error {
		cancel()
		return errors.Join(<-ended, j.Close(), snapshots.Close())
	}, nil
}

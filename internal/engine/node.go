package engine

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"

	"cocoonstack.io/cocoon/internal/engine/pool"
	"cocoonstack.io/cocoon/internal/engine/process"
	"cocoonstack.io/cocoon/internal/engine/proclog"
	"cocoonstack.io/cocoon/internal/engine/session"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// node is what all VMs of the engine share: its settings, its collaborators, and the VMs themselves.
type node struct {
	cfg       Config
	log       *slog.Logger
	journal   journal.Journal
	records   Records // nil: none
	drivers   drivers
	images    image.Store
	nics      nics
	agents    map[vm.ImageType]guest.Connector // nil values: none
	seeds     image.Seeder                     // nil: none
	snapshots snapshot.Store                   // nil: none
	volumes   volume.Store                     // nil: none
	roomIn    func(dir string) (Room, error)

	dirs folders
	vms  *index[*machine]
	life *life
	pool *pool.Pool
}

func newNode(cfg Config, deps Deps) *node {
	n := &node{
		cfg: cfg, log: deps.Log, journal: deps.Journal, records: deps.Records, drivers: deps.Drivers, images: deps.Images,
		nics:   nics{deps.Networks, cfg.DefaultNetwork, deps.Log},
		agents: map[vm.ImageType]guest.Connector{vm.ImageOCI: deps.Agents, vm.ImageDisk: deps.DiskAgents},
		seeds:  deps.Seeds, snapshots: deps.Snapshots, volumes: deps.Volumes, roomIn: deps.Room,
		dirs: newFolders(cfg), vms: newIndex[*machine](), life: newLife(),
	}
	if n.nics.Networks == nil {
		n.nics.Networks = network.Fixed{}
	}
	if n.log == nil {
		n.log = slog.New(slog.DiscardHandler)
		n.nics.log = n.log
	}
	if n.roomIn == nil {
		n.roomIn = statfs
	}
	return n
}

// sessions is how the node talks with guests.
func (n *node) sessions() session.Config {
	return session.Config{
		AgentTimeout: n.cfg.AgentTimeout, PoweroffTimeout: n.cfg.PoweroffTimeout, Silence: n.cfg.Silence,
		DrainTimeout: n.cfg.DrainTimeout, ReconnectMin: n.cfg.ReconnectMin, ReconnectMax: n.cfg.ReconnectMax,
		SilentMax: n.cfg.SilentMax, Log: n.log,
	}
}

// store returns the snapshot store, or Unsupported.
func (n *node) store() (snapshot.Store, error) {
	if n.snapshots == nil {
		return nil, errdefs.Unsupportedf("this node keeps no snapshots")
	}
	return n.snapshots, nil
}

// kept returns the row of a VM as its folder has it.
func (n *node) kept(id vm.ID) (journal.Row, error) {
	if n.records == nil {
		return journal.Row{}, errdefs.NotFoundf("vm %s has no record in its folder", id)
	}
	return n.records.Kept(id)
}

// machine is one VM in memory. Whoever holds it in the queue may operate on it; anybody may read rec and run.
type machine struct {
	*node
	id   vm.ID
	logs *proclog.Set

	rec atomic.Pointer[vm.Record] // as in the journal; a record is replaced, never modified
	run atomic.Pointer[run]       // nil unless its process runs

	remains atomic.Bool // its last process may have ended without cleanup

	write sync.Mutex // held for each change of the record: observations run in parallel with operations
}

// run is the process of a VM and the link to its guest.
type run struct {
	*process.Process
	link     *session.Link
	settling atomic.Bool // a worker waits to pause or resume its guest; see settlePause
}

func (n *node) newMachine(r vm.Record) *machine {
	var containers []string
	for _, c := range r.Containers {
		containers = append(containers, c.Name)
	}
	for _, e := range r.Ephemeral {
		containers = append(containers, e.Record.Name)
	}
	m := &machine{node: n, id: r.ID, logs: proclog.NewSet(n.dirs.state(r.ID), n.cfg.MaxLogBytes, containers...)}
	m.rec.Store(&r)
	return m
}

// seed writes the disks from which a disk guest learns its identity and has files, and returns the disks of r with them. They are written
// again before each start, because addresses and files change. They are in the state folder and are removed with it.
func (n *node) seed(ctx context.Context, r vm.Record, nics []vm.NIC) ([]vm.Disk, error) {
	if r.ImageType == vm.ImageOCI || n.seeds == nil {
		return r.Disks, nil
	}
	spec, err := n.dirs.withFiles(r)
	if err != nil {
		return nil, err
	}
	seeds, err := n.seeds.Seed(ctx, r.ID, spec, vm.GuestNICs(nics), n.dirs.state(r.ID))
	if err != nil {
		return nil, fmt.Errorf("write the disks that tell the guest who it is: %w", err)
	}
	for i := range seeds {
		seeds[i].Role = vm.RoleCidat
	}
	disks := slices.DeleteFunc(slices.Clone(r.Disks), func(d vm.Disk) bool { return d.Role == vm.RoleCidat })
	return append(disks, seeds...), nil
}

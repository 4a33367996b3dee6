// Package engine owns the VMs of one machine: their life cycle, their records and the events about them.
//
// Operations on one VM run one after the other, different VMs in parallel. Each is written to the journal before it is
// begun and settled after it, so that whatever kill -9 interrupts is finished or undone by the next Run. Guests never
// notice a restart of the daemon. The engine knows no hypervisor, image format, network or door: they come as values of
// the contracts and are wired elsewhere.
package engine

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// Config is what an operator may set. Zero durations and sizes mean the defaults named here.
type Config struct {
	StateDir       string // survives a reboot: disks and logs of the VMs, in vms/<id>
	RunDir         string // may vanish at a reboot: sockets of the VMs, in vms/<id>
	DefaultDriver  string // of a spec that names none
	DefaultNetwork string // of an interface that names none
	Kernel         string // that OCI guests boot; "" when there is none, then only disk images run
	Initrd         string // that holds the guest agent
	MaxLogBytes    int64  // of one run of one VM's main process; 16 MiB
	PoolSize       int    // clones kept ready of each snapshot that VMs are cloned from; 0: none
	PoolMemory     int64  // bytes of memory that their guests may have in all

	CloneDirs []string                                // absolute folders with exported snapshots that others than the operator may clone from
	OwnerOf   func(labels map[string]string) vm.Owner // of a VM that was made before records had owners; nil: the operator

	AgentTimeout    time.Duration // how long exec and the like wait for a guest to come up; 2 min (emulated guests are slow)
	StopMargin      time.Duration // what a guest gets beyond its grace to sync and power off; 5 s
	PoweroffTimeout time.Duration // from the acknowledged exit of the main process until the VM is killed; 15 s
	Silence         time.Duration // how long a guest with our agent may not answer before calls into it end; 1 min
	DrainTimeout    time.Duration // how long the last output of an ended guest is waited for; 2 s
	ReconnectMin    time.Duration // first pause after a lost agent, doubled up to ReconnectMax; 50 ms
	ReconnectMax    time.Duration // 5 s
	PoolPause       time.Duration // from a clone until the pool is filled again: who waits for his comes first; 1 s
	ProvenAfter     time.Duration // how long a guest that has no agent to answer must have gone on before its saved state is let go; 2 s
	SilentMax       time.Duration // the same for a disk guest, whose image may have no agent at all; 30 s
}

// Deps are the engine's collaborators.
type Deps struct {
	Journal  journal.Journal
	Drivers  map[string]hypervisor.Driver // by name
	Images   image.Store
	Networks network.Networks // nil: none; set up by the caller before Run
	Agents   guest.Connector  // nil: OCI guests are run without talking to their agent
	Log      *slog.Logger     // nil: silent

	DiskAgents guest.Connector // nil: disk guests are run without looking for an agent
	Seeds      image.Seeder    // nil: disk guests are told nothing of who they are

	Snapshots snapshot.Store // nil: nothing is saved or cloned
	Records   Records        // nil: VMs have no records in their folders

	Room func(dir string) (Room, error) // of the file system that a folder is on; nil: what the kernel says
}

// Records are the copies of rows of the journal that VMs have in their folders.
type Records interface {
	// Kept reads the row of a VM. NotFound when there is none, DataLoss when it cannot be understood.
	Kept(id vm.ID) (journal.Row, error)
}

// Engine is the owner of all VMs. Its methods are safe for concurrent use. Records it returns belong to the caller.
//
// Operations wait until Run has recovered what an earlier process left (see Recovered) and return Unavailable once Run
// has been told to end.
type Engine struct {
	cfg      Config
	journal  journal.Journal
	drivers  map[string]hypervisor.Driver
	images   image.Store
	networks network.Networks
	agents   map[vm.ImageType]guest.Connector // nil values: none
	seeds    image.Seeder                     // nil: none
	log      *slog.Logger

	snapshots snapshot.Store // nil: none
	roomIn    func(dir string) (Room, error)
	settling  sync.Map // ids of snapshots that are committed before the record says that a VM is in them

	pool  pool
	queue queue
	index index
	life  *life

	strays  strays
	records Records // nil: none
	syncs   atomicfile.Group
}

// New checks its arguments and returns an engine that does nothing until Run.
func New(cfg Config, deps Deps) (*Engine, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	switch {
	case deps.Journal == nil, deps.Images == nil:
		return nil, errdefs.Invalidf("engine: a journal and an image store are needed")
	case deps.Drivers[cfg.DefaultDriver] == nil:
		return nil, errdefs.Invalidf("engine: the default driver %q is not among the drivers", cfg.DefaultDriver)
	case cfg.PoolSize < 0 || cfg.PoolSize > 0 && cfg.PoolMemory <= 0:
		return nil, errdefs.Invalidf("engine: a pool of %d clones in %d bytes of memory is none; both must be positive", cfg.PoolSize, cfg.PoolMemory)
	}
	if deps.Networks == nil {
		deps.Networks = network.Fixed{}
	}
	if cfg.DefaultNetwork != "" && deps.Networks.Get(cfg.DefaultNetwork) == nil {
		return nil, errdefs.Invalidf("engine: the default network %q is not among the networks", cfg.DefaultNetwork)
	}
	if deps.Log == nil {
		deps.Log = slog.New(slog.DiscardHandler)
	}
	if deps.Room == nil {
		deps.Room = statfs
	}
	return &Engine{
		cfg: cfg, roomIn: deps.Room, journal: deps.Journal, drivers: deps.Drivers, images: deps.Images,
		networks: deps.Networks, seeds: deps.Seeds, log: deps.Log, snapshots: deps.Snapshots, records: deps.Records,
		agents: map[vm.ImageType]guest.Connector{vm.ImageOCI: deps.Agents, vm.ImageDisk: deps.DiskAgents},
		pool:   newPool(cfg.PoolSize, cfg.PoolMemory),
		index:  newIndex(), life: newLife(),
	}, nil
}

func (c *Config) complete() (err error) {
	if c.StateDir == "" || c.RunDir == "" {
		return errdefs.Invalidf("engine: a state and a runtime folder are needed")
	}
	for _, p := range []*string{&c.StateDir, &c.RunDir} {
		if *p, err = filepath.Abs(*p); err != nil {
			return fmt.Errorf("engine: %w", err)
		}
	}
	if c.MaxLogBytes <= 0 {
		c.MaxLogBytes = 16 << 20
	}
	for _, d := range []struct {
		value *time.Duration
		def   time.Duration
	}{
		{&c.AgentTimeout, 2 * time.Minute},
		{&c.StopMargin, 5 * time.Second},
		{&c.PoweroffTimeout, 15 * time.Second},
		{&c.Silence, time.Minute},
		{&c.DrainTimeout, 2 * time.Second},
		{&c.ReconnectMin, 50 * time.Millisecond},
		{&c.ReconnectMax, 5 * time.Second},
		{&c.SilentMax, 30 * time.Second},
		{&c.PoolPause, time.Second},
		{&c.ProvenAfter, 2 * time.Second},
	} {
		if *d.value <= 0 {
			*d.value = d.def
		}
	}
	return nil
}

// Run recovers what an earlier process left, then attends to the running VMs until ctx ends. It returns nil then, when
// all its goroutines have ended; the VMs go on. It may be called once.
func (e *Engine) Run(ctx context.Context) error {
	if !e.life.start(context.WithoutCancel(ctx)) {
		return errdefs.Preconditionf("engine: Run was called before")
	}
	err := e.recover(ctx)
	if err == nil {
		close(e.life.recovered)
		<-ctx.Done()
	}
	e.life.end()
	e.emptyPool(ctx, "")
	e.letGo()
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("recover: %w", err)
	}
	return nil
}

// Recovered is closed when Run has recovered and operations go ahead.
func (e *Engine) Recovered() <-chan struct{} { return e.life.recovered }

// letGo closes what is held of running VMs without ending them. Preconditions: nobody attends to them any more.
func (e *Engine) letGo() {
	for _, m := range e.index.all() {
		r := m.run.Load()
		if r == nil {
			continue
		}
		m.finishLogs()
		if err := r.inst.Close(); err != nil {
			e.log.Warn("vm not let go cleanly", "vm", m.id, "err", err)
		}
	}
}

// stateDir and runDir are the folders of one VM.
func (e *Engine) stateDir(id vm.ID) string { return filepath.Join(e.cfg.StateDir, "vms", string(id)) }
func (e *Engine) runDir(id vm.ID) string   { return filepath.Join(e.cfg.RunDir, "vms", string(id)) }

// makeDirs makes the folders of a VM. An unprivileged hypervisor must be able to pass through them to the files it was
// given, but not to list them.
func (e *Engine) makeDirs(id vm.ID) error {
	for _, dir := range []string{e.stateDir(id), e.runDir(id)} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return fmt.Errorf("make folder: %w", err)
		}
	}
	return nil
}

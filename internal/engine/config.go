package engine

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"syscall"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/hostdir"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// Config is what an operator may set. Zero durations and sizes mean the defaults listed here.
type Config struct {
	StateDir       string   // survives a reboot: disks and logs of the VMs, in vms/<id>
	RunDir         string   // may vanish at a reboot: sockets of the VMs, in vms/<id>
	DefaultDriver  string   // for a spec that names none
	StandIns       []string // hypervisors whose VMs DefaultDriver runs while this node cannot run them
	DefaultNetwork string   // for a NIC that names none
	Kernel         string   // guest kernel of OCI images; "": only disk images can run
	Initrd         string   // contains the guest agent
	WindowsDrivers string   // ISO image in the CD-ROM drive of Windows guests; "": their drive is empty
	VSOCK          bool     // guests may have a virtio socket, by which they reach programs of the node
	MaxLogBytes    int64    // for one run of one VM's main process; 16 MiB
	PoolSize       int      // clones kept ready of each snapshot that VMs are cloned from; 0: no pool
	PoolMemory     int64    // bytes of memory for all guests in the pool together

	HostPaths hostdir.List                            // folders of the node that VMs may share; none: no VM shares any
	Published Published                               // folders of volumes of CSI drivers; nil: no VM has any
	CloneDirs []string                                // absolute folders with exported snapshots that non-operators may clone from
	OwnerOf   func(labels map[string]string) vm.Owner // owner of a VM created before records had owners; nil: the operator

	// Others reports whether something else of the node, such as a container, has the id, and may have volumes and interfaces by it. It must
	// know an id before that gets any, and until it has given them back. An error leaves them as they are. nil: there is nothing else.
	Others func(ctx context.Context, id vm.ID) (bool, error)

	AnswerTimeout   time.Duration // how long a hypervisor may take to let a guest run or not, before the engine goes on without it and tries that again; 10 s
	AgentTimeout    time.Duration // how long exec and similar calls wait until a guest is ready; 2 min (emulated guests are slow)
	StopMargin      time.Duration // extra time after a guest's grace period to sync and power off; 5 s
	PoweroffTimeout time.Duration // from the acknowledged exit of the main process until the VM is killed; 15 s
	Silence         time.Duration // how long a guest with our agent may not answer before calls into it end; 1 min
	DrainTimeout    time.Duration // how long to wait for the last output of an ended guest; 2 s
	ReconnectMin    time.Duration // first pause after the agent is lost, doubled up to ReconnectMax; 50 ms
	ReconnectMax    time.Duration // 5 s
	PoolPause       time.Duration // from a clone until the pool is refilled, so that callers waiting for a clone come first; 1 s
	ProvenAfter     time.Duration // how long a guest whose agent cannot answer must keep running before its saved state is removed; 2 s
	SilentMax       time.Duration // ReconnectMax for a disk guest, whose image may have no agent at all; 30 s
}

// Deps are the engine's collaborators.
type Deps struct {
	Journal  journal.Journal
	Drivers  map[string]hypervisor.Driver // by name
	Images   image.Store
	Networks network.Networks // nil: none; set up by the caller before Run
	Agents   guest.Connector  // nil: OCI guests run without contact to their agent
	Log      *slog.Logger     // nil: silent

	DiskAgents guest.Connector // nil: the engine looks for no agent in disk guests
	Seeds      image.Seeder    // nil: disk guests are not told their identity

	Snapshots snapshot.Store // nil: the engine saves and clones nothing
	Volumes   volume.Store   // nil: no VM has volumes of the volume store
	Records   Records        // nil: VMs have no records in their folders

	Room func(dir string) (Room, error) // space on the file system of a folder; nil: what the kernel reports
}

// Published knows the folders of the volumes that CSI drivers have published on the node.
type Published interface {
	// Root is the folder with all of them.
	Root() string
	// Find returns nil if path is such a folder of owner, published since the node started, and may be written to if write.
	// Errors: FailedPrecondition.
	Find(owner vm.Owner, path string, write bool) error
}

// Records are copies of journal rows in the folders of the VMs.
type Records interface {
	// Kept reads the row of a VM. Errors: NotFound if there is none, DataLoss if it cannot be decoded.
	Kept(id vm.ID) (journal.Row, error)
}

// complete checks what must be given, and fills in the defaults.
func (c *Config) complete() (err error) {
	if c.StateDir == "" || c.RunDir == "" {
		return errdefs.Invalidf("engine: a state and a runtime folder are needed")
	}
	for _, p := range []*string{&c.StateDir, &c.RunDir} {
		if *p, err = filepath.Abs(*p); err != nil {
			return fmt.Errorf("engine: %w", err)
		}
	}
	private := []string{c.StateDir, c.RunDir}
	if c.Published != nil {
		private = append(private, c.Published.Root())
	}
	if err := c.HostPaths.CheckPaths(private...); err != nil {
		return err
	}
	if c.MaxLogBytes <= 0 {
		c.MaxLogBytes = 16 << 20
	}
	for _, d := range []struct {
		value *time.Duration
		def   time.Duration
	}{
		{&c.AnswerTimeout, 10 * time.Second},
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

// Room is the free space of a file system for non-root users, and its size, in bytes.
type Room struct{ Free, Size int64 }

// statfs is the Room of the file system that dir is on.
func statfs(dir string) (Room, error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		return Room{}, fmt.Errorf("read the free space of %s: %w", dir, err)
	}
	return Room{Free: int64(st.Bavail) * st.Bsize, Size: int64(st.Blocks) * st.Bsize}, nil
}

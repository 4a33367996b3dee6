// Package hypervisor is the contract between the engine and whatever runs guests.
//
// A Driver turns a Plan into a detached process and hands out an Instance; a Handle lets a later process adopt it again.
// Abilities beyond starting and stopping are optional interfaces, found with As: what a driver can do is what it implements.
// The package runs nothing itself.
package hypervisor

import (
	"context"
	"io"
	"net"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// Driver starts VMs with one kind of hypervisor. It is stateless between calls apart from what it supervises for its
// instances, and safe for concurrent use by different VMs.
type Driver interface {
	// Name is the driver's fixed name, e.g. "qemu". It is recorded with each VM.
	Name() string

	// Probe says what this host can run. It changes nothing and may be called at any time.
	// It returns Unavailable when the hypervisor is not installed.
	Probe(ctx context.Context) (Info, error)

	// Launch starts the VM of p. On return the guest's CPUs run. The process is detached: it outlives the caller.
	// p.Dir must exist, belong to this VM alone and be empty or hold what an earlier run of the same VM left there.
	// On error nothing of this launch is left behind, not even when ctx ends in the middle.
	Launch(ctx context.Context, p Plan) (Instance, error)

	// Adopt takes up an instance that an earlier process launched. It returns NotFound when that instance has ended
	// (its pid may meanwhile be somebody else's), and InvalidArgument for a handle of another driver or version.
	Adopt(ctx context.Context, h Handle) (Instance, error)

	// Reap removes whatever a launch of id may have left in dir without a Handle having been recorded: a process of ours
	// that was started for exactly this VM, its cgroup, its sockets. It never touches what it cannot prove to be its own.
	// Preconditions: no Instance of id is in use. It is idempotent.
	Reap(ctx context.Context, id vm.ID, dir string) error
}

// Instance is one running VM. Its methods are safe for concurrent use.
type Instance interface {
	// Handle is what Adopt needs. It does not change during the life of the instance.
	Handle() Handle

	// PID is the hypervisor process, 0 when there is none.
	PID() int

	// State asks the hypervisor. After the end it returns NotFound.
	State(ctx context.Context) (RunState, error)

	// Shutdown asks the guest to power off (ACPI) and returns at once.
	Shutdown(ctx context.Context) error

	// Kill ends the process now, waits until it is gone and removes its runtime resources (cgroup, sockets).
	// Killing an ended instance is no error.
	Kill(ctx context.Context) error

	// Wait blocks until the process has ended and returns how. Any number of callers may wait, also after the end.
	// It learns of the end from the kernel (pidfd), not by polling.
	Wait(ctx context.Context) (Exit, error)

	// Close lets go of the instance without ending it: sockets are closed, supervision stops. For the daemon's own stop.
	Close() error
}

// Handle identifies an instance across restarts of the daemon. Data is the driver's own versioned JSON.
type Handle []byte

// RunState is the guest's run state as the hypervisor sees it.
type RunState string

// The run states.
const (
	Running RunState = "running"
	Paused  RunState = "paused"
	Ended   RunState = "ended" // guest powered off; the process is about to end
)

// Exit says how an instance ended.
type Exit struct {
	GuestShutdown bool // the guest powered itself off (with or without being asked)
	GuestReset    bool // the guest reset itself or panicked, and a VM of its kind ends with that
	Signal        int  // signal that ended the process, 0 if none or unknown (adopted processes are not our children)
	Code          int  // exit code of the process, -1 if unknown
}

// ExitTeller is the ability of a Driver to tell how an instance ended while nobody was there to Wait for it.
type ExitTeller interface {
	// LastExit says how the instance of h, which Adopt did not find, ended. NotFound when that was not noted
	// (the process was killed or crashed) or the runtime folder is gone.
	LastExit(ctx context.Context, h Handle) (Exit, error)
}

// Seeker is the ability of a Driver to find the processes of VMs of which no Handle is known, those that Reap would end.
type Seeker interface {
	// Seek returns the processes of those of ids that have any. It changes nothing.
	Seek(ctx context.Context, ids []vm.ID) (map[vm.ID][]int, error)
}

// Plan is everything a driver must know to start one VM: pure data, no open files, no defaults left to guess.
type Plan struct {
	ID     vm.ID
	Name   string
	CPUs   int
	Memory int64 // bytes
	Accel  vm.Accel
	Boot   vm.Boot
	Disks  []vm.Disk
	NICs   []vm.NIC
	Agent  string // name of the virtio-serial port that the guest's agent looks for; "" gives the guest none
	Dir    string // runtime folder of this VM: sockets, pid file, console log

	Incoming *Incoming // nil: the guest boots
}

// Incoming is saved state from which a VM goes on instead of booting. Its files are only read.
type Incoming struct {
	State  string // path: devices and CPUs, as Save wrote them
	Memory string // path: the guest's memory, as Save wrote it
	Base   string // path: the memory that Memory is a delta to; "": it is whole
	// Summed says that each of these files has its checksums beside it, as package sparse reads them. All that is loaded is
	// compared, and the launch fails with DataLoss, which names the file and the byte, before the guest runs.
	Summed bool
	// Alone says that no other VM goes on from this memory now, which saves copying what the guest writes. Otherwise the
	// memory is mapped copy-on-write and shared by all VMs that go on from it.
	Alone bool
	// Booting says that the guest may have been saved before its firmware had read all of its kernel: it needs Plan.Boot as
	// the one that was saved had it.
	Booting bool
	// LinksDown keeps every interface without carrier from before the guest's first instruction until SetLink.
	LinksDown bool
	// Grown are the serials of the disks that are larger than when the state was saved. The guest is told.
	Grown []string
}

// Info is what Probe found.
type Info struct {
	Version  string   // of the hypervisor, e.g. "7.2.22"
	Accel    vm.Accel // what AccelAuto resolves to: kvm or tcg
	Why      string   // one sentence: why that accelerator
	Isolated bool     // each VM gets its own cgroup
	Notes    []string // what this host lacks, one sentence each
	Firmware []vm.Firmware
}

// ConsoleOpener is the ability to talk to the guest's serial console.
type ConsoleOpener interface {
	// OpenConsole connects to the console. One reader at a time: a second caller gets a Conflict error.
	OpenConsole(ctx context.Context) (io.ReadWriteCloser, error)
	// ConsoleLog is the path of the bounded log of all console output.
	ConsoleLog() string
}

// GuestDialer is the ability to reach the agent in the guest, at the port that the plan named. The stream is raw; package guest speaks on it.
type GuestDialer interface {
	DialGuest(ctx context.Context) (net.Conn, error)
}

// Pauser is the ability to stop and resume the guest's CPUs. Resume also ends what is left of a Save whose caller was
// killed. Resuming a guest that runs is no error.
type Pauser interface {
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
}

// DiskWatcher is the ability of an Instance to tell that a disk of its guest could not be read or written.
type DiskWatcher interface {
	// DiskFault returns the last fault that still holds, nil when there is none, and a channel that is closed when that may
	// have changed. It waits until that is known. After the end it returns NotFound.
	DiskFault(ctx context.Context) (fault *DiskFault, changed <-chan struct{}, err error)
}

// DiskFault is what became of a guest's request to a disk.
type DiskFault struct {
	// Stands says that the guest was stopped with its request kept: State is Paused, nothing is lost, and Pauser.Resume has
	// it try again. Otherwise the guest was told of the error, as of any disk's, and runs.
	Stands bool
	Full   bool   // there was no room for what it wrote
	Cause  string // the error of the operating system; "": not known any more
}

// Snapshotter is the ability of an Instance to save the whole state of its guest: memory, devices and disks of one instant.
type Snapshotter interface {
	// Save writes the state and, when it returns nil, every byte of it is in the files (not yet synced). On error the guest
	// runs on as before, with whichever of its old and new disks; neither has lost anything. Not concurrent for one VM.
	// FailedPrecondition for a guest that an earlier save holds: Pauser.Resume lets it go.
	Save(ctx context.Context, p SavePlan) (Saved, error)
}

// SavePlan says where a state goes.
type SavePlan struct {
	State  string // path of a file that Save makes: devices and CPUs, the driver's own format
	Memory string // path of a file that Save makes: the guest's memory, sparse, as large as it is
	// Base is the path of whole memory, saved before, that the guest's may be much like: then Save may make Memory a delta
	// to it, as package sparse has them. "": there is none.
	Base string
	// Overlays become the guest's writable disks at the instant of the save; what they stand on is written to no more.
	// One that is in use already, because an attempt before this one came so far, is no error while the guest has stood
	// since. FailedPrecondition when it runs: the instant is over, and another overlay on top of that one is needed.
	Overlays []DiskOverlay
	// Hold leaves the guest paused from that instant on, for a caller that will end it. Pauser.Resume goes on.
	Hold bool
	// Taken, if not nil, is called once when that instant is over and, without Hold, the guest runs again.
	Taken func()
}

// DiskFlattener is the ability of an Instance to shorten what a disk stands on while the guest runs: each save adds a
// layer, and a VM can start from so many only.
type DiskFlattener interface {
	// FlattenDisk copies what lies between the top of the disk with that serial and base into the top, which then stands
	// on base itself, one of the disk's layers; nil: on nothing. The layers are not changed. Before, meanwhile and after it
	// the old chain is true of the disk, so that it may be recorded until it returns nil. Not while it is saved.
	FlattenDisk(ctx context.Context, serial string, base *vm.Disk) error
}

// DiskOverlay is a new top for one writable disk.
type DiskOverlay struct {
	Serial string  // of the disk
	Disk   vm.Disk // an empty qcow2 that stands on what the disk is now
}

// Saved is what a save was like.
type Saved struct {
	Pause   time.Duration // that the guest was stopped; with Hold until the return
	Method  string        // how memory was taken, the driver's word: precopy or stopped
	Memory  int64         // bytes of memory that are not zero
	Delta   bool          // SavePlan.Memory has only what differs from SavePlan.Base
	Machine vm.Machine    // that can resume it
}

// MachineTeller is the ability of a Driver to say on which kind of machine it would run a VM now. A driver that resumes
// saved state has it.
type MachineTeller interface {
	Machine(ctx context.Context, accel vm.Accel) (vm.Machine, error)
}

// Linker is the ability of an Instance to take an interface's carrier away and give it back.
type Linker interface {
	// SetLink sets the carrier of Plan.NICs[nic]. While it is down no packet passes in either direction.
	SetLink(ctx context.Context, nic int, up bool) error
}

// NICSwapper is the ability of an Instance to replace an interface by one with another MAC while the guest runs, for
// guests that nobody can tell to change theirs. The new one has the tap of the old one, and no carrier until SetLink.
type NICSwapper interface {
	SwapNIC(ctx context.Context, nic int, mac string) error
}

// Wrapper is implemented by decorators of Instance or Driver so that As can look through them.
type Wrapper interface{ Unwrap() any }

// As finds ability T in v or in what v decorates.
func As[T any](v any) (T, bool) {
	for {
		if t, ok := v.(T); ok {
			return t, true
		}
		w, ok := v.(Wrapper)
		if !ok {
			var zero T
			return zero, false
		}
		v = w.Unwrap()
	}
}

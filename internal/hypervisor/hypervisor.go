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

// Pauser is the ability to stop and resume the guest's CPUs.
type Pauser interface {
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
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

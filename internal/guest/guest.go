// Package guest is the contract of the channel into a running VM: set it up, run commands, read logs, stop it.
//
// An implementation speaks one agent's protocol on a byte stream that the hypervisor driver provides. It does not
// decide about the VM's lifecycle.
package guest

import (
	"context"
	"io"
	"net"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Names of the virtio-serial ports that agents serve.
const (
	PortCocoon = "cocoon.agent"           // our own, in OCI guests
	PortQEMU   = "org.qemu.guest_agent.0" // qemu-guest-agent, in disk guests that have it
)

// Dial opens the raw stream to the guest; hypervisor.GuestDialer provides it.
type Dial func(ctx context.Context) (net.Conn, error)

// Connector finds an agent behind a stream.
type Connector interface {
	// Connect waits until the agent answers or ctx ends, and returns a session. It waits for a guest that is still
	// booting.
	// Errors: Unavailable when the stream itself cannot be opened.
	Connect(ctx context.Context, dial Dial) (Agent, error)
}

// Agent is one session with a guest's agent. All methods may run concurrently; a slow stream does not block another.
// When the link is lost, every call returns Unavailable and Done is closed; the owner must connect again.
type Agent interface {
	// Info returns the agent's version and the state of the guest.
	Info(ctx context.Context) (Info, error)

	// Setup gives the guest its identity, mounts its volumes and starts the main process. Idempotent: a guest that is
	// already set up keeps its processes and only applies changes of hostname, interfaces and resolv.conf.
	// Errors: Waiting while a volume cannot be mounted; the caller tries again.
	Setup(ctx context.Context, s Setup) error

	// Exec runs a command in the guest and returns its exit code (128+n for death by signal n).
	// It returns when the command has ended and its output was delivered. Cancelling ctx kills the command.
	// Errors: NotFound when the command does not exist, InvalidArgument for a bad user or directory.
	Exec(ctx context.Context, e Exec, s Streams) (int, error)

	// Logs streams the main process's output from the first entry after seq until ctx ends or the process has ended and
	// everything was delivered (then nil). Entries that fell out of the guest's ring are skipped; Seq shows the gap.
	Logs(ctx context.Context, after uint64, fn func(LogEntry) error) error

	// Wait blocks until the main process has ended and returns its exit code. The guest stays up until AckExit, so that
	// the code is not lost while the host's daemon is down.
	Wait(ctx context.Context) (Exit, error)

	// AckExit tells the guest that its exit code is recorded and that it may power off.
	AckExit(ctx context.Context) error

	// Poweroff sends sig (default SIGTERM) to the main process, waits up to grace, kills what is left, syncs and powers
	// off. It returns when the guest has accepted the request, not when it is off.
	Poweroff(ctx context.Context, grace time.Duration) error

	// Stats reports the guest's own view of its resources.
	Stats(ctx context.Context) (Stats, error)

	// Done is closed when the session is lost or closed.
	Done() <-chan struct{}

	// Close ends the session. The guest keeps running.
	Close() error
}

// Info is what the agent reports about itself.
type Info struct {
	Version  string // of the agent
	BootID   string // of the guest kernel: changes with every boot
	SetUp    bool   // Setup has run since boot
	Process  bool   // the main process runs
	UptimeMS int64  // milliseconds since the guest kernel started
}

// Setup is the identity of a guest and, for OCI guests, its main process.
type Setup struct {
	Hostname string
	NICs     []vm.NIC // matched to interfaces by MAC; with an IP: configured statically
	Hosts    []string // lines added to /etc/hosts
	Resolver []string // lines of resolv.conf that name no server
	Process  *vm.Process
	Volumes  []vm.Volume // VolumeKeeper must put their files first; Setup does not read them
	Mounts   []vm.Mount  // of Volumes; made once per boot before the main process starts

	Containers []Container      // instead of Process and Mounts; started once per boot
	Sandbox    bool             // instead of all of these: the guest waits for ContainerAdder, until it is told to stop
	Restart    vm.RestartPolicy // of the VM, for agents that do not know Container.Restart

	Sysctls []vm.Sysctl // set before anything starts

	VolumeLayers map[string][]string // serials of the disks with the files of a volume of an image, by its name, lowest first
	// VolumeSerials are, by the names of volumes, the serials of those that are disks, the tags of those that are folders of the node,
	// and the name by which servers know the guest, for those that are folders of servers.
	VolumeSerials map[string]string
}

// Waiting is the error of a Setup that must be tried again, because a volume cannot be mounted yet. Its class is Unavailable.
type Waiting struct{ error }

// NewWaiting returns a Waiting. why comes from the guest.
func NewWaiting(why string) Waiting { return Waiting{errdefs.Unavailablef("%s", why)} }

// Unwrap returns the error with the class.
func (w Waiting) Unwrap() error { return w.error }

// Container is one of several programs of a guest.
type Container struct {
	Name    string
	Kind    vm.ContainerKind
	Process vm.Process
	Layers  []string // serials of the disks with its image, lowest first
	Mounts  []vm.Mount
	Run     int        // number of its first run, 1 for the very first
	Restart vm.Restart // zero: as Setup.Restart says
	Manual  bool       // of ContainerAdder only: it waits for ContainerStarter
	Hold    bool       // later containers wait for ReleaseContainer, or until the first run of an app has ended
	Root    bool       // its root is the guest's own, and it has no layers; the only container
	// See vm.Container.
	MessagePath    string
	MessageFromLog bool
	Resources      *vm.Resources // nil: no limits; those of a container that was started before are changed

	PIDs    vm.PIDs     // of ContainerAdder only
	Volumes []OwnVolume // of ContainerAdder only: those that it alone has, beside those of the guest
}

// OwnVolume is a volume of one container. Its disks have been plugged.
type OwnVolume struct {
	Name     string   // unique in the guest
	Layers   []string // serials of the disks with the files of an image, lowest first
	Device   string   // or the serial of a disk that the container sees as a device
	ReadOnly bool     // the device
}

// VolumeKeeper is an agent whose guest can have volumes.
type VolumeKeeper interface {
	// PutVolume makes the files of v the content of its volume; programs in the guest see either all old or all new
	// files. It may be called before the Setup that mounts the volume, and at any time after it. Idempotent.
	PutVolume(ctx context.Context, v vm.Volume) error
}

// ContainerKeeper is an agent whose guest can have containers. The agent starts them, and restarts them as the policy
// says. Only the agent knows their state.
type ContainerKeeper interface {
	// Containers calls fn with the state of the containers, in the order of the Setup, then of those that were added: at
	// once and on every change, until all of the Setup have ended permanently (then nil), ctx ends or fn fails. Messages
	// come from the guest.
	Containers(ctx context.Context, fn func([]ContainerState) error) error

	// ContainerLogs is Agent.Logs of one container, from the first entry after seq of run, or of the first run after
	// it. An entry without Seq marks the start of its run.
	ContainerLogs(ctx context.Context, container string, run int, after uint64, fn func(LogEntry) error) error

	// KillContainer ends a run of a container, the current one when run is 0: SIGTERM, and SIGKILL after grace. It
	// returns when the run has ended; if ctx ends first, the guest continues the kill. The run counts as failed, and
	// the restart policy decides what follows. Idempotent: a run that has already ended is no error.
	// Errors: NotFound when there is no such container, Unsupported by older agents.
	KillContainer(ctx context.Context, container string, run int, grace time.Duration) error

	// ReleaseContainer lets the containers start that wait for this one. Idempotent. Errors as of KillContainer.
	ReleaseContainer(ctx context.Context, container string) error
}

// ContainerState is what a guest reports about one of its containers.
type ContainerState struct {
	Name   string
	Status vm.ContainerStatus
}

// Exec is one command to run. Env is added to the main process's environment.
type Exec struct {
	Container string // "" for the main process's root, or that of the first app
	Command   []string
	Env       []vm.EnvVar
	WorkDir   string
	User      string
	TTY       bool
	Rows      uint16 // first size of the terminal, in characters; 0 for the default
	Cols      uint16
}

// Streams are the ends of an Exec. A nil reader is an empty stdin; nil writers discard output. With TTY, Stderr is
// unused.
type Streams struct {
	Stdin   io.Reader
	Stdout  io.Writer
	Stderr  io.Writer
	Resize  <-chan WinSize // may be nil
	Signals <-chan int     // POSIX signal numbers for the command; may be nil
}

// WinSize is the size of a terminal in characters.
type WinSize struct{ Rows, Cols uint16 }

// LogEntry is one line (or the part of a line before a flush) of the main process's output.
type LogEntry struct {
	Seq    uint64    `json:"seq"` // from 1, without gaps as produced
	Time   time.Time `json:"time"`
	Stream string    `json:"stream"`        // stdout or stderr
	Data   []byte    `json:"data"`          // with its newline; a partial line has none
	Run    int       `json:"run,omitempty"` // of a container, from 1; Seq starts again with each run
	End    int64     `json:"-"`             // offset behind it in the serial log, in bytes; 0: it is of another log
}

// LogOptions selects entries of a VM's log.
type LogOptions struct {
	Container string // as in Exec
	Follow    bool
	Tail      int       // last entries only; negative for all
	Since     time.Time // zero for all
	Previous  bool      // of the run before this one
	Serial    bool      // the serial console instead of the main process; always so for guests without agent
	From      int64     // offset in the serial log from which on it is read, in bytes, if Tail is negative
}

// Exit is how the main process ended.
type Exit struct {
	Code       int
	StartedAt  time.Time
	FinishedAt time.Time
}

// Stats is a snapshot of the guest's resources.
type Stats struct {
	CPUSeconds     float64 // busy time of all CPUs since boot
	MemoryTotal    int64   // bytes
	MemoryUsed     int64   // bytes: total less available
	DiskTotal      int64   // bytes of the writable layer
	DiskUsed       int64   // bytes
	Processes      int
	LoadAverage1   float64
	NetworkRxBytes int64
	NetworkTxBytes int64
	Containers     []ContainerStats // of a guest that has several containers, including ended ones
	Volumes        []VolumeStats    // disks of the volume store that are mounted
	Pressure       Pressure
}

// VolumeStats is what the mounted file system of one volume has.
type VolumeStats struct {
	Name                  string // of the volume in the VM
	Size, Used, Available int64  // bytes; Available to ordinary users
	Inodes, InodesFree    int64
}

// ContainerStats is what one container uses.
type ContainerStats struct {
	Name       string
	CPUSeconds float64 // of all its runs since the guest booted
	Memory     int64   // bytes, without file pages that are not in use

	MemoryTotal int64 // bytes, with all file pages
	Anonymous   int64 // bytes of anonymous memory
	PageFaults  int64
	MajorFaults int64    // those that waited for a disk
	Written     *DiskUse // nil until the guest has counted it
	Pressure    Pressure
}

// DiskUse is what a container has written to its disk.
type DiskUse struct {
	Bytes  int64 `json:"bytes"`
	Inodes int64 `json:"inodes"`
}

// Pressure says how long programs have waited because a resource was short (pressure stall information of Linux, accounting/psi.rst). What the
// kernel of a guest does not tell is nil.
type Pressure struct {
	CPU    *Stall `json:"cpu,omitempty"`
	Memory *Stall `json:"memory,omitempty"`
	IO     *Stall `json:"io,omitempty"`
}

// Stall is how long at least one program waited, and how long all did.
type Stall struct {
	Some Waits `json:"some"`
	Full Waits `json:"full"`
}

// Waits is a time in all, and its percentages of the last 10, 60 and 300 seconds.
type Waits struct {
	Total  time.Duration `json:"total"`
	Avg10  float64       `json:"avg10"`
	Avg60  float64       `json:"avg60"`
	Avg300 float64       `json:"avg300"`
}

package guest

import (
	"context"
	"net/netip"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// Attacher is the ability of an Agent to connect to the standard streams of the main process.
type Attacher interface {
	// Attach writes s.Stdin to the main process, or to that of a container. It delivers the output that the process
	// writes from now on, and returns when the process has ended and all output is delivered. If s.Stdin ends first,
	// Attach returns then, unless the end of its input ends the process (vm.Process.StdinOnce). The end of Attach never
	// stops the process. A session whose writers accept nothing for half a minute is ended, because the process waits
	// for them.
	// Errors: FailedPrecondition when the process does not run, or when s has an input and the process has none.
	Attach(ctx context.Context, a Attach, s Streams) error
}

// Attach names the process to attach to.
type Attach struct {
	Container string // as in Exec
	Rows      uint16 // size to give its terminal, in characters; 0 keeps the size
	Cols      uint16
}

// Forwarder is the ability of an Agent to connect from inside the guest.
type Forwarder interface {
	// Forward connects to a TCP port: on the guest's loopback, IPv4 and then IPv6, or else at its other addresses. It
	// sends s.Stdin to the port and writes what the port sends to s.Stdout, until the port sends no more. The end of
	// s.Stdin ends one direction only. Forward reads s.Stdin only after the connection is open.
	// Errors: Unavailable when nothing listens on the port.
	Forward(ctx context.Context, port int, s Streams) error
}

// ContainerAdder is the ability of an Agent to start containers that are not in its Setup.
type ContainerAdder interface {
	// AddContainer starts a container of kind ephemeral, or only makes its file system if it is Manual. Its disks have been plugged.
	// It returns when the container is about to start; ContainerKeeper.Containers says whether that succeeded. Idempotent by name.
	// Errors: FailedPrecondition if the guest has no containers or is stopping, Unsupported by older agents, Unavailable if
	// its disks do not appear.
	AddContainer(ctx context.Context, c Container) error
}

// ContainerStarter is the ability of an Agent to start and to remove containers that were added to its guest, one by one.
type ContainerStarter interface {
	// StartContainer starts a Manual container. It returns when it is known whether that succeeded, which
	// ContainerKeeper.Containers says. Idempotent.
	// Errors: NotFound, FailedPrecondition if the container has ended, Unsupported by older agents.
	StartContainer(ctx context.Context, container string) error
	// RemoveContainer ends a container if it runs, and removes its file system and what was written to it. disks are the serials
	// of its disks that no other container uses: they can be unplugged when it returns. Idempotent.
	// Errors: InvalidArgument for a container of the Setup, Unavailable while the guest uses its disks, Unsupported by older agents.
	RemoveContainer(ctx context.Context, container string, disks []string) error
}

// ContainerPauser is the ability of an Agent to pause the containers of its guest, and to do without the folder that the guest shares with its node.
type ContainerPauser interface {
	// PauseContainers stops all processes of containers, and unmounts the folder, so that its device can be unplugged. Idempotent.
	// Errors: FailedPrecondition if a program has something open in the folder (then the containers run as before), Unsupported by older agents.
	PauseContainers(ctx context.Context) error
	// ResumeContainers waits for the device, mounts the folder again, and lets the containers go on. Those that are held are in the state created
	// instead, until StartContainer. Idempotent, also in a guest whose containers are not paused.
	// Errors: Unavailable while there is no device, Unsupported by older agents.
	ResumeContainers(ctx context.Context, held []string) error
}

// ContainerResizer is the ability of an Agent to change what its containers may use.
type ContainerResizer interface {
	// ResizeContainers changes what containers may use, by name, now and in their next runs. Idempotent.
	// Errors: NotFound, FailedPrecondition if a memory limit is below what its container uses (then nothing has changed),
	// Unsupported by older agents.
	ResizeContainers(ctx context.Context, want map[string]vm.Resources) error
}

// VolumeAttacher is the ability of an Agent to use volumes whose disks are plugged while its guest runs.
type VolumeAttacher interface {
	// AttachVolume mounts a volume of kind VolumeDisk, whose disk has been plugged, at path: for the main process, or in every
	// container of the Setup. With "" it is mounted nowhere. It makes a file system on an empty disk. v.Disk.Ref is the serial of
	// the disk. After an error of the guest the volume is mounted nowhere. Idempotent.
	// Errors: InvalidArgument (path), FailedPrecondition (what is on the disk, or the guest is not set up), DataLoss (errors of the
	// file system), Unavailable if the disk does not appear, Unsupported by older agents.
	AttachVolume(ctx context.Context, v vm.Volume, path string) error
	// DetachVolume unmounts the volume everywhere in the guest, whose kernel then forgets the disk. It is no error if the guest has
	// no such volume.
	// Errors: FailedPrecondition while a program uses the volume (then nothing has changed), Unsupported by older agents.
	DetachVolume(ctx context.Context, volume, serial string) error
	// GrowVolume waits until the guest sees that the disk of the volume has size bytes, and grows its file system if that is
	// mounted and can be written to. Idempotent.
	// Errors: Unavailable if the guest does not see the size in time, Unsupported by older agents, also for xfs by
	// those that cannot grow it.
	GrowVolume(ctx context.Context, volume, serial string, size int64) error
}

// MountReporter is the ability of an Agent that is not ours to report what its guest has mounted.
type MountReporter interface {
	// Mounts returns where file systems on the disk with that serial are mounted. The guest may lie.
	// Errors: Unsupported if the configuration of the guest forbids it.
	Mounts(ctx context.Context, serial string) ([]string, error)
}

// Freezer is the ability of an Agent to freeze the guest's file systems, so that a copy of its disks is consistent.
type Freezer interface {
	// Freeze flushes and freezes the file systems and returns their number. If it fails, no file system stays frozen,
	// as far as the guest can be reached.
	Freeze(ctx context.Context) (int, error)
	// Thaw ends a freeze and returns how many file systems were frozen. It is no error when none was frozen.
	Thaw(ctx context.Context) (int, error)
}

// FreezeReporter is the ability of an Agent that does not thaw file systems by itself to report whether it has frozen some.
type FreezeReporter interface {
	Freezer
	Frozen(ctx context.Context) (bool, error)
}

// NetworkReporter is the ability of an Agent to report the addresses that the guest has configured.
type NetworkReporter interface {
	Interfaces(ctx context.Context) ([]Interface, error)
}

// Interface is a network interface as the guest reports it. The guest may lie.
type Interface struct {
	Name      string
	MAC       string // lower case, "" when it has none
	Addresses []netip.Prefix
}

// Describer is the ability of an Agent that is not ours to tell what its guest is.
type Describer interface {
	// Describe returns what the guest tells of itself. What its agent does not tell, or is not allowed to, is empty. The guest may lie.
	Describe(ctx context.Context) (Description, error)
}

// Description is what a guest tells of itself.
type Description struct {
	Agent       string       `json:"agent"` // the version of the agent that tells it
	Hostname    string       `json:"hostname"`
	OS          OS           `json:"os"`
	Timezone    Timezone     `json:"timezone"`
	Users       []User       `json:"users"`        // that are logged in
	FileSystems []FileSystem `json:"file_systems"` // that are mounted
}

// OS is the operating system of a guest, in the words of its os-release(5) and uname(1).
type OS struct {
	ID            string `json:"id"`
	Name          string `json:"name"`
	PrettyName    string `json:"pretty_name"`
	Version       string `json:"version"`
	VersionID     string `json:"version_id"`
	KernelRelease string `json:"kernel_release"`
	KernelVersion string `json:"kernel_version"`
	Machine       string `json:"machine"`
}

// Timezone is where a guest believes to be.
type Timezone struct {
	Name   string `json:"name"`
	Offset int    `json:"offset"` // seconds east of UTC
}

// User is somebody who is logged in.
type User struct {
	Name   string    `json:"name"`
	Domain string    `json:"domain,omitempty"` // of Windows
	Since  time.Time `json:"since,omitzero"`
}

// FileSystem is a file system that a guest has mounted. Sizes are bytes.
type FileSystem struct {
	Device string           `json:"device"` // its name in the guest
	Path   string           `json:"path"`   // where it is mounted
	Type   string           `json:"type"`
	Total  int64            `json:"total"`
	Used   int64            `json:"used"`
	Disks  []FileSystemDisk `json:"disks,omitempty"` // that hold it
}

// FileSystemDisk is a disk with a file system.
type FileSystemDisk struct {
	Serial string `json:"serial"`
	Bus    string `json:"bus"` // virtio, scsi, sata …
}

// Settler is the ability of an Agent to prepare a guest for being saved, for the benefit of guests resumed from that
// state.
type Settler interface {
	// Settle makes the guest finish work that every resumed guest would have to finish otherwise, such as writing to
	// its disks. Programs in the guest notice no change. A state saved without Settle, or after it failed, is also
	// valid.
	Settle(ctx context.Context) error
}

// ClockSetter is the ability of an Agent to set the guest's clock.
type ClockSetter interface {
	// SetClock sets the guest's clock to now. Errors: Unsupported by older agents.
	SetClock(ctx context.Context, now time.Time) error
}

// ClockReader is the ability of an Agent to read the guest's clock. An agent that tells the uptime in Info needs no other.
type ClockReader interface {
	// ReadClock returns the guest's time. Errors: Unsupported if the configuration of the guest forbids it.
	ReadClock(ctx context.Context) (time.Time, error)
}

// Resumer is the ability of an Agent to set up a guest that was resumed from saved state.
type Resumer interface {
	// Resumed tells the guest that time has passed and, for a clone, its new identity. It first thaws file systems that
	// were frozen when the state was saved, reseeds the kernel's random numbers, and sets the clock. Idempotent.
	Resumed(ctx context.Context, r Resumed) (ResumedReply, error)
}

// Resumed is what a resumed guest is told.
type Resumed struct {
	Now     time.Time
	Entropy []byte // from the host's generator; secret

	Clone    *CloneIdentity // nil: the guest keeps its identity
	Hostname string
	NICs     []vm.NIC // with the MACs and addresses that they are to have
	Hosts    []string // lines added to /etc/hosts
	Resolver []string // lines of resolv.conf that name no server

	Storage int64 // bytes of the writable disk, if it is larger than when the state was saved; its file system grows
}

// CloneIdentity holds what must differ between two guests resumed from one state.
type CloneIdentity struct {
	MACs        []string // current MACs of the guest's interfaces, in the order of Resumed.NICs
	MachineID   string   // 32 hex digits
	SSHHostKeys bool     // make new ones, if the guest has any
}

// ResumedReply is what the guest answers.
type ResumedReply struct {
	LogSeq uint64 // of the last entry of its log; in a clone, everything up to it belongs to the source
	// Containers are the log positions of its containers, in their order, likewise. Nil: the agent does not know them.
	Containers []LogPlace
}

// LogPlace is the position of the last entry in a log of several runs; see LogEntry. The zero value means an empty log.
type LogPlace struct {
	Run  int
	Seq  uint64
	Name string // of the container; "" from older agents
}

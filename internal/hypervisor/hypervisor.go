// Package hypervisor is the contract between the engine and the software that runs guests.
//
// A Driver turns a Plan into a detached process and returns an Instance; with a Handle a later process can adopt it again.
// Abilities beyond starting and stopping are optional interfaces, found with As: a driver can do what it implements. The
// package runs nothing itself.
package hypervisor

import (
	"context"
	"io"
	"net"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// Driver starts VMs with one kind of hypervisor. Between calls it keeps no state except the supervision of its instances. It is
// safe for concurrent use by different VMs.
type Driver interface {
	// Name is the driver's fixed name, e.g. "qemu". It is recorded with each VM.
	Name() string

	// Probe reports what this host can run. It changes nothing and may be called at any time. It returns Unavailable if the
	// hypervisor is not installed.
	Probe(ctx context.Context) (Info, error)

	// Launch starts the VM of p. On return the guest's CPUs run, unless p.Paused. The process is detached: it outlives the caller. p.Dir must
	// exist and belong to this VM alone. It must be empty or hold what an earlier run of the same VM left there. On error
	// nothing of this launch is left behind, even if ctx ends in the middle.
	Launch(ctx context.Context, p Plan) (Instance, error)

	// Adopt adopts an instance that an earlier process launched. It returns NotFound if that instance has ended (another
	// process may have its pid by then), and InvalidArgument for a handle of another driver or version.
	Adopt(ctx context.Context, h Handle) (Instance, error)

	// Reap removes whatever a launch of id may have left in dir without a recorded Handle: a process that was started for
	// exactly this VM, its cgroup, its sockets. It never touches anything that it cannot prove to be its own. Preconditions: no
	// Instance of id is in use. It is idempotent.
	Reap(ctx context.Context, id vm.ID, dir string) error
}

// Instance is one running VM. Its methods are safe for concurrent use.
type Instance interface {
	// Handle returns what Adopt needs. It does not change during the life of the instance.
	Handle() Handle

	// PID is the pid of the hypervisor process, 0 if there is none.
	PID() int

	// State asks the hypervisor for the run state. After the end it returns NotFound.
	State(ctx context.Context) (RunState, error)

	// Shutdown asks the guest to power off (ACPI) and returns at once.
	Shutdown(ctx context.Context) error

	// Kill ends the process now, waits until it is gone and removes its runtime resources (cgroup, sockets). It is no error if
	// the instance has already ended.
	Kill(ctx context.Context) error

	// Wait blocks until the process has ended and says how. Any number of callers may wait, also after the end. The kernel
	// reports the end (pidfd), without polling.
	Wait(ctx context.Context) (Exit, error)

	// Close releases the instance without ending it: it closes sockets and stops supervision. The daemon calls it when it
	// stops.
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
	GuestShutdown bool // the guest powered itself off (requested or not)
	GuestReset    bool // the guest reset itself or panicked, which ends a VM of its kind
	Signal        int  // signal that ended the process, 0 if none or unknown (adopted processes are not our children)
	Code          int  // exit code of the process, -1 if unknown

	Cause string // why the driver ended the VM by itself, one sentence; "" if it did not
}

// ExitTeller is the ability of a Driver to report how an instance ended while no process waited for it.
type ExitTeller interface {
	// LastExit says how the instance of h ended, after Adopt has not found it. It returns NotFound if the end was not recorded
	// (the process was killed or crashed) or if the runtime folder is gone.
	LastExit(ctx context.Context, h Handle) (Exit, error)
}

// Checker is the ability of a Driver to refuse a plan before anything is made for it. A driver without it refuses such a plan in Launch.
type Checker interface {
	// Check says why the driver can never start p on this host, in one sentence. p may lack disks and NICs. It changes nothing.
	// Errors: Unsupported, InvalidArgument, FailedPrecondition.
	Check(ctx context.Context, p Plan) error
}

// DiskReader is the ability of a Driver to say which disks its guests can have. The guests of a driver without it have disks of each format.
type DiskReader interface {
	// RawOnly says that every disk must be vm.DiskRaw, without a backing file, and stays the same file while the guest runs: SavePlan has no
	// overlays, and whoever saves a guest copies its writable disks while it stands still (SavePlan.Still).
	RawOnly() bool
}

// FirmwareTeller is the ability of a Driver without BIOS to say so.
type FirmwareTeller interface {
	// Firmware is what boots a disk guest that asks for none.
	Firmware() vm.Firmware
}

// LateLoader is the ability of a Driver to resume a guest while its memory is still being loaded (Incoming.Feed).
type LateLoader interface {
	// LoadsLate says why this host cannot do that, in one sentence; "" if it can.
	LoadsLate() string
}

// LoadsLate reports whether d is a LateLoader that can do it on this host.
func LoadsLate(d Driver) bool {
	l, ok := As[LateLoader](d)
	return ok && l.LoadsLate() == ""
}

// Seeker is the ability of a Driver to find the processes of VMs without a known Handle: those that Reap would end.
type Seeker interface {
	// Seek returns the processes of each VM in ids that has any. It changes nothing.
	Seek(ctx context.Context, ids []vm.ID) (map[vm.ID][]int, error)
}

// Plan is everything that a driver must know to start one VM: pure data, no open files, no defaults left to guess.
type Plan struct {
	ID          vm.ID
	Name        string
	CPUs        int
	Memory      int64        // bytes
	Huge        vm.HugePages // of which the memory consists, of the node; a VM with them cannot be saved
	Accel       vm.Accel
	Boot        vm.Boot
	SMBIOS      *vm.SMBIOS // what the firmware tells the guest; nil: nothing in particular
	Graphics    bool       // the guest has a screen, a keyboard and a mouse, if the driver's instances are Displayers
	Topology    vm.Topology
	Growth      vm.Growth // how far the guest can grow while it runs, if the driver's instances are Resizers
	CPU         vm.CPU
	Clock       vm.Clock
	UEFI        vm.UEFI
	TPM         vm.TPM // a VM with a TPM cannot be saved
	VSOCK       bool   // the guest has a virtio socket; a VM with one cannot be saved. A driver whose instances are no SocketTellers, or a host without such sockets, refuses the plan with Unsupported
	Watchdog    vm.Watchdog
	Panic       vm.Panic
	Disks       []vm.Disk
	DiskRate    vm.DiskRate              // of each of Disks, and of those that are plugged
	Models      []vm.NICModel            // of NICs, in their order; those beyond are virtio
	Devices     map[string]vm.DiskDevice // of Disks with other devices than virtio, by their serials; not of those with a Port
	NICs        []vm.NIC
	BootNICs    int    // places for NICs that the guest had when it booted (vm.Spec.BootNICs); 0: as many as NICs take
	Drive       *Drive // a drive for CD-ROMs on SATA, beside Disks; nil: none
	Agent       string // name of the virtio-serial port that the guest's agent looks for; "" gives the guest none. A driver without such ports gives it a virtio socket, where our own agent listens on vm.AgentPort
	FirmwareDir string // for what the firmware keeps: private to this VM, it survives a reboot of the host. A driver that needs it makes it
	Dir         string // runtime folder of this VM: sockets, pid file, console log
	Shares      []Share
	// CgroupParent is the cgroup of the node in which the VM is: a path below the root of the tree, clean and absolute. It is made if it is
	// missing. "": the driver decides. A driver whose VMs have no cgroups ignores it.
	CgroupParent string

	Incoming *Incoming // nil: the guest boots

	// Paused says that the guest executes no instruction before Pauser.Resume. Not with Incoming. A driver without Pauser refuses the
	// plan with Unsupported.
	Paused bool
}

// KernelArgs come first on every command line of a kernel of ours. Measurements chose them for the quickest reliable boot: no crypto
// self-tests, no SMP-to-UP patching. A panic ends the VM instead of hanging it, and so does an oops: such
// a kernel may continue half broken, and then nothing would start the VM again. No device of ours uses bounce buffers, for which the
// kernel would set 64 MiB aside in a guest that has memory above 4 GiB or can get some.
const KernelArgs = "console=ttyS0 quiet panic=-1 oops=panic no_timer_check noreplace-smp swiotlb=noforce cryptomgr.notests"

// Drive is a drive for CD-ROMs. What is in it is in no saved state: a VM resumes with another one, or an empty drive.
type Drive struct {
	ISO string // path of an image; "": the drive is empty
}

// Share is a folder of the node that the guest can mount by its tag. A VM with shares cannot be saved, except without its only Live one (FolderPlugger).
// A driver that cannot share folders refuses the plan with Unsupported.
type Share struct {
	Tag      string // at most 36 bytes
	Root     string // the folder below which guests may have folders; clean, absolute, without symbolic links
	Path     string // Root, or a folder below it; the same rules
	ReadOnly bool   // the guest cannot write to it, whatever it does
	Create   bool   // make Path if it is missing
	File     string // name of the only file in the folder that the guest sees; Path is that file. "": Path is a folder
	// Live makes Path a folder of Cocoon's own, to which FolderPlugger adds others while the guest runs. It is made if it is missing,
	// Root is not used, and the guest can only read what is in it itself.
	Live bool
	// Below shows the guest also what is mounted below Path when the share begins, if all those file systems can be shared. ReadOnly does not hold
	// there, but ReadOnlyBelow.
	Below, ReadOnlyBelow bool
}

// FolderPlugger is the ability of an Instance to show the guest folders and files of the node in a Share that is Live.
type FolderPlugger interface {
	// PlugFolder shows the guest the folder or file s.Path. The path at, in the folder of a Live share, is where. Tag and Live of s are not used;
	// s.File only says that it is a file. Idempotent.
	// Errors: FailedPrecondition if s.Path cannot be shared, Unsupported if its file system cannot.
	PlugFolder(ctx context.Context, at string, s Share) error
	// UnplugFolder ends that. The guest may lose files that it has open. Idempotent.
	UnplugFolder(ctx context.Context, at string) error
	// UnplugShare takes the Live share with that tag from the guest, which must not have it mounted. The VM can be saved until PlugShare. Idempotent.
	// Errors: Unsupported for a VM that an earlier release has started, Unavailable if the guest does not release the device.
	UnplugShare(ctx context.Context, tag string) error
	// PlugShare gives the guest its Live share again, which finds it a moment later. A VM that resumes from saved state begins without it. Idempotent.
	PlugShare(ctx context.Context, tag string) error
}

// Incoming is saved state from which a VM resumes instead of booting. Its files are only read.
type Incoming struct {
	State  string // path: devices and CPUs, as Save wrote them
	Memory string // path: the guest's memory, as Save wrote it
	Base   string // path: the memory that Memory is a delta to; "" if Memory is complete
	// Summed says that each of these files has a checksum file next to it, which package sparse reads. All loaded data is
	// compared with it. If it differs, the launch fails before the guest runs, with DataLoss that names the file and the byte.
	Summed bool
	// Alone says that no other VM resumes from this memory now, so the guest's writes need no copies. Otherwise the memory is
	// mapped copy-on-write and shared by all VMs that resume from it.
	Alone bool
	// Feed is the path of the socket of a filling.Writer that is still writing Memory; "": Memory is complete. The guest runs before it is. It is then alone, and Base
	// is "". If a part of the memory never comes, the VM ends with Exit.Cause. A driver that is no LateLoader refuses it with Unsupported.
	Feed string
	// Booting says that the guest may have been saved before its firmware had read the whole kernel. It then needs the same
	// Plan.Boot as the saved VM.
	Booting bool
	// LinksDown keeps every NIC without carrier, whatever its own LinkDown, from before the guest's first instruction until Linker.SetLink or LinkOpener.OpenLink.
	LinksDown bool
	// DiskRate is that of the saved guest, in whose state it may be. The plan's is in force.
	DiskRate vm.DiskRate
	// Grown lists the serials of the disks that are larger than when the state was saved. The guest is told about them.
	Grown []string
}

// Info is the result of Probe.
type Info struct {
	Version  string   // of the hypervisor, e.g. "7.2.22"
	Accel    vm.Accel // the accelerator that AccelAuto resolves to: kvm or tcg
	Why      string   // one sentence: the reason for that accelerator
	Isolated bool     // each VM gets its own cgroup
	Notes    []string // what this host lacks, one sentence each
	Firmware []vm.Firmware
}

// ConsoleOpener is the ability to connect to the guest's serial console.
type ConsoleOpener interface {
	// OpenConsole connects to the console. Only one reader at a time: a second caller gets a Conflict error.
	OpenConsole(ctx context.Context) (io.ReadWriteCloser, error)
	// ConsoleLog is the path of the size-limited log of all console output.
	ConsoleLog() string
}

// Displayer is the ability of an Instance to show the screen of its guest. Nobody reaches the screen in another way.
// Errors of both methods: Unsupported for a guest without Plan.Graphics.
type Displayer interface {
	// OpenDisplay connects to screen, keyboard and mouse. The stream is RFB (RFC 6143) without a password. The VM is the server.
	// Any number of streams may be open.
	OpenDisplay(ctx context.Context) (net.Conn, error)
	// Screenshot returns what the screen shows, as a PNG. With wake the mouse moves before, so that the guest switches its screen on.
	Screenshot(ctx context.Context, wake bool) ([]byte, error)
}

// GuestDialer is the ability to reach the agent in the guest, at the port that the plan names. The stream is raw; package guest
// defines its protocol.
type GuestDialer interface {
	DialGuest(ctx context.Context) (net.Conn, error)
}

// Pauser is the ability to stop and resume the guest's CPUs. The hypervisor keeps a paused guest over a restart of the daemon: State
// of the adopted instance is Paused. A paused guest keeps a request to power off until it resumes. Resume also ends the rest of a
// Save whose caller was killed. Pausing a paused guest is no error, and neither is resuming a running one.
type Pauser interface {
	Pause(ctx context.Context) error
	Resume(ctx context.Context) error
}

// Resetter is the ability of an Instance to start its guest again in the same process. It exists for guests that boot by firmware:
// one that boots a kernel of ours (Boot.Direct) ends when it resets.
type Resetter interface {
	// Reset resets the guest, as a reset button does: what it has not written to its disks is lost.
	// Errors: Unsupported for a guest that ends when it resets.
	Reset(ctx context.Context) error
	// ResetOnPoweroff makes the guest start again when it powers itself off before the given time, whoever asked it to. With the zero
	// time it ends then, as usual. The daemon's end forgets it.
	// Errors: as for Reset.
	ResetOnPoweroff(ctx context.Context, until time.Time) error
}

// SocketTeller is the ability of an Instance to tell where the virtio socket of its guest is (Plan.VSOCK).
type SocketTeller interface {
	// CID is the context id by which programs of the host reach the socket. No other instance has it, and it does not change during the life of the
	// instance. 0: the guest has no socket.
	CID() uint32
}

// DiskWatcher is the ability of an Instance to report that a disk of its guest could not be read or written.
type DiskWatcher interface {
	// DiskFault returns the last fault that still holds, or nil, and a channel that is closed when that may have changed. It
	// blocks until the answer is known. After the end it returns NotFound.
	DiskFault(ctx context.Context) (fault *DiskFault, changed <-chan struct{}, err error)
}

// DiskFault says what happened to a disk request of a guest.
type DiskFault struct {
	// Stands says that the guest was paused and its request kept: State is Paused, nothing is lost, and Pauser.Resume makes the
	// guest retry. Otherwise the guest got the error, as from any disk, and keeps running.
	Stands bool
	Full   bool   // there was no space for the write
	Cause  string // the error of the operating system; "" if no longer known
}

// Snapshotter is the ability of an Instance to save the whole state of its guest: memory, devices and disks at one instant.
type Snapshotter interface {
	// Save writes the state. When it returns nil, every byte is in the files (not yet synced). On error the guest keeps
	// running, on either its old or its new disks; neither has lost anything. Save is not concurrent for one VM. It returns
	// FailedPrecondition for a guest that an earlier save holds: Pauser.Resume releases it.
	Save(ctx context.Context, p SavePlan) (Saved, error)
}

// MemoryDumper is the ability of an Instance to write the memory of its guest for somebody who examines it. No guest goes on from a dump.
type MemoryDumper interface {
	// DumpMemory writes the guest's memory and the registers of its CPUs to w, as a core file (ELF, with an address of physical memory for each
	// part). The guest stands still meanwhile; then it is as before, also after an error, and if the caller is killed. Not during a save.
	// Errors: those of w, Unavailable.
	DumpMemory(ctx context.Context, w io.Writer) error
}

// SavePlan says where Save writes a state.
type SavePlan struct {
	State  string // path of a file that Save creates: devices and CPUs, in the driver's own format
	Memory string // path of a file that Save creates: the guest's memory, sparse, as large as that memory
	// Base is the path of an earlier complete memory that the guest's memory may resemble. Save may then write Memory as a
	// delta to it, in the format of package sparse. "" if there is none.
	Base string
	// Overlays become the guest's writable disks at the instant of the save. From then on nothing writes to their backing
	// files. Retry is allowed if an overlay is already attached by an earlier attempt and the guest has stayed paused. If the
	// guest runs, Save returns FailedPrecondition: the instant is over, and a new overlay on top of that one is needed.
	Overlays []DiskOverlay
	// Hold leaves the guest paused from that instant on, for a caller that will end it. Pauser.Resume makes it continue.
	Hold bool
	// Still, if not nil, is called once at that instant. The guest is paused, and its writes are in the files of its disks. An error of
	// Still fails the save.
	Still func(context.Context) error
	// Taken, if not nil, is called once when that instant is over and the guest runs again (with Hold it stays paused).
	Taken func()
}

// DiskPlugger is the ability of an Instance to add disks to its guest and remove them while the guest runs. The caller records
// the disk before it is plugged, so that a guest that is saved later resumes with the disk at the same place.
type DiskPlugger interface {
	// PlugDisk adds d at the place d.Port, which is not 0. When it returns, the guest has been told, but it may need a moment to
	// find the disk. It is no error if the disk is there already.
	// Errors: InvalidArgument, Conflict if another disk has the place or the serial, ResourceExhausted if the VM has no place for
	// such disks, Unavailable.
	PlugDisk(ctx context.Context, d vm.Disk) error
	// UnplugDisk removes the disk with that serial, which PlugDisk added, or which was launched with a Port. The guest must not
	// use it any more. It waits until the guest has released what the disk needed. It is no error if the disk is gone already.
	// Errors: InvalidArgument for a disk without Port, Unavailable when the guest does not release it before ctx ends; the disk
	// may be gone then.
	UnplugDisk(ctx context.Context, serial string) error
}

// NICPlugger is the ability of an Instance to add NICs to its guest and remove them while the guest runs. The caller records the NIC before
// it is plugged, and Plan.BootNICs, so that a guest that is saved later resumes with the NIC at the same place.
type NICPlugger interface {
	// PlugNIC adds a virtio NIC, whose tap exists, at the place n.Place, which is not 0. When it returns, the guest has been told, but it
	// may need a moment to find the NIC. It is no error if the NIC is there already.
	// Errors: InvalidArgument, Conflict if another NIC has the place, ResourceExhausted if the VM has no room for one there, Unavailable.
	PlugNIC(ctx context.Context, n vm.NIC) error
	// UnplugNIC removes the NIC at that place, which is not 0, whenever it was added, and frees its tap. It waits until the guest has
	// released it. It is no error if the NIC is gone already.
	// Errors: InvalidArgument, Unavailable when the guest does not release it before ctx ends; the NIC may be gone then.
	UnplugNIC(ctx context.Context, place int) error
}

// DiskGrower is the ability of an Instance to tell its guest that a disk has grown.
type DiskGrower interface {
	// GrowDisk tells the guest that the raw disk with that serial has size bytes now. The caller has grown its file to that size, and
	// nothing else changes it meanwhile. When it returns, the guest has been told, but it may need a moment to see the size. It is no
	// error if the guest knows it already.
	// Errors: InvalidArgument if there is no such disk, it is read-only, or it is larger; Unavailable.
	GrowDisk(ctx context.Context, serial string, size int64) error
}

// DiskFlattener is the ability of an Instance to shorten a disk's chain of backing files while the guest runs: each save adds a
// layer, and the number of layers that a VM can start from is limited.
type DiskFlattener interface {
	// FlattenDisk copies all layers between base and the top of the disk with that serial into the top. The top then has base,
	// one of the disk's layers, as its backing file; with nil it has none. The layers do not change. The old chain stays valid
	// before, during and after the call, so it may stay recorded until this returns nil. Not during a save of the VM.
	FlattenDisk(ctx context.Context, serial string, base *vm.Disk) error
}

// Resizer is the ability of an Instance to give its guest more CPUs and memory while it runs, up to Plan.Growth. Nothing is taken away. A
// guest that is saved later resumes with a plan that has its present size.
type Resizer interface {
	// Grow gives the guest what it lacks of size. The limits of the process grow first. When it returns, the guest has been told of its
	// CPUs, and it has taken the memory. It is no error if the guest has all that already. After an error the guest may have a part of
	// it, which Size tells.
	// Errors: InvalidArgument beyond Plan.Growth, FailedPrecondition if the guest does not take the memory before ctx ends, Unavailable.
	Grow(ctx context.Context, size vm.Size) error
	// Size returns what the guest has been given.
	Size(ctx context.Context) (vm.Size, error)
}

// DiskOverlay is a new top for one writable disk.
type DiskOverlay struct {
	Serial string  // of the disk
	Disk   vm.Disk // an empty qcow2 whose backing file is the disk's present top
}

// Saved describes a finished save.
type Saved struct {
	Pause   time.Duration // how long the guest was stopped; with Hold until Save returned
	Method  string        // how memory was taken, the driver's term: precopy or stopped
	Memory  int64         // bytes of memory that are not zero
	Delta   bool          // SavePlan.Memory contains only what differs from SavePlan.Base
	Machine vm.Machine    // the machine that can resume it
}

// MachineTeller is the ability of a Driver to say on which kind of machine it would run a VM now. Every driver that resumes
// saved state has it.
type MachineTeller interface {
	// Machine need not find out whether the hypervisor works here: Probe does.
	Machine(ctx context.Context, accel vm.Accel) (vm.Machine, error)
}

// Linker is the ability of an Instance to set a NIC's carrier up or down.
type Linker interface {
	// SetLink sets the carrier of the NIC at that place. While it is down, no packet passes in either direction. It is no error if it is so already.
	// A guest that is launched or plugged has the carriers that its NICs say (vm.NIC.LinkDown), from its first instruction on.
	// Errors: NotFound, Unavailable.
	SetLink(ctx context.Context, place int, up bool) error
}

// LinkOpener is the ability of an Instance that is no Linker to end Incoming.LinksDown, for one NIC after another.
type LinkOpener interface {
	// OpenLink lets packets pass the NIC at that place. It is no error if they do already.
	// Errors: NotFound, Unavailable.
	OpenLink(ctx context.Context, place int) error
}

// OpensLinks returns what ends Incoming.LinksDown of i, as LinkOpener does; nil if nothing can.
func OpensLinks(i Instance) func(ctx context.Context, place int) error {
	if l, ok := As[Linker](i); ok {
		return func(ctx context.Context, place int) error { return l.SetLink(ctx, place, true) }
	}
	if o, ok := As[LinkOpener](i); ok {
		return o.OpenLink
	}
	return nil
}

// NICSwapper is the ability of an Instance to replace a NIC by one with another MAC while the guest runs, for guests that
// cannot be told to change theirs. The new NIC has the tap of the old one, and no carrier until SetLink.
type NICSwapper interface {
	SwapNIC(ctx context.Context, place int, mac string) error
}

// Wrapper is implemented by decorators of Instance or Driver, so that As can look through them.
type Wrapper interface{ Unwrap() any }

// As finds ability T in v or in what v wraps.
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

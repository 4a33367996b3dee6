// Package vm is the vocabulary of Cocoon: what a VM is, as plain values that every other package may share.
//
// It does no I/O and starts nothing. The engine owns the records; drivers and doors only pass them on.
package vm

import (
	"fmt"
	"time"
)

// ID names one VM forever: 26 characters of lower-case base32 (see NewID). IDs are never reused.
type ID string

// State is the state of a VM. The strings are public API (JSON of `cocoon vm inspect`).
type State string

// The states of a VM.
const (
	StateCreating State = "creating" // its resources are being prepared
	StateCreated  State = "created"  // ready to start, never ran
	StateRunning  State = "running"  // its hypervisor process runs
	StateStopped  State = "stopped"  // it ended: guest shut down, process exited, or it was stopped
	// StateHibernated is a VM that uses only disk: its memory and devices are in the snapshot Record.Snapshot. Its name,
	// MAC and IP are kept.
	StateHibernated State = "hibernated"
	StateError      State = "error" // it could not be created or was lost; Record.Message says why
)

// Accel chooses how guest instructions run.
type Accel string

// The accelerators. Auto means KVM when /dev/kvm opens and the CPU flags show vmx or svm, else TCG.
const (
	AccelAuto Accel = "auto"
	AccelKVM  Accel = "kvm"
	AccelTCG  Accel = "tcg"
)

// Firmware boots a disk guest. OCI guests have none: their kernel is loaded directly.
type Firmware string

// The firmwares.
const (
	FirmwareBIOS Firmware = "bios"
	FirmwareUEFI Firmware = "uefi"
)

// Spec is what the user asked for. Once the VM exists, only its size, the resources of its containers, its volumes of kind VolumeDisk, its
// further interfaces and the links of all change.
type Spec struct {
	Name    string            `json:"name"`
	Labels  map[string]string `json:"labels,omitempty"`  // opaque to the engine; doors keep their own keys here
	Offered []string          `json:"offered,omitempty"` // namespaces that may take over this VM of the operator
	Image   string            `json:"image"`             // name, name:tag or digest, as given; or FromVolume; "" for a sandbox
	// Sandbox makes an OCI guest that boots without an image, a process or containers. It runs until it is stopped. Containers are
	// added to it while it runs, then started, stopped and removed one by one.
	Sandbox bool `json:"sandbox,omitempty"`
	// CgroupParent is the cgroup of the node in which the VM is, such as that of its pod. Only a sandbox has one, and no request of the node API.
	CgroupParent string `json:"cgroup_parent,omitempty"`

	CPUs      int           `json:"cpus"`
	Memory    int64         `json:"memory"`  // bytes
	Storage   int64         `json:"storage"` // bytes of the private writable disk
	DiskRate  DiskRate      `json:"disk_rate,omitzero"`
	Driver    string        `json:"driver,omitempty"`
	Accel     Accel         `json:"accel,omitempty"`
	Firmware  Firmware      `json:"firmware,omitempty"` // disk guests only
	SMBIOS    *SMBIOS       `json:"smbios,omitempty"`
	Graphics  bool          `json:"graphics,omitempty"` // disk guests only: a screen, a keyboard and a mouse
	Hardware  *Hardware     `json:"hardware,omitempty"` // disk guests only; nil: the usual machine
	Hostname  string        `json:"hostname,omitempty"`
	Process   Process       `json:"process"` // OCI guests only: overrides of the image's own configuration
	NICs      []NICSpec     `json:"nics,omitempty"`
	BootNICs  int           `json:"boot_nics,omitempty"`  // Width when the guest booted, once its interfaces have changed; 0: they have not. The VM sets it
	Paused    bool          `json:"paused,omitempty"`     // each boot by Cocoon begins paused, before the guest's first instruction
	StopGrace time.Duration `json:"stop_grace,omitempty"` // nanoseconds between asking the guest to stop and killing it
	CloudInit *CloudInit    `json:"cloud_init,omitempty"` // disk guests only; nil: only the generated documents
	Volumes   []Volume      `json:"volumes,omitempty"`    // a disk guest takes only files, written by its cloud-init
	Mounts    []Mount       `json:"mounts,omitempty"`     // of Volumes, in order

	// OCI guests only: these run instead of Process and start in this order. Image is then the base image of the guest
	// itself; its default is the image of the first app.
	Containers []Container   `json:"containers,omitempty"`
	Restart    RestartPolicy `json:"restart,omitempty"` // of Containers without a policy of their own, inside the running guest; default always

	// OCI guests only.
	Sysctls []Sysctl    `json:"sysctls,omitempty"` // set in the guest before anything starts
	Domain  string      `json:"domain,omitempty"`  // of Hostname; the guest knows itself with and without it
	Hosts   []HostEntry `json:"hosts,omitempty"`   // in its /etc/hosts
	DNS     *DNS        `json:"dns,omitempty"`     // nil: as its networks say
}

// CloudInit is what a disk guest's cloud-init gets beyond host name, instance id and addresses, which are generated.
type CloudInit struct {
	Datasource    string   `json:"datasource,omitempty"`     // nocloud (default) or configdrive
	MetaData      string   `json:"meta_data,omitempty"`      // YAML or JSON map; its keys replace the generated ones
	UserData      string   `json:"user_data,omitempty"`      // a whole document: #cloud-config, script, …
	VendorData    string   `json:"vendor_data,omitempty"`    // a whole document, too
	NetworkConfig string   `json:"network_config,omitempty"` // a whole document; "" is generated, "dhcp" omits it
	SSHKeys       []string `json:"ssh_keys,omitempty"`       // lines of authorized_keys for the image's default user, and for User
	User          string   `json:"user,omitempty"`           // may log in and become root; "": the image's default user alone
	PasswordHash  string   `json:"password_hash,omitempty"`  // of User, or of root: SHA-512 crypt; never the password itself
}

// OnlyLogin reports whether c asks for nothing but a user that may log in.
func (c *CloudInit) OnlyLogin() bool {
	return c != nil && (c.User != "" || c.PasswordHash != "") && len(c.SSHKeys) == 0 &&
		c.Datasource == "" && c.MetaData == "" && c.UserData == "" && c.VendorData == "" && c.NetworkConfig == ""
}

// VolumeKind says what a volume holds.
type VolumeKind string

// The kinds of volumes.
const (
	VolumeFiles VolumeKind = "files" // given files, replaced as a whole (ConfigMap, Secret, downward API, projected)
	VolumeEmpty VolumeKind = "empty" // starts empty and lives as long as the VM
	VolumeImage VolumeKind = "image" // the files of a container image, read-only; no program in it can be executed
	VolumeDisk  VolumeKind = "disk"  // a disk of the volume store, which outlives the VM
	VolumeDir   VolumeKind = "dir"   // a folder of the node
	VolumeNFS   VolumeKind = "nfs"   // a folder of an NFS server, which the guest mounts

	// VolumeHostDisk is a file of the node that is a disk of a guest which boots itself, or a block device of one container of a sandbox.
	VolumeHostDisk VolumeKind = "hostdisk"
)

// Volume is a folder that is mounted in an OCI guest, or a disk.
type Volume struct {
	Name      string       `json:"name"` // unique in the VM
	Kind      VolumeKind   `json:"kind"`
	Memory    bool         `json:"memory,omitempty"`     // VolumeEmpty: in the guest's memory instead of on its disk
	SizeLimit int64        `json:"size_limit,omitempty"` // bytes; VolumeEmpty only. 0: none, but that of the memory or the disk
	Group     *int64       `json:"group,omitempty"`      // group id that may use it (fsGroup)
	Files     []VolumeFile `json:"-"`                    // initial content; may be secret, so no record holds it
	Label     string       `json:"label,omitempty"`      // VolumeFiles of a disk guest: the files are a read-only disk with this label, and are not mounted
	Image     string       `json:"image,omitempty"`      // VolumeImage: name, name:tag or digest, as given
	Disk      *VolumeUse   `json:"disk,omitempty"`       // VolumeDisk
	Dir       *HostDir     `json:"dir,omitempty"`        // VolumeDir
	NFS       *NFS         `json:"nfs,omitempty"`        // VolumeNFS
	HostDisk  *HostDisk    `json:"host_disk,omitempty"`  // VolumeHostDisk
}

// HostDir names a folder of the node. The node's operator lists those that VMs may have.
type HostDir struct {
	Path     string `json:"path"`             // absolute, clean, without symbolic links
	ReadOnly bool   `json:"ro,omitempty"`     // the VM cannot write to it
	Create   bool   `json:"create,omitempty"` // it is made if it is missing
	// GroupOnMismatch gives the files to Volume.Group only if the folder is not that group's (fsGroupChangePolicy).
	GroupOnMismatch bool `json:"group_on_mismatch,omitempty"`
	// Published says that it is the folder of a volume that a CSI driver has published for the owner of the VM (package csinode).
	Published bool `json:"published,omitempty"`
	// Trusted says that the node's own kubelet has asked for it, so the list of the operator does not apply, and Path may have symbolic
	// links. Only containers of a sandbox have such volumes, and no request of the node API.
	Trusted bool `json:"trusted,omitempty"`
	// Below shows also what is mounted below Path when the container is added. ReadOnly does not hold there, but ReadOnlyBelow. Only for
	// Trusted folders.
	Below         bool `json:"below,omitempty"`
	ReadOnlyBelow bool `json:"ro_below,omitempty"`
	// File says that Path is a regular file. The volume is a folder that has nothing but this file, called DirFile.
	File bool `json:"file,omitempty"`
}

// DirFile is the name of a file of the node in its volume. Each mount of such a volume has it as SubPath.
const DirFile = "file"

// VolumeUse says how a VM uses a volume of the volume store.
type VolumeUse struct {
	Ref      string `json:"ref"`               // name or id, as given
	ReadOnly bool   `json:"ro,omitempty"`      // the VM cannot write to it; others may read it meanwhile
	Shared   bool   `json:"shared,omitempty"`  // several VMs may write to it at the same time; each of them has to set this
	FSType   string `json:"fs_type,omitempty"` // what an OCI guest makes on an empty disk when it mounts it: ext4 or xfs; "" is ext4
	// GroupOnMismatch gives the files to Volume.Group only if the root of the file system is not that group's (fsGroupChangePolicy).
	GroupOnMismatch bool `json:"group_on_mismatch,omitempty"`
}

// VolumeFile is one file of a volume.
type VolumeFile struct {
	Path string `json:"path"` // relative, no ".."
	Data []byte `json:"data"`
	Mode uint32 `json:"mode"` // permission bits
	UID  *int64 `json:"uid,omitempty"`
}

// ImageVolume is what is known about one volume of kind VolumeImage.
type ImageVolume struct {
	Volume        string   `json:"volume"`
	ImageDigest   string   `json:"image_digest"`
	ImageManifest string   `json:"image_manifest,omitempty"` // as in ContainerRecord
	Layers        []string `json:"layers,omitempty"`         // serials of the disks that hold it, the lowest layer first
}

// Clone returns a copy of v that shares no memory with it.
func (v ImageVolume) Clone() ImageVolume {
	v.Layers = cloneSlice(v.Layers)
	return v
}

// AttachedVolume is what is known about one volume of kind VolumeDisk.
type AttachedVolume struct {
	Volume string `json:"volume"`
	ID     ID     `json:"id"`             // in the volume store
	Serial string `json:"serial"`         // of its disk
	Size   int64  `json:"size,omitempty"` // bytes that the guest knows of, or will know of when it boots; 0: not known
}

// DiskVolumes returns the volumes of s that are disks of the volume store.
func (s Spec) DiskVolumes() (out []Volume) {
	for _, v := range s.Volumes {
		if v.Kind == VolumeDisk {
			out = append(out, v)
		}
	}
	return out
}

// Dirs returns the volumes of s that are folders of the node.
func (s Spec) Dirs() (out []Volume) {
	for _, v := range s.Volumes {
		if v.Kind == VolumeDir {
			out = append(out, v)
		}
	}
	return out
}

// DirTag is the tag by which a guest finds the i-th of its Dirs. The colon makes cloud-init take it for the name of a remote folder:
// it ignores mounts of devices that are not below /dev (sanitize_devname in cc_mounts.py).
func DirTag(i int) string { return fmt.Sprintf("cocoon:d%03d", i) }

// ImageVolumes returns the volumes of s that hold the files of images.
func (s Spec) ImageVolumes() (out []Volume) {
	for _, v := range s.Volumes {
		if v.Kind == VolumeImage {
			out = append(out, v)
		}
	}
	return out
}

// Mount puts a volume, or a part of it, at a path in the guest.
type Mount struct {
	Volume   string `json:"volume"`
	Path     string `json:"path"` // absolute
	SubPath  string `json:"sub_path,omitempty"`
	ReadOnly bool   `json:"ro,omitempty"`
	Device   bool   `json:"device,omitempty"` // VolumeDisk: the disk itself, as a device file; its file system is not mounted
}

// Process is the main process of an OCI guest, in the terms of the OCI image configuration. Nil Entrypoint and Args keep
// the image's; setting Entrypoint drops the image's Cmd, as in Kubernetes and Docker.
type Process struct {
	Entrypoint []string `json:"entrypoint,omitempty"`
	Args       []string `json:"args,omitempty"`
	Env        []EnvVar `json:"env,omitempty"` // added to the image's; same names are replaced
	WorkDir    string   `json:"workdir,omitempty"`
	User       string   `json:"user,omitempty"` // name, uid, user:group, uid:gid or, for the image's user in that group, :group
	TTY        bool     `json:"tty,omitempty"`
	Stdin      bool     `json:"stdin,omitempty"`      // it has a standard input, and attached clients write to it
	StdinOnce  bool     `json:"stdin_once,omitempty"` // the input closes after its first writer, unless it is a terminal

	ReadOnlyRoot bool `json:"read_only_root,omitempty"` // it, and processes run beside it, can write only to mounts

	// Security is nil for a process with all rights of the guest's root. Records of earlier releases have no other.
	Security   *Security `json:"security,omitempty"`
	StopSignal string    `json:"stop_signal,omitempty"` // name or number of the signal that asks it to end; "" is SIGTERM

	FileKeys []FileKey `json:"file_keys,omitempty"` // of a container: variables that the guest reads from files, in order
}

// EnvVar is one environment variable. Values may be secret: they are never logged.
type EnvVar struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// DiskFormat is the layout of a disk's file.
type DiskFormat string

// The disk formats a hypervisor opens.
const (
	DiskRaw   DiskFormat = "raw"
	DiskQCOW2 DiskFormat = "qcow2"
)

// DiskRole is the purpose of a disk. The strings are public API (storage_configs[].role).
type DiskRole string

// The roles of disks.
const (
	RoleLayer DiskRole = "layer" // read-only, shared between VMs
	RoleCOW   DiskRole = "cow"   // the VM's private writable layer
	RoleCidat DiskRole = "cidata"
	RoleData  DiskRole = "data"
	// RoleVolume is a disk of the volume store. Saves leave it alone: it has no overlay.
	RoleVolume DiskRole = "volume"
	RoleHost   DiskRole = "host" // a file of the node; a VM with one cannot be saved
)

// Disk is one block device of a VM, in the order the guest sees them.
type Disk struct {
	Path     string     `json:"path"`
	Device   bool       `json:"device,omitempty"` // Path is that of a block device, not of a file
	Format   DiskFormat `json:"format"`
	ReadOnly bool       `json:"ro"`
	Serial   string     `json:"serial"` // ≤ 20 bytes; the guest finds the disk by it
	Role     DiskRole   `json:"role"`
	Backing  *Disk      `json:"backing,omitempty"` // backing file of a qcow2 overlay
	// Root is the folder below which Path has no symbolic links. "": Path is the node's own.
	Root   string `json:"root,omitempty"`
	Shared bool   `json:"shared,omitempty"` // other VMs may have it at the same time
	// Port is the place of a disk that was plugged while the guest ran, counted from 1, at most MaxPort. Saved state refers to it.
	// 0: the disk was there when the guest booted.
	Port int `json:"port,omitempty"`
}

// MaxPort is the highest Port of a disk.
const MaxPort = 255

// Boot says how a VM starts: a kernel of ours loaded directly, or, when Firmware is set or Kernel is empty, a firmware that boots Kernel, or else
// the first disk.
type Boot struct {
	Kernel   string   `json:"kernel,omitempty"`
	Initrd   string   `json:"initrd,omitempty"`
	Cmdline  string   `json:"cmdline,omitempty"` // appended to the driver's own arguments, if Direct; else it is all
	Firmware Firmware `json:"firmware,omitempty"`
}

// Direct reports whether the guest boots a kernel of ours, without a firmware that could boot something else.
func (b Boot) Direct() bool { return b.Kernel != "" && b.Firmware == "" }

// AgentPort is the port of the virtio socket on which the agent in a guest listens if its machine has no virtio-serial port.
const AgentPort = 5252

// ArgOff is the argument of the kernel of a guest whose machine cannot power itself off: the agent has it reset by the keyboard controller instead, which ends it.
// Such a machine's power button is Ctrl+Alt+Del.
const ArgOff = "cocoon.off=kbd"

// ArgDisks begins the argument of the kernel of a guest whose virtio disks have no serials: the serials, in the order of the disks, with commas between them.
const ArgDisks = "cocoon.disks="

// ImageType separates OCI guests (our kernel and agent, the image's files) from disk guests (the image boots itself).
type ImageType string

// The image types. The strings are public API.
const (
	ImageOCI  ImageType = "oci"
	ImageDisk ImageType = "cloudimg"
)

// Record is everything known of one VM: what was asked, what exists, what happened. The engine writes it, the journal keeps it.
type Record struct {
	ID          ID        `json:"id"`
	Owner       Owner     `json:"owner,omitzero"` // set once: on whose behalf the VM was made
	Spec        Spec      `json:"spec"`
	State       State     `json:"state"`
	Driver      string    `json:"driver"` // name of the hypervisor driver that runs it
	ImageType   ImageType `json:"image_type"`
	ImageDigest string    `json:"image_digest"`
	Boot        Boot      `json:"boot"`
	Process     Process   `json:"process"` // resolved: image configuration and spec merged
	Disks       []Disk    `json:"disks,omitempty"`
	NICs        []NIC     `json:"nics,omitempty"`

	// Moving are the places of interfaces that its running guest is getting or giving back. Nobody expects them in the guest.
	Moving []int `json:"moving,omitempty"`

	Containers []ContainerRecord `json:"containers,omitempty"` // those of Spec.Containers; Process is empty then
	Ephemeral  []Ephemeral       `json:"ephemeral,omitempty"`  // added while it ran, the oldest first; also those that have ended

	// BootContainer names the container of Ephemeral whose image the guest of a sandbox boots instead of our kernel; "": none. It stays when that
	// container is removed.
	BootContainer string `json:"boot_container,omitempty"`

	ImageVolumes []ImageVolume    `json:"image_volumes,omitempty"` // those of Spec.Volumes, in their order
	Attached     []AttachedVolume `json:"attached,omitempty"`      // those of Spec.Volumes that are disks, in their order

	Handle []byte `json:"handle,omitempty"` // the driver's versioned handle of the running process, opaque here
	PID    int    `json:"pid,omitempty"`
	CID    uint32 `json:"cid,omitempty"`    // context id of the guest's virtio socket while it runs; 0: it has none
	Paused Paused `json:"paused,omitempty"` // why the guest of a running VM does not run; "": nobody has paused it
	Frozen bool   `json:"frozen,omitempty"` // somebody has asked to freeze the file systems of the running guest, and nobody has thawed them yet

	KernelSums KernelSums `json:"kernel_sums,omitzero"` // of the files that Spec.Kernel names

	Snapshot    string   `json:"snapshot,omitempty"`     // id of the snapshot it was cloned from or, while hibernated, of the one that holds it
	SnapshotIDs []string `json:"snapshot_ids,omitempty"` // of the snapshots taken of it, the oldest first
	Resume      *Resume  `json:"resume,omitempty"`       // what the agent must still do after a resume from saved state; nil: nothing
	Cloned      bool     `json:"cloned,omitempty"`       // its process was resumed from another VM's state, not booted

	AgentReady bool   `json:"agent_ready"`         // the guest agent answered and the guest is set up
	ExitCode   *int   `json:"exit_code,omitempty"` // of the main process, once stopped; nil when unknown
	Reason     string `json:"reason,omitempty"`    // one CamelCase word for the last transition
	Message    string `json:"message,omitempty"`   // one sentence for a person

	FirstBooted bool      `json:"first_booted"`
	CreatedAt   time.Time `json:"created_at"`
	UpdatedAt   time.Time `json:"updated_at"`
	StartedAt   time.Time `json:"started_at,omitzero"` // last start of the hypervisor process
	StoppedAt   time.Time `json:"stopped_at,omitzero"` // last stop
	Restarts    int       `json:"restarts"`            // starts after the first

	Revision int64 `json:"revision"` // of the journal, grows with every change of any record
}

// Resume is the work that the agent must do before a guest that was resumed from saved state is ready. Until it is done,
// the VM is not ready. If the state is another VM's, the links are down until then.
type Resume struct {
	Clone       bool     `json:"clone"`                   // the state is another VM's: name, addresses, machine-id and all
	MACs        []string `json:"macs,omitempty"`          // that the guest's interfaces have, in the order of Record.NICs
	MachineID   string   `json:"machine_id,omitempty"`    // new machine-id of the clone, 32 hex digits
	SSHHostKeys bool     `json:"ssh_host_keys,omitempty"` // the clone generates new host keys
	Fresh       bool     `json:"fresh,omitempty"`         // the state was saved before the guest was set up after its boot
	Storage     int64    `json:"storage,omitempty"`       // bytes of the writable disk, if it has grown since the state was saved
	Volumes     []string `json:"volumes,omitempty"`       // those of Record.Attached that have grown since the state was saved, by name
}

// KernelSums are checksums of the kernel and the initrd that a guest boots: CRC-32 with the polynomial of IEEE. 0: not known, or there is no such file.
type KernelSums struct {
	Kernel uint32 `json:"kernel,omitempty"`
	Initrd uint32 `json:"initrd,omitempty"`
}

// OfDisk reports whether the reason of a running VM is a fault of its disks.
func OfDisk(reason string) bool { return reason == ReasonDiskFull || reason == ReasonDiskError }

// Passing reports whether the reason of a running VM is a fault that may pass while it runs.
func Passing(reason string) bool {
	return OfDisk(reason) || reason == ReasonClockWrong || reason == ReasonFailedMount || reason == ReasonNoDrivers
}

// Itself reports whether r's guest uses its own interfaces. False means that the guest still uses those of the VM whose
// state it resumed from, so an answer from its address does not come from this VM.
func (r Record) Itself() bool {
	if r.Resume == nil || !r.Resume.Clone {
		return true
	}
	for i, n := range r.NICs {
		if i >= len(r.Resume.MACs) || r.Resume.MACs[i] != n.MAC {
			return false
		}
	}
	return true
}

// Paused says who has paused the guest of a running VM. It stays paused until it is told to continue. The strings are public API.
type Paused string

// The values of Paused. A guest that waits for its disk, or that is being saved, is not paused in this sense.
const (
	PausedAtStart   Paused = "start"   // by Spec.Paused: it has not executed an instruction
	PausedOnRequest Paused = "request" // while it ran
)

// Reasons of the last transition, for Record.Reason.
const (
	ReasonExited       = "Exited"       // the main process ended by itself; ExitCode is set
	ReasonStopped      = "Stopped"      // stopped on request
	ReasonKilled       = "Killed"       // did not stop within its grace and was killed
	ReasonPoweredOff   = "PoweredOff"   // the guest powered itself off
	ReasonCrashed      = "Crashed"      // the hypervisor process died
	ReasonCreateFailed = "CreateFailed" // its creation failed
	ReasonStartFailed  = "StartFailed"
	ReasonHibernated   = "Hibernated"
	ReasonWakeFailed   = "WakeFailed"
	ReasonLost         = "Lost"     // it ended while the daemon was away: how is unknown
	ReasonDataLoss     = "DataLoss" // its saved state is damaged; it is still hibernated

	// Reasons of a VM that runs, or whose process runs:
	ReasonDiskFull  = "DiskFull"  // its guest is paused until the host's disk has room for its writes
	ReasonDiskError = "DiskError" // the host's disk failed to read or write for its guest

	ReasonFailedMount = "FailedMount" // its guest waits for a volume, and tries to mount it again and again

	ReasonNoDrivers = "DriversMissing" // its guest is Windows, and the file of the CD-ROM with drivers was missing when it started

	ReasonClockWrong = "ClockWrong" // its guest's clock runs too fast or too slow, and is set from time to time
)

// EventType says what happened to a record. The strings are public API.
type EventType string

// The event types.
const (
	EventAdded    EventType = "ADDED"
	EventModified EventType = "MODIFIED"
	EventDeleted  EventType = "DELETED"
)

// Event is one change of one record, with the record after the change (for DELETED: before it).
type Event struct {
	Type     EventType `json:"event"`
	Revision int64     `json:"revision"`
	Record   Record    `json:"vm"`
}

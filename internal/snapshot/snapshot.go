// Package snapshot is the contract of the snapshot store: whole guests at one instant, memory, devices and disks, from
// which any number of VMs go on.
//
// A snapshot is a folder of plain files. Implementations own their folders and carry them elsewhere and back; they start
// no VM and decide nothing about one.
package snapshot

import (
	"context"
	"io"
	"time"

	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// Names of the files of a snapshot. Disk files are named by Disk.Files.
const (
	FileMeta   = "snapshot.json" // Snapshot as JSON; written last: a folder without it is no snapshot
	FileState  = "vmstate"       // devices and CPUs, the driver's own format; absent in a snapshot of disks alone
	FileMemory = "memory-ranges" // the guest's memory, sparse; or, of a snapshot with a MemoryBase, what differs from FileBase
	FileBase   = "memory-base"   // the whole memory of an earlier snapshot
)

// Beside each file but FileMeta are its checksums, as package sparse names and reads them, when Snapshot.Summed says so.
// They do not travel: each store makes its own.

// Snapshot is what is known of one snapshot. The JSON is public API (`cocoon snapshot inspect`).
type Snapshot struct {
	ID          string `json:"id"`   // 26 characters, as a VM's
	Name        string `json:"name"` // unique among its owner's: letters, digits, ".", "_", "-", ":", at most 127
	Description string `json:"description,omitempty"`

	// Owner is that of the VM whose memory it is. It travels with the snapshot.
	Owner vm.Owner `json:"owner,omitzero"`
	// Published are the namespaces beside the owner's that may clone from it, vm.Everyone for all. Only the operator of a
	// node publishes, and only for that node: it does not travel.
	Published []string `json:"published,omitempty"`

	Image        string       `json:"image"`
	ImageDigest  string       `json:"image_digest"`
	ImageType    vm.ImageType `json:"image_type"`
	ImageBlobIDs []string     `json:"image_blob_ids,omitempty"`
	// ImageManifest is the digest under which the image's origin has it, of a registry's manifest or of a file that was
	// served compressed, sha256:<hex>; "" when it has none other than ImageDigest.
	ImageManifest string `json:"image_manifest,omitempty"`

	Hypervisor string     `json:"hypervisor"` // name of the driver
	Machine    vm.Machine `json:"machine"`    // that can resume the memory

	CPU     int    `json:"cpu"`
	Memory  int64  `json:"memory"`  // bytes
	Storage int64  `json:"storage"` // bytes
	NICs    int    `json:"nics"`
	Network string `json:"network,omitempty"`
	Windows bool   `json:"windows,omitempty"`

	Source Source  `json:"source"`
	Live   bool    `json:"live"`            // it has memory and devices; otherwise a VM of it boots
	Fresh  bool    `json:"fresh,omitempty"` // its memory is of a guest that had not been set up since it booted
	Disks  []Disk  `json:"disks"`           // in the order the guest sees them
	Boot   vm.Boot `json:"boot"`
	// MemoryBase is the id of the snapshot, which may be gone, whose memory is in FileBase; "": FileMemory is whole.
	MemoryBase string    `json:"memory_base,omitempty"`
	NIC        []vm.NIC  `json:"nic,omitempty"` // the interfaces as the guest knows them
	Record     vm.Record `json:"record"`        // of the source: a clone inherits its process, volumes and mounts

	Size      int64             `json:"size"`            // bytes that it occupies
	Pause     time.Duration     `json:"pause,omitempty"` // nanoseconds that the guest was stopped
	Method    string            `json:"method,omitempty"`
	Quiesced  bool              `json:"quiesced,omitempty"` // the guest's file systems were frozen
	CreatedAt time.Time         `json:"created_at"`
	UsedAt    time.Time         `json:"used_at,omitzero"`
	Summed    bool              `json:"summed,omitempty"` // its files have checksums beside them; false: it was saved before there were any
	Digest    string            `json:"digest,omitempty"` // sha256:<hex> of the manifest that it was pushed as or pulled from
	Labels    map[string]string `json:"labels,omitempty"` // opaque notes of doors
}

// Image is what disks of a snapshot stand on.
type Image struct {
	Name     string // as its VM was given it
	Digest   string
	Manifest string // under which its origin has it, or ""; see Snapshot
	Type     vm.ImageType
}

// Images are what the disks of s stand on: the image of its VM, then those of its containers in their order.
func (s Snapshot) Images() []Image {
	out := []Image{{Name: s.Image, Digest: s.ImageDigest, Manifest: s.ImageManifest, Type: s.ImageType}}
	for i, c := range s.Record.Containers {
		img := Image{Digest: c.ImageDigest, Manifest: c.ImageManifest, Type: vm.ImageOCI}
		if i < len(s.Record.Spec.Containers) {
			img.Name = s.Record.Spec.Containers[i].Image
		}
		out = append(out, img)
	}
	return out
}

// Source is where a snapshot comes from.
type Source struct {
	VMID   vm.ID  `json:"vm_id"`
	VMName string `json:"vm_name"`
	Node   string `json:"node,omitempty"`
}

// Disk is one disk of a snapshot.
type Disk struct {
	Serial string      `json:"serial"`
	Role   vm.DiskRole `json:"role"`
	Size   int64       `json:"size"` // bytes that the guest sees; 0: not known
	// Layers are the snapshot's own files of this disk, the lowest first; each stands on the one before it.
	Layers []Layer `json:"layers,omitempty"`
	// Image says that the lowest layer stands on the image's disk of the same place, or, without layers, that the disk is
	// one of the image's shared ones.
	Image bool `json:"image,omitempty"`
}

// Layer is one file of a disk.
type Layer struct {
	File   string        `json:"file"` // in the snapshot's folder
	Format vm.DiskFormat `json:"format"`
}

// Store keeps snapshots. All methods are safe for concurrent use.
//
// Each request is made on behalf of an owner (vm.Behalf): it finds the owner's own snapshots and those that the operator
// publishes to the owner's namespace, and changes the own ones only. What belongs to somebody else is NotFound.
type Store interface {
	// Create starts a snapshot with a name, of whom the request is made for. Nobody sees it before Draft.Commit, but its
	// name is taken. Errors: InvalidArgument for a bad name, AlreadyExists.
	Create(ctx context.Context, name string) (Draft, error)
	// Get resolves a name, an id or a unique prefix of one of at least three characters (vm.Kind.Match). NotFound.
	Get(ctx context.Context, ref string) (Snapshot, error)
	// List returns all, sorted by name.
	List(ctx context.Context) ([]Snapshot, error)
	// Remove deletes a snapshot. VMs that go on from it are not touched: they have what they need. FailedPrecondition
	// while somebody holds it, and for one that the operator published.
	Remove(ctx context.Context, ref string) error
	// Update changes what is known of a snapshot, not its files.
	Update(ctx context.Context, ref string, change func(*Snapshot)) (Snapshot, error)

	// Hold keeps a snapshot from being removed and gives access to its files until Release.
	Hold(ctx context.Context, ref string) (Held, error)
	// HoldDir is Hold for a folder that ExportDir made and that is in no store. It checks the folder as Import checks a
	// stream. InvalidArgument, DataLoss.
	HoldDir(ctx context.Context, dir string) (Held, error)

	// Disks makes the disks of a VM that goes on from h in dir: its own links to the layers and a private overlay on each
	// writable disk, grown to storage bytes when that is more than it has (0: as it is). base are the image's disks as the
	// image store prepared them. It is idempotent. What it returns depends on nothing but dir and base.
	// Errors: InvalidArgument (storage smaller), DataLoss (a layer is missing).
	Disks(ctx context.Context, h Held, base []vm.Disk, dir string, storage int64) ([]vm.Disk, error)
	// Overlay makes an empty overlay on below in dir, for a save. name is that of its file.
	Overlay(ctx context.Context, below vm.Disk, dir, name string) (vm.Disk, error)

	// Export writes a snapshot as a tar stream: FileMeta first, then the files, sparse ones with their map. Held ones too.
	Export(ctx context.Context, h Held, w io.Writer) error
	// ExportDir copies a snapshot into dir, which is made or empty; by reflink or link where that can be done.
	ExportDir(ctx context.Context, h Held, dir string) error
	// Import reads what Export wrote, plain or gzip. Either the whole snapshot is there or nothing is. "" keeps the name.
	// Snapshot.Heir says whose it is then.
	// Errors: InvalidArgument (hostile or foreign content), DataLoss (truncated, digest), AlreadyExists, ResourceExhausted.
	Import(ctx context.Context, name, description string, r io.Reader, progress func(bytes int64)) (Snapshot, error)
	// ImportDir registers a folder that ExportDir made: in place, by links, when it is on the store's file system.
	ImportDir(ctx context.Context, name, description, dir string) (Snapshot, error)
}

// Draft is a snapshot that is being made. Its files go into Dir.
type Draft interface {
	// ID of the snapshot to be.
	ID() string
	// Dir is its folder, on the file system of the VMs' folders.
	Dir() string
	// Link puts the disk d, the file itself and what it stands on down to but not including the image's own, into the
	// folder without copying where that is possible, and returns how the snapshot describes it. Files that nobody writes
	// to any more only. imageDisk tells the image's files, at which it stops.
	Link(ctx context.Context, d vm.Disk, imageDisk func(path string) bool) (Disk, error)
	// Base makes the whole memory that there is with the first of some snapshots FileBase, for memory that is saved as a
	// delta to it, and returns the id for Snapshot.MemoryBase. "": none of them has one. A record without MemoryBase does
	// away with it.
	Base(ctx context.Context, refs ...string) (id string, err error)
	// Commit makes everything durable, then the snapshot visible. s.ID, Name, Owner, Size and CreatedAt are filled in.
	Commit(ctx context.Context, s Snapshot) (Snapshot, error)
	// Discard gives it up; after Commit it does nothing.
	Discard() error
}

// Held is a snapshot that stays while it is used.
type Held interface {
	Snapshot() Snapshot
	// Dir is the folder with its files. They must not be written to.
	Dir() string
	// Open opens a file for reading, by its name. FileMemory is whole, however it is kept. What is read of it is compared
	// with its checksums.
	// Errors: DataLoss when it is missing or damaged.
	Open(name string) (*sparse.File, error)
	// Verify compares the layers of the disks with their checksums, before a VM goes on from them: a hypervisor reads them
	// as they are. Each layer is read once in the life of the store; large ones behind the caller's back, and whoever asks
	// later learns what was found. Memory is not looked at: who loads it compares it.
	// Errors: DataLoss, which names the layer.
	Verify(ctx context.Context) error
	Release()
}

// Remote carries snapshots to and from an OCI registry.
type Remote interface {
	// Push makes the snapshot ref there. What the registry has already is not sent again. It returns when the registry
	// has confirmed the manifest, whose digest it returns.
	// Errors: InvalidArgument (ref), FailedPrecondition (credentials refused), Unavailable (network, server),
	// ResourceExhausted (quota), DataLoss (files changed under our hands).
	Push(ctx context.Context, h Held, ref string, auth Auth, progress func(Progress)) (digest string, err error)
	// Pull makes the snapshot here under name ("" is that in the registry's record). Every byte is verified before the
	// snapshot is visible. What local snapshots have already is not fetched.
	// Errors: as Push, and NotFound, DataLoss (digest, truncated, missing layer), AlreadyExists.
	Pull(ctx context.Context, ref, name string, auth Auth, progress func(Progress)) (Snapshot, error)
	// Digest asks which manifest ref is. NotFound.
	Digest(ctx context.Context, ref string, auth Auth) (string, error)
	// Delete removes the tag, or the manifest when ref has a digest. Deleting what is gone is no error.
	Delete(ctx context.Context, ref string, auth Auth) error
	// Check asks whether the registry answers and takes the credentials, without changing anything.
	Check(ctx context.Context, ref string, auth Auth) error
}

// Auth are the credentials for a registry: a bearer token, or a user and password. Secret: never logged or stored.
// The zero value is anonymous.
type Auth struct {
	Token    string
	Username string
	Password string
	CA       []byte // PEM: trusted beside the system's certificates; not secret
}

// Progress of a push or a pull.
type Progress struct {
	Phase string // preparing, sending, fetching, verifying
	Done  int64  // bytes of the snapshot's files
	Total int64  // bytes, -1: not known
	Moved int64  // bytes that went over the network
}

// Package snapshot is the contract of the snapshot store. A snapshot is a whole guest at one instant: memory, devices
// and disks. Any number of VMs can resume from it.
//
// A snapshot is a folder of plain files. Implementations own their folders, and export and import them; they start no
// VM and make no decisions about VMs.
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
	FileMeta   = "snapshot.json" // Snapshot as JSON; written last: a folder without it is not a snapshot
	FileState  = "vmstate"       // devices and CPUs, in the driver's own format; absent in a snapshot of disks only
	FileMemory = "memory-ranges" // the guest's memory, sparse; with a MemoryBase, only what differs from FileBase
	FileBase   = "memory-base"   // the whole memory of an earlier snapshot
	FileFeed   = "feed"          // socket of the filling.Writer of FileMemory; only in a snapshot that arrives
)

// Each file except FileMeta has a checksum file beside it if Snapshot.Summed is set; package sparse names and reads
// these. They are not exported or pushed: each store makes its own.

// Snapshot is the record of one snapshot. The JSON is stored with it and travels with it; package nodejson has the form
// that `cocoon snapshot inspect` prints.
type Snapshot struct {
	ID          string `json:"id"`   // 26 characters, like the id of a VM
	Name        string `json:"name"` // unique per owner: letters, digits, ".", "_", "-", ":", at most 127
	Description string `json:"description,omitempty"`

	// Owner is the owner of the VM whose memory was saved. It travels with the snapshot.
	Owner vm.Owner `json:"owner,omitzero"`
	// Published lists the namespaces, besides the owner's, that may clone from it; vm.Everyone means all. Only the
	// operator of a node publishes, and only for that node: the list does not travel.
	Published []string `json:"published,omitempty"`

	Image        string       `json:"image"`
	ImageDigest  string       `json:"image_digest"`
	ImageType    vm.ImageType `json:"image_type"`
	ImageBlobIDs []string     `json:"image_blob_ids,omitempty"`
	// ImageManifest is the image's digest at its origin, sha256:<hex>: of a registry's manifest, or of a file that was
	// served compressed; "" when the origin has no digest other than ImageDigest.
	ImageManifest string `json:"image_manifest,omitempty"`

	Hypervisor string     `json:"hypervisor"` // name of the driver that took it; see Backend
	Machine    vm.Machine `json:"machine"`    // a machine that can resume the memory

	CPU     int    `json:"cpu"`
	Memory  int64  `json:"memory"`  // bytes
	Storage int64  `json:"storage"` // bytes
	NICs    int    `json:"nics"`
	Network string `json:"network,omitempty"`
	Windows bool   `json:"windows,omitempty"`

	Source Source  `json:"source"`
	Live   bool    `json:"live"`            // has memory and devices; otherwise a VM made from it boots
	Fresh  bool    `json:"fresh,omitempty"` // the memory is of a guest that had not been set up since it booted
	Disks  []Disk  `json:"disks"`           // in the guest's order
	Boot   vm.Boot `json:"boot"`
	// MemoryBase is the id of the snapshot whose memory is in FileBase; that snapshot may be removed already. "":
	// FileMemory is whole.
	MemoryBase string    `json:"memory_base,omitempty"`
	NIC        []vm.NIC  `json:"nic,omitempty"`     // the NICs as the guest knows them
	Volumes    []Volume  `json:"volumes,omitempty"` // the VM's volumes, in the order of its disks
	Record     vm.Record `json:"record"`            // of the source: a clone inherits its process, volumes and mounts

	Size      int64             `json:"size"`            // bytes on disk
	Pause     time.Duration     `json:"pause,omitempty"` // nanoseconds that the guest was stopped
	Method    string            `json:"method,omitempty"`
	Quiesced  bool              `json:"quiesced,omitempty"` // the guest's file systems were frozen
	CreatedAt time.Time         `json:"created_at"`
	UsedAt    time.Time         `json:"used_at,omitzero"`
	Summed    bool              `json:"summed,omitempty"` // the files have checksums beside them; false: saved before there were checksums
	Kept      bool              `json:"kept,omitempty"`   // it stays when the VM that is hibernated in it wakes or is removed
	Arriving  bool              `json:"-"`                // its memory is not all here yet; if it never comes, there is no snapshot
	Digest    string            `json:"digest,omitempty"` // sha256:<hex> of the manifest that it was pushed as or pulled from
	Labels    map[string]string `json:"labels,omitempty"` // opaque; doors keep their own keys here
}

// Plugged is how many bytes of the memory are in the state of the devices, because the guest got them after it had booted.
func (s Snapshot) Plugged() int64 {
	if h := s.Record.Spec.Hardware; h != nil {
		return min(max(h.Growth.Plugged, 0), s.Memory)
	}
	return 0
}

// Image is an image that disks of a snapshot are based on.
type Image struct {
	Name     string // as given in the VM's spec
	Digest   string
	Manifest string // the digest at its origin, or ""; see Snapshot.ImageManifest
	Type     vm.ImageType
}

// Images returns the images that the disks of s are based on: the image of its VM, unless that boots from a volume or is a sandbox, then those
// of Layered in order.
func (s Snapshot) Images() []Image {
	var out []Image
	if _, ok := vm.BootVolume(s.Image); !ok && !s.Record.Spec.Sandbox {
		out = append(out, Image{Name: s.Image, Digest: s.ImageDigest, Manifest: s.ImageManifest, Type: s.ImageType})
	}
	names := map[string]string{}
	for _, v := range s.Record.Spec.ImageVolumes() {
		names[volumeWord+v.Name] = v.Image
	}
	for _, c := range s.Record.Spec.Containers {
		names[c.Name] = c.Image
	}
	for _, e := range s.Record.Ephemeral {
		names[e.Record.Name] = e.Spec.Image
		for _, v := range e.Spec.Volumes {
			names[volumeWord+vm.OwnVolume(e.Record.Name, v.Name)] = v.Image
		}
	}
	for _, c := range s.Layered() {
		out = append(out, Image{Name: names[c.Name], Digest: c.ImageDigest, Manifest: c.ImageManifest, Type: vm.ImageOCI})
	}
	return out
}

// volumeWord begins the names of volumes among those of containers.
const volumeWord = "volume "

// Layered returns the containers whose images are disks of s: those of its VM, except a container whose root is the VM's own,
// then those that were added to its guest and have disks in it. Volumes with the files of images are among them, as containers
// without a process: those of one container after it, those of the VM at the end.
func (s Snapshot) Layered() (out []vm.ContainerRecord) {
	if !s.Record.RootContainer() {
		out = append(out, s.Record.Containers...)
	}
	for _, e := range s.Record.Ephemeral {
		if len(e.Record.Layers) > 0 {
			out = append(out, e.Record)
		}
		for _, v := range e.Volumes {
			v.Volume = vm.OwnVolume(e.Record.Name, v.Volume)
			out = append(out, ofVolume(v)...)
		}
	}
	for _, v := range s.Record.ImageVolumes {
		out = append(out, ofVolume(v)...)
	}
	return out
}

// ofVolume returns v as a container without a process; nothing if no disk has the files of an image for it.
func ofVolume(v vm.ImageVolume) []vm.ContainerRecord {
	if v.ImageDigest == "" || len(v.Layers) == 0 {
		return nil
	}
	return []vm.ContainerRecord{{Name: volumeWord + v.Volume, ImageDigest: v.ImageDigest, ImageManifest: v.ImageManifest, Layers: v.Layers}}
}

// PeerScheme begins the name of a snapshot on another node: cocoon://HOST:PORT/NAME.
const PeerScheme = "cocoon://"

// Source is where a snapshot comes from.
type Source struct {
	VMID   vm.ID  `json:"vm_id"`
	VMName string `json:"vm_name"`
	Node   string `json:"node,omitempty"`
}

// Volume is a volume of the VM at the instant of the snapshot. The bytes are in the volume store of the node, so a snapshot with volumes
// stays there.
type Volume struct {
	Volume   string `json:"volume"`         // name in the spec of the VM
	Snapshot vm.ID  `json:"snapshot"`       // in the volume store
	Serial   string `json:"serial"`         // by which the guest knows the disk
	Port     int    `json:"port,omitempty"` // the place of a disk that was added while the guest ran
	Size     int64  `json:"size,omitempty"` // bytes that the guest knows of; 0: not known
}

// Disk is one disk of a snapshot.
type Disk struct {
	Serial string      `json:"serial"`
	Role   vm.DiskRole `json:"role"`
	Size   int64       `json:"size"` // bytes that the guest sees; 0: unknown
	// Layers are the snapshot's own files of this disk, lowest first; each is the overlay of the one before it.
	Layers []Layer `json:"layers,omitempty"`
	// Image means that the image's disk at the same place is the backing file of the lowest layer. Without layers, the
	// disk is one of the image's shared disks.
	Image bool `json:"image,omitempty"`
}

// Layer is one file of a disk.
type Layer struct {
	File   string        `json:"file"` // in the snapshot's folder
	Format vm.DiskFormat `json:"format"`
}

// Store keeps snapshots. All methods are safe for concurrent use.
//
// Each request is made on behalf of an owner (vm.Behalf). It finds the owner's snapshots and those that the operator
// publishes to the owner's namespace, and changes only the owner's. Snapshots of other owners are NotFound.
type Store interface {
	// Create starts a snapshot with a name, for the owner of the request. It is invisible before Draft.Commit, but its
	// name is taken. Errors: InvalidArgument for a bad name, AlreadyExists.
	Create(ctx context.Context, name string) (Draft, error)
	// Get resolves a name, an id, or a unique prefix of either with at least three characters (vm.Kind.Match).
	// NotFound.
	Get(ctx context.Context, ref string) (Snapshot, error)
	// List returns all, sorted by name.
	List(ctx context.Context) ([]Snapshot, error)
	// Remove deletes a snapshot. VMs made from it are not affected: they have their own links to the files.
	// FailedPrecondition while the snapshot is held, and for one that the operator published.
	Remove(ctx context.Context, ref string) error
	// Update changes the record of a snapshot, not its files.
	Update(ctx context.Context, ref string, change func(*Snapshot)) (Snapshot, error)

	// Hold keeps a snapshot from being removed and gives access to its files until Release. It waits for one that arrives.
	Hold(ctx context.Context, ref string) (Held, error)
	// HoldArriving is Hold, but it does not wait. While the snapshot arrives, all but FileMemory can be used, and Held.Feed says
	// which parts of that are here.
	HoldArriving(ctx context.Context, ref string) (Held, error)
	// HoldDir is Hold for a folder that ExportDir made and that is in no store. It validates the folder as Import
	// validates a stream. InvalidArgument, DataLoss.
	HoldDir(ctx context.Context, dir string) (Held, error)

	// Disks makes, in dir, the disks of a VM that resumes from h: its own links to the layers, and a private overlay on
	// each writable disk. The overlay grows to storage bytes if that is more than the disk has (0: no growth). base are
	// the image's disks as the image store prepared them. Idempotent: the result depends only on dir and base. Errors:
	// InvalidArgument (storage smaller), DataLoss (a layer is missing).
	Disks(ctx context.Context, h Held, base []vm.Disk, dir string, storage int64) ([]vm.Disk, error)
	// RawDisks is Disks for a VM whose disks must be raw: its writable disks are copies, by reflink where possible. Unsupported if a disk has
	// another format, or several layers.
	RawDisks(ctx context.Context, h Held, base []vm.Disk, dir string, storage int64) ([]vm.Disk, error)
	// Overlay makes an empty overlay on below in dir, for a save. name is its file name.
	Overlay(ctx context.Context, below vm.Disk, dir, name string) (vm.Disk, error)

	// Export writes a snapshot as a tar stream: FileMeta first, then the files, sparse ones with their map. It works on
	// held snapshots too. FailedPrecondition for one that is not Portable, as in ExportDir and in Remote.Push.
	Export(ctx context.Context, h Held, w io.Writer) error
	// ExportDir copies a snapshot into dir, which it creates or which is empty; by reflink or link where possible.
	ExportDir(ctx context.Context, h Held, dir string) error
	// Import reads what Export wrote, plain or gzip. The whole snapshot is stored, or nothing is. name "" keeps the
	// snapshot's name. Snapshot.Heir determines the new owner.
	// Errors: InvalidArgument (hostile or foreign content), DataLoss (truncated, digest), AlreadyExists,
	// ResourceExhausted.
	Import(ctx context.Context, name, description string, r io.Reader, progress func(bytes int64)) (Snapshot, error)
	// ImportDir registers a folder that ExportDir made: in place, by links, if it is on the store's file system.
	ImportDir(ctx context.Context, name, description, dir string) (Snapshot, error)
}

// Draft is a snapshot that is not committed yet. Its files go into Dir.
type Draft interface {
	// ID is the id of the future snapshot.
	ID() string
	// Dir is its folder, on the same file system as the VMs' folders.
	Dir() string
	// Link adds the disk d to the folder, without copying where possible, and returns how the snapshot describes it. It
	// adds the disk's file and its backing files, down to but not including the image's own. Preconditions: nobody
	// writes to these files any more. imageDisk recognizes the image's files, where Link stops.
	Link(ctx context.Context, d vm.Disk, imageDisk func(path string) bool) (Disk, error)
	// Copy is Link, but it copies the file of a writable disk, by reflink where possible: somebody goes on writing to it later.
	Copy(ctx context.Context, d vm.Disk, imageDisk func(path string) bool) (Disk, error)
	// Base adds, as FileBase, the whole memory of the first of the given snapshots that has one, so that memory can be
	// saved as a delta to it. It returns the id for Snapshot.MemoryBase; "": none of them is usable. Commit removes
	// FileBase if the record has no MemoryBase.
	Base(ctx context.Context, refs ...string) (id string, err error)
	// Offer makes the snapshot visible, although FileMemory is still being written by a filling.Writer, whose socket is FileFeed in Dir. It arrives then: Store.Hold
	// waits until Commit or Discard, and nothing changes or removes it. If the store is closed or its process dies meanwhile, there is no snapshot. Dir is
	// another one afterwards.
	Offer(ctx context.Context, s Snapshot) (Snapshot, error)
	// Commit makes everything durable, then makes the snapshot visible. It fills in s.ID, Name, Owner, Size and
	// CreatedAt. After Offer it waits until nobody holds what arrived any longer.
	Commit(ctx context.Context, s Snapshot) (Snapshot, error)
	// Discard removes the draft; after Commit it does nothing.
	Discard() error
}

// Held is a snapshot that cannot be removed until Release.
type Held interface {
	Snapshot() Snapshot
	// Dir is the folder with its files. They are read-only.
	Dir() string
	// Open opens a file for reading, by its name. FileMemory is always whole, even if it is stored as a delta. Reads
	// are verified against the checksums.
	// Errors: DataLoss when it is missing or damaged.
	Open(name string) (*sparse.File, error)
	// Verify compares the layers of the disks with their checksums, before a VM resumes from them: a hypervisor reads
	// the layers without verification. Each layer is read once in the lifetime of the store. Large layers are read in
	// the background, and later calls return the result. Verify does not read the memory: it is verified when it is
	// loaded.
	// Errors: DataLoss, which names the layer.
	Verify(ctx context.Context) error
	// Feed is the path of the socket of a filling.Writer that still writes FileMemory, which therefore has no checksums; "": all of it is here.
	Feed() string
	Release()
}

// Remote carries snapshots to and from an OCI registry.
type Remote interface {
	// Push uploads the snapshot as ref. It does not send what the registry has already. It returns the digest of the
	// manifest after the registry confirmed that manifest.
	// Errors: InvalidArgument (ref), FailedPrecondition (credentials refused), Unavailable (network, server),
	// ResourceExhausted (quota), DataLoss (files changed during the push).
	Push(ctx context.Context, h Held, ref string, auth Auth, progress func(Progress)) (digest string, err error)
	// Pull stores the snapshot locally under name ("": the name in the registry's record). Every byte is verified
	// before the snapshot is visible. It does not fetch what local snapshots have already.
	// Errors: as Push, and NotFound, DataLoss (digest, truncated, missing layer), AlreadyExists.
	Pull(ctx context.Context, ref, name string, auth Auth, progress func(Progress)) (Snapshot, error)
	// PullEarly is Pull, but it returns when everything but the memory is here, if the memory can come later: the snapshot then arrives, and a guest can resume from
	// it. arrive waits for the rest, and must be called, once. If that never comes, or if ctx of arrive ends before, the snapshot is gone. In the second case guests that have
	// begun get their memory nevertheless.
	PullEarly(ctx context.Context, ref, name string, auth Auth, progress func(Progress)) (s Snapshot, arrive func(ctx context.Context), err error)
	// Digest returns the digest of the manifest that ref names. NotFound.
	Digest(ctx context.Context, ref string, auth Auth) (string, error)
	// Delete removes the tag, or the manifest if ref has a digest. Idempotent: a missing tag or manifest is no error.
	Delete(ctx context.Context, ref string, auth Auth) error
	// Check reports whether the registry answers and accepts the credentials, without changing anything.
	Check(ctx context.Context, ref string, auth Auth) error
}

// Auth are the credentials for a registry: a bearer token, or a user and password. Secret: never logged or stored.
// The zero value is anonymous.
type Auth struct {
	Token    string
	Username string
	Password string
	CA       []byte // PEM: trusted in addition to the system's certificates; not secret
}

// Progress of a push or a pull.
type Progress struct {
	Phase string // preparing, sending, fetching, verifying
	Done  int64  // bytes of the snapshot's files
	Total int64  // bytes, -1: unknown
	Moved int64  // bytes that went over the network
}

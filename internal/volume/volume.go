// Package volume is the contract of the volume store. A volume is a disk that outlives the VMs that use it.
//
// A store keeps the bytes of volumes and says which VM a volume is attached to. It never interprets the bytes: a guest makes the
// file system, checks and mounts it, or package hostmount does for a container. It starts no VM and makes no decisions about VMs.
package volume

import (
	"context"
	"io"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// Volume is the record of one volume.
type Volume struct {
	ID    vm.ID    `json:"id"`             // 26 characters, like the id of a VM
	Name  string   `json:"name"`           // unique per owner, in the form of a VM's name
	Owner vm.Owner `json:"owner,omitzero"` // set once; see Store
	Kind  string   `json:"kind"`           // of the store that has it, such as "file"
	Size  int64    `json:"size"`           // bytes that a guest sees, a multiple of Block

	// From is the id of the volume or snapshot that this volume is a copy of; "" if it was created empty or imported.
	From string `json:"from,omitempty"`
	For  string `json:"for,omitempty"` // see Spec

	// Attachments are the VMs that use the volume: one that writes, or any number that only read, or any number that share it.
	Attachments []Attachment `json:"attachments,omitempty"`

	CreatedAt time.Time         `json:"created_at"`
	Labels    map[string]string `json:"labels,omitempty"` // opaque; doors keep their own keys here
}

// Attachment says that a VM uses a volume, or something else of the node that has an id, such as a container.
type Attachment struct {
	VM vm.ID `json:"vm"`
	Mode
	Since time.Time `json:"since"`
}

// Mode is how a VM uses a volume. The zero value is a VM that writes, and that nobody else is beside.
type Mode struct {
	ReadOnly bool `json:"read_only,omitempty"` // the VM cannot write to it
	Shared   bool `json:"shared,omitempty"`    // several VMs may write to it at the same time; each of them has to set this
}

// ModeOf returns the mode of a VM that uses a volume as in u.
func ModeOf(u vm.VolumeUse) Mode { return Mode{ReadOnly: u.ReadOnly, Shared: u.Shared} }

// Spec asks for a volume.
type Spec struct {
	Kind   string            // of the store that makes it; "": the node chooses, and a copy has the kind of its source
	Name   string            // "": the store chooses one
	Size   int64             // see RoundSize. A copy may be larger than its source, and 0 means as large.
	Labels map[string]string // at most MaxLabels bytes
	Live   bool              // of a snapshot or copy: a VM may write to the source meanwhile
	// For is the id of what the engine makes the object for: of the snapshot of a VM that a snapshot of a volume belongs to, or of the VM
	// that a copy is made for. Until that exists, the engine may remove the object. "": it is nobody's but its owner's.
	For string
}

// Limits of volumes, in bytes.
const (
	Block     = 4096
	MinSize   = 1 << 20
	MaxSize   = 64 << 40
	MaxLabels = 64 << 10 // all keys and values of a volume or snapshot together
)

// Usage says how much of its space a volume uses.
type Usage struct {
	Size      int64 // bytes that a guest sees
	Allocated int64 // bytes on the storage of the node
}

// Resized is a volume that was grown.
type Resized struct {
	Volume
	Waiting []Waiting // the VMs that have it attached and do not use its new size yet
}

// Waiting is a VM whose guest does not use the new size of a volume yet.
type Waiting struct {
	VM     vm.ID
	Reason string // one sentence for a person
}

// Store has volumes, and says who uses them. All methods are safe for concurrent use, and a process may be killed in each of them: a
// volume is then there as a whole or not at all.
//
// Each request is made on behalf of an owner (vm.Behalf). It finds and changes only the owner's volumes; the others are NotFound. A
// ref is a name, an id, or a unique prefix of an id with at least three characters (vm.Kind.Match). A snapshot or copy that the
// operator makes belongs to the owner of what it was made from.
//
// A volume whose record or bytes are damaged is in no list. Its name stays taken and its files stay where they are, and every method
// that finds it returns DataLoss.
type Store interface {
	// Get returns the volume ref.
	// Errors: NotFound, InvalidArgument if ref is ambiguous.
	Get(ctx context.Context, ref string) (Volume, error)
	// List returns all volumes, sorted by owner and name.
	List(ctx context.Context) ([]Volume, error)
	// Update changes the labels of a volume and, if the store is a Maker, its name. The store ignores other changes.
	// Errors: NotFound, InvalidArgument, AlreadyExists, FailedPrecondition if it cannot have another name.
	Update(ctx context.Context, ref string, change func(*Volume)) (Volume, error)
	// Resize grows a volume, also while it is attached: the caller tells the hypervisor. It is no error if the volume has that size.
	// Errors: NotFound, InvalidArgument for a smaller size, ResourceExhausted, FailedPrecondition if it is on a device that does not have
	// that size.
	Resize(ctx context.Context, ref string, size int64) (Volume, error)

	// Attach records that a VM uses the volume, and returns its disk: path, format, ReadOnly and Shared; the caller chooses the rest. The
	// record is durable when Attach returns. It is no error if the VM has it attached in the same way already.
	// Errors: NotFound, InvalidArgument if to is not an id, ResourceExhausted, DataLoss if the bytes are missing, and
	// FailedPrecondition while another VM uses it, unless all of them only read or all of them share it, or while a copy or an export
	// reads what the VM would change.
	Attach(ctx context.Context, ref string, to vm.ID, as Mode) (Volume, vm.Disk, error)
	// Detach ends an attachment. The VM must not use the disk any more. It is no error if it is not attached to that VM.
	// Errors: NotFound.
	Detach(ctx context.Context, ref string, from vm.ID) error

	// Usage returns the figures of all volumes of the owner, by id. It starts no program and reads no bytes of volumes.
	Usage(ctx context.Context) (map[vm.ID]Usage, error)
}

// Maker is the ability of a Store to make and remove volumes. Other stores have the volumes that they are configured with.
type Maker interface {
	// Create makes an empty volume: all its bytes are zero.
	// Errors: InvalidArgument, AlreadyExists, ResourceExhausted.
	Create(ctx context.Context, s Spec) (Volume, error)
	// Delete removes a volume with its bytes. Its snapshots stay, and so do copies.
	// Errors: NotFound, FailedPrecondition while it is attached.
	Delete(ctx context.Context, ref string) error
}

// Snapshot is the record of the bytes of a volume at one instant.
type Snapshot struct {
	ID        vm.ID             `json:"id"`
	Name      string            `json:"name"` // unique per owner among volume snapshots
	Owner     vm.Owner          `json:"owner,omitzero"`
	Kind      string            `json:"kind"`
	Volume    vm.ID             `json:"volume"`        // of which it is; that volume may be deleted already
	Source    string            `json:"source"`        // the name of that volume
	Size      int64             `json:"size"`          // bytes that a guest sees
	For       string            `json:"for,omitempty"` // see Spec
	CreatedAt time.Time         `json:"created_at"`
	Labels    map[string]string `json:"labels,omitempty"`
}

// Snapshotter is the ability of a Store to keep the bytes of a volume at one instant, and to go back to them.
type Snapshotter interface {
	// Snapshot keeps the bytes of the volume ref. While a VM may write to it, the caller sets Spec.Live; the bytes are then those of one
	// instant, as after a power cut. The size in s is 0 or that of the volume.
	// Errors: NotFound, InvalidArgument, AlreadyExists, ResourceExhausted, FailedPrecondition if the store cannot do that live, or if
	// several VMs may write to the volume.
	Snapshot(ctx context.Context, ref string, s Spec) (Snapshot, error)
	// GetSnapshot returns the snapshot ref. Errors: NotFound, InvalidArgument if ref is ambiguous.
	GetSnapshot(ctx context.Context, ref string) (Snapshot, error)
	// Snapshots returns all snapshots, sorted by owner and name.
	Snapshots(ctx context.Context) ([]Snapshot, error)
	// FromSnapshot makes a volume with the bytes of the snapshot ref.
	// Errors: NotFound, InvalidArgument for a smaller size, AlreadyExists, ResourceExhausted.
	FromSnapshot(ctx context.Context, ref string, s Spec) (Volume, error)
	// Restore makes the bytes of the snapshot the content of the volume, which keeps its name and its id. The old bytes stay until the
	// new ones are complete. A volume that is larger than the snapshot keeps its size, and the rest of it is zero.
	// Errors: NotFound, InvalidArgument if the snapshot is larger than the volume, FailedPrecondition while the volume is attached,
	// ResourceExhausted.
	Restore(ctx context.Context, ref, snapshot string) (Volume, error)
	// DeleteSnapshot removes a snapshot. Volumes made from it stay. Errors: NotFound.
	DeleteSnapshot(ctx context.Context, ref string) error
}

// LiveChecker is the ability of a Store to tell in advance whether it can take a snapshot of a volume while a VM writes to it.
type LiveChecker interface {
	// CheckLive returns the error that Snapshot and Clone would return for the volume ref with Spec.Live, as far as that is known. It
	// copies nothing, and a later copy can still fail.
	// Errors: NotFound, InvalidArgument if ref is ambiguous, FailedPrecondition and Unsupported if the store cannot do that,
	// ResourceExhausted and Unavailable if it cannot now.
	CheckLive(ctx context.Context, ref string) error
}

// Cloner is the ability of a Store to copy a volume.
type Cloner interface {
	// Clone makes a volume with the bytes of the volume ref, and never writes to that one. Spec.Live is as for Snapshot.
	// Errors: NotFound, InvalidArgument for a smaller size, AlreadyExists, ResourceExhausted, FailedPrecondition as for Snapshot.
	Clone(ctx context.Context, ref string, s Spec) (Volume, error)
}

// Carrier is the ability of a Store to write the bytes of a volume to a stream, and to read them from one.
type Carrier interface {
	// Export writes the bytes of the volume ref to w: Volume.Size bytes, as they are on the disk.
	// Errors: NotFound, FailedPrecondition while a VM that writes has it attached.
	Export(ctx context.Context, ref string, w io.Writer) error
	// Import makes a volume with the bytes of r, up to its end. Blocks of zeros take no space. The whole volume is stored, or nothing is.
	// progress, if not nil, is called with the number of bytes so far. If r is a sparse.Holed, its holes are not read; if it is a
	// sparse.FileReader, the volume may share the content of the file.
	// Errors: InvalidArgument if there are more bytes than s.Size, or none; AlreadyExists, ResourceExhausted.
	Import(ctx context.Context, s Spec, r io.Reader, progress func(bytes int64)) (Volume, error)
}

// Pool says how full the storage is that the volumes of a kind share. Sizes are in bytes.
type Pool struct {
	Kind         string `json:"kind"` // of the volumes
	Name         string `json:"name"`
	Size         int64  `json:"size"` // of data
	Used         int64  `json:"used"`
	MetadataSize int64  `json:"metadata_size"` // of what says where the data is
	MetadataUsed int64  `json:"metadata_used"`
	Free         int64  `json:"free"`            // data that new volumes may take before nothing is made any more
	Fault        string `json:"fault,omitempty"` // why no volume can be made or grown, for a person; "": they can
}

// Pooled is the ability of a Store to say how full the storage of its volumes is, if that has a fixed size.
type Pooled interface {
	// Pools returns how full each pool is. It starts no program. A pool that cannot be examined has a Fault.
	Pools(ctx context.Context) []Pool
}

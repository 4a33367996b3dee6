// Package image is the contract of the image store: named, content-addressed bytes that VMs boot from.
//
// It does not start VMs and does not know where a name comes from. Implementations own only their folder on disk.
package image

import (
	"context"
	"fmt"
	"io"
	"time"

	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// Store keeps images. All methods are safe for concurrent use, by several processes too.
type Store interface {
	// Import reads an image from r, recognises it by content (OCI image layout tar, docker-save tar, raw or qcow2 disk)
	// and names it name[:tag] (tag "latest" when absent). The same content is stored once. Import stores the image
	// completely and durably, or stores nothing. progress may be nil; it is called with bytes read so far.
	// Errors: InvalidArgument (bad name, unknown or hostile content), DataLoss (truncated, digest mismatch),
	// ResourceExhausted (disk).
	Import(ctx context.Context, name string, r io.Reader, progress func(bytes int64)) (Image, error)

	// Get resolves a name, name:tag, name@sha256:<hex>, id or unique id prefix. NotFound if nothing matches, or if the
	// name's image has another digest.
	Get(ctx context.Context, ref string) (Image, error)

	// List returns every image, sorted by name. One image with two names appears twice.
	List(ctx context.Context) ([]Image, error)

	// Remove removes the name or id ref. Content without a name is deleted, unless inUse reports it.
	Remove(ctx context.Context, ref string, inUse func(digest string) bool) error

	// Prepare makes the disks of a VM: the shared read-only ones by reference and a private writable one. It is idempotent: existing disks
	// are kept, with their content. Blank has only the private one.
	// Errors: InvalidArgument when the storage is smaller than the image, DataLoss when its disk is damaged, ResourceExhausted (disk).
	Prepare(ctx context.Context, img Image, l Layout) (Rootfs, error)

	// Base returns the disks that Prepare would give a VM, but creates nothing. A disk that would be private to the VM has
	// no path; its backing is set.
	Base(ctx context.Context, img Image) ([]vm.Disk, error)

	// Export writes the image in a form that Import reads: an OCI image layout tar, or the disk's file.
	Export(ctx context.Context, ref string, w io.Writer) error

	// Collect frees what limits allow: first content without a name, then the images that were unused for the longest
	// time. It never touches an import in progress, what inUse reports, or what it does not know.
	Collect(ctx context.Context, limits GCLimits, inUse func(digest string) bool) (Collected, error)
}

// Blank stands for the image of an OCI guest that boots without one.
func Blank() Image { return Image{Type: vm.ImageOCI} }

// DiskOpener is the ability of a Store to read the disk of an image as a guest would.
type DiskOpener interface {
	// OpenDisk opens the disk of a disk image, without its format.
	// Errors: NotFound, DataLoss, InvalidArgument for a container image.
	OpenDisk(ctx context.Context, img Image) (*Disk, error)
}

// FileOpener is the ability of a Store to read a file of an image.
type FileOpener interface {
	// OpenFile opens the regular file at path, which is absolute, in a container image. Symbolic links lead nowhere out of the image.
	// The file stays readable if the image is removed meanwhile.
	// Errors: NotFound (the image, the file), DataLoss, InvalidArgument for a disk image and for anything but a regular file.
	OpenFile(ctx context.Context, img Image, path string) (*File, error)
}

// File is a file of an image.
type File struct {
	io.Reader
	io.Closer
	Size int64
}

// Disk is the bytes of the disk of an image, from the first to the last. They may be a sparse.FileReader.
type Disk struct {
	sparse.Holed
	io.Closer
	Size int64
}

// Puller fetches images into a Store from the places that their names stand for.
type Puller interface {
	// Pull makes sure that the store has the image, as r.Policy says, and returns it. Parallel pulls of one image share
	// one transfer; it is cancelled when every caller is gone, and then leaves nothing. progress may be nil.
	// Errors: InvalidArgument (name), NotFound (no such image at the origin, or none here with PullNever), AlreadyExists
	// (PullAlways of an image that was imported and so has no origin to check for a newer one), FailedPrecondition
	// (credentials, certificates, a mapping that is not active), DataLoss (digest, truncated), Unavailable (server,
	// network), ResourceExhausted (disk), Unsupported (another architecture).
	// progress is called only when the network is used.
	Pull(ctx context.Context, r PullRequest, progress func(Progress)) (Image, error)

	// Explain says step by step what a name means here and where it would be pulled from. It does not use the network.
	Explain(ctx context.Context, name string) (Explanation, error)

	// SyncMappings replaces the name mappings of source (e.g. "kubernetes") and returns their problems. A broken rule
	// disables only itself.
	SyncMappings(ctx context.Context, source string, mappings []Mapping) ([]MappingProblem, error)

	// Problems returns the current problems of all mappings of all sources.
	Problems(ctx context.Context) ([]MappingProblem, error)
}

// Pusher sends images of a Store to OCI registries.
type Pusher interface {
	// Push stores the image r.Ref in a registry as r.To and returns the digest of its manifest once the registry has
	// confirmed it. What the registry already has is not sent again. progress may be nil.
	// Errors: InvalidArgument (To), NotFound (Ref), FailedPrecondition (credentials refused), Unavailable (network,
	// server), ResourceExhausted (quota).
	Push(ctx context.Context, r PushRequest, progress func(Progress)) (digest string, err error)
}

// PushRequest names an image and its destination. Credentials are secret: never logged, never stored. If it has none, the
// host's own are used.
type PushRequest struct {
	Ref string // of the image in this store
	To  string // [http[s]://]HOST[:PORT]/REPOSITORY[:TAG]

	Token    string // bearer token, instead of the two below
	Username string
	Password string
	CA       []byte // PEM: trusted in addition to the system's certificates; not secret
}

// PullPolicy says when the network is used. The values are those of Kubernetes.
type PullPolicy string

// The pull policies.
const (
	PullAlways       PullPolicy = "Always"       // ask the origin whether it has something newer
	PullIfNotPresent PullPolicy = "IfNotPresent" // never use the network when the store has the name
	PullNever        PullPolicy = "Never"
)

// PullRequest asks for one image.
type PullRequest struct {
	Name   string
	Policy PullPolicy     // "" is PullAlways
	Force  bool           // fetch again even what has not changed
	Auth   []RegistryAuth // tried before the host's own credentials, in order
}

// RegistryAuth is one entry of a docker configuration. It is secret: never logged, never stored.
type RegistryAuth struct {
	Registry string // host[:port][/path], as the key in docker's "auths"
	Username string
	Password string
	Token    string // identity or bearer token, instead of the two above
}

// Progress of one pull.
type Progress struct {
	Phase string `json:"phase"` // resolving, downloading, unpacking, converting
	Done  int64  `json:"done"`  // bytes
	Total int64  `json:"total"` // bytes; -1 when not known
}

// Explanation is how a name is understood. The JSON is public API (`cocoon image explain -o json`).
type Explanation struct {
	Name      string   `json:"name"`
	Kind      string   `json:"kind"`                // mapped, url, registry or local
	Key       string   `json:"key"`                 // its key in the store
	URL       string   `json:"url,omitempty"`       // where it would be fetched from, without credentials
	Source    string   `json:"source,omitempty"`    // the mapping's file or object
	Rule      string   `json:"rule,omitempty"`      // the mapping's rule
	Transport string   `json:"transport,omitempty"` // one sentence
	Present   bool     `json:"present"`             // the store has it
	Steps     []string `json:"steps"`               // every decision, in order
}

// Mapping is one translation config: a file or a VirtletImageMapping object.
type Mapping struct {
	Name string // of the file or object
	YAML []byte // prefix, translations, transports
}

// MappingProblem is one problem of a mapping.
type MappingProblem struct {
	Source  string `json:"source"`  // files or kubernetes
	Mapping string `json:"mapping"` // of the file or object
	Rule    string `json:"rule"`    // "" when the whole mapping is affected
	Message string `json:"message"` // one sentence
}

// GCLimits limit what a store keeps. A zero value means no limit.
type GCLimits struct {
	MinAge  time.Duration // content used more recently than this is kept, whatever the other limits say
	MaxAge  time.Duration // images unused for longer are removed
	MaxSize int64         // bytes that the store may occupy
	High    int           // percent of the file system in use at which images are removed …
	Low     int           // … until it is down to this
	DryRun  bool          // only report what would be removed
}

// Collected is what a collection freed.
type Collected struct {
	Images []Image `json:"images"` // those whose names were removed, or would be
	Freed  int64   `json:"freed"`  // bytes
}

// Image is one stored image. The JSON is public API (`cocoon image list -o json`).
type Image struct {
	ID        string       `json:"id"`   // sha256:<hex>, of the content that defines it (OCI config or disk bytes)
	Name      string       `json:"name"` // name:tag
	Type      vm.ImageType `json:"type"`
	Size      int64        `json:"size"` // bytes on disk
	CreatedAt time.Time    `json:"created_at"`
	Config    vm.Process   `json:"config,omitzero"` // OCI images: entrypoint, args, env, workdir, user
	Arch      string       `json:"arch,omitempty"`
	Digest    string       `json:"digest,omitempty"` // sha256:<hex> of the registry's manifest, or of a file that was served compressed
	Source    string       `json:"source,omitempty"` // URL it was fetched from, without credentials
	UsedAt    time.Time    `json:"used_at,omitzero"` // last time it was pulled or a VM was made from it
}

// Seeder makes the disks that tell a disk guest things.
type Seeder interface {
	// Seed writes the disks of a VM into dir and returns them: the one that configures it through cloud-init, and one for each volume
	// with a label, in the order of s.Volumes. All are read-only. It is idempotent and replaces older ones.
	// Errors: InvalidArgument when the documents of s.CloudInit cannot be used, or a disk cannot have the name of a file.
	Seed(ctx context.Context, id vm.ID, s vm.Spec, nics []vm.NIC, dir string) ([]vm.Disk, error)
}

// Layout says how Prepare makes the disks of a VM.
type Layout struct {
	Dir     string // for the private ones; it exists and belongs to the VM alone
	Storage int64  // bytes of the private disk; 0: the default for a container image, the size of a disk image
	Raw     bool   // the disks are raw and have no backing files; the private one begins as a sparse copy. Otherwise it is an overlay
}

// Rootfs is what a VM of an image needs to boot.
type Rootfs struct {
	Disks []vm.Disk // the first is what a firmware boots; for an OCI guest the layers, lowest first, then the writable one
}

// SerialCOW is the serial of an OCI guest's private writable disk. Our init finds the disk by it.
const SerialCOW = "cocoon-cow"

// SerialLayer is the serial of the read-only disk with layer n of an OCI guest's image, the lowest being 0.
func SerialLayer(n int) string { return fmt.Sprintf("cocoon-l%03d", n) }

// SerialContainerLayer is the serial of read-only disk n, which holds an image layer that only containers use.
func SerialContainerLayer(n int) string { return fmt.Sprintf("cocoon-i%03d", n) }

// SerialDisk is the serial of a disk guest's one disk.
const SerialDisk = "cocoon-disk"

// Origin is where the content of a name was fetched from, so that the next pull can check for a newer version.
type Origin struct {
	URL          string    `json:"url,omitempty"` // without credentials
	ETag         string    `json:"etag,omitempty"`
	LastModified string    `json:"last_modified,omitempty"`
	Digest       string    `json:"digest,omitempty"` // of the registry's manifest or index, sha256:<hex>
	FetchedAt    time.Time `json:"fetched_at,omitzero"`
}

// IsZero reports whether the origin is unknown: the image was imported by hand.
func (o Origin) IsZero() bool { return o == Origin{} }

// Fetched describes fetched content that is put into a store.
type Fetched struct {
	Origin   Origin
	Total    int64                          // bytes that will be read; 0 or less if unknown
	Progress func(phase string, done int64) // may be nil; done counts the bytes read
	Accept   func(id string) error          // may be nil; decides, before anything is visible, whether this is the wanted content
}

// Phases of a pull.
const (
	PhaseResolve  = "resolving"
	PhaseDownload = "downloading"
	PhaseUnpack   = "unpacking"
	PhaseConvert  = "converting"
	PhaseFill     = "filling" // of a volume that is made from an image
)

// Layers opens the layers of an image in their transfer form, compressed or not. An error of a reader is returned unchanged.
type Layers func(ctx context.Context, n int) (io.ReadCloser, error)

// Grant says who has proved that they may have content, for one repository or URL that it came from.
type Grant struct {
	Public     bool     `json:"public,omitempty"`     // it came without credentials, or with the host's own
	Keys       []string `json:"keys,omitempty"`       // fingerprints of credentials that it came with, the latest last
	Namespaces []string `json:"namespaces,omitempty"` // on whose behalf one of these keys was shown
}

// Parts is an image split into the parts that a registry stores. It stays complete until Close, even if the image is removed.
type Parts struct {
	io.Closer

	Image  Image
	Config []byte        // of a container image: unchanged, so that the id stays the same
	Layers []Part        // of a container image: the lowest first
	Disk   io.ReaderAt   // of a disk image: its file
	Format vm.DiskFormat // of Disk
	Size   int64         // of Disk, bytes
}

// Part is one layer of a container image, uncompressed.
type Part struct {
	Digest string // sha256:<hex>
	Size   int64
	Write  func(ctx context.Context, w io.Writer) error // writes the bytes, verified; may be called repeatedly
}

// Package image is the contract of the image store: named, content-addressed bytes that VMs boot from.
//
// It neither starts VMs nor knows where a name comes from; implementations own their folder on disk and nothing else.
package image

import (
	"context"
	"io"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// Store keeps images. All methods are safe for concurrent use, by several processes too.
type Store interface {
	// Import reads an image from r, recognises it by content (OCI image layout tar, docker-save tar, raw or qcow2 disk)
	// and names it name[:tag] (tag "latest" when absent). The same content is stored once. Either the image is there
	// completely and durably, or nothing is. progress may be nil; it is called with bytes read so far.
	// Errors: InvalidArgument (bad name, unknown or hostile content), DataLoss (truncated, digest mismatch), ResourceExhausted (disk).
	Import(ctx context.Context, name string, r io.Reader, progress func(bytes int64)) (Image, error)

	// Get resolves a name, name:tag, id or unique id prefix. NotFound if there is none.
	Get(ctx context.Context, ref string) (Image, error)

	// List returns every image, sorted by name. One image with two names appears twice.
	List(ctx context.Context) ([]Image, error)

	// Remove forgets ref; content no name refers to is deleted, except what inUse reports.
	Remove(ctx context.Context, ref string, inUse func(digest string) bool) error

	// Prepare makes the disks of a VM in dir: the shared read-only ones by reference and a private writable one of
	// storage bytes. It is idempotent: disks that are there already are kept, with their content.
	// Errors: InvalidArgument when storage is smaller than the image.
	Prepare(ctx context.Context, img Image, dir string, storage int64) (Rootfs, error)
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
}

// Rootfs is what a VM of an image needs to boot.
type Rootfs struct {
	Disks []vm.Disk // the first is what a firmware boots, or the root file system of an OCI guest; the writable layer follows
}

// Serials of the disks of an OCI guest, by which our init finds them.
const (
	SerialRoot = "cocoon-root" // read-only file system of the image
	SerialCOW  = "cocoon-cow"  // private writable ext4
)

// SerialDisk is the serial of a disk guest's one disk.
const SerialDisk = "cocoon-disk"

package image

import (
	"context"
	"io"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

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

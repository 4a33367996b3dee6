// Package artifact is the transfer format of snapshots: media types, annotations and the config document of OCI
// artifacts, and the sparse map of tar streams.
//
// It is pure: the registry and both ends of a transfer share these values (reference: epoch's manifest encoding).
package artifact

import (
	"encoding/json"
	"time"

	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// Artifact types of manifests.
const (
	TypeSnapshot        = "application/vnd.cocoonstack.snapshot.v1+json" // every layer is a whole file
	TypeSnapshotChunked = "application/vnd.cocoonstack.snapshot.v2+json" // files are split into compressed chunks
	TypeOSImage         = "application/vnd.cocoonstack.os-image.v1+json" // a cloud image: its disk in parts, sorted by title
	TypeWindowsImage    = "application/vnd.cocoonstack.windows-image.v1+json"
)

// Media types.
const (
	MediaManifest = "application/vnd.oci.image.manifest.v1+json"
	MediaConfig   = "application/vnd.cocoonstack.snapshot.config.v1+json"
	MediaVMConfig = "application/vnd.cocoonstack.vm.config+json" // FileMeta: the snapshot's record
	MediaState    = "application/vnd.cocoonstack.vm.state"
	MediaMemory   = "application/vnd.cocoonstack.vm.memory"
	MediaCidata   = "application/vnd.cocoonstack.vm.cidata"
	MediaQCOW2    = "application/vnd.cocoonstack.disk.qcow2"
	MediaRaw      = "application/vnd.cocoonstack.disk.raw"
	MediaOther    = "application/octet-stream"

	SuffixZstd = "+zstd" // of a media type: the blob is one zstd frame
	SuffixPart = ".part" // of a disk's media type: one of several blobs
)

// TitleVMConfig is the title of the layer of MediaVMConfig: the JSON of snapshot.Snapshot, uncompressed, in every
// manifest that we write. In a tar stream it is TarHeader.Snapshot.
const TitleVMConfig = "config.json"

// Annotations of layers and manifests.
const (
	AnnotationTitle      = "org.opencontainers.image.title" // of a layer: name of the file
	AnnotationCreated    = "org.opencontainers.image.created"
	AnnotationBaseImage  = "cocoonstack.snapshot.baseimage"
	AnnotationChunkIndex = "cocoonstack.chunk.index" // of a layer: its position among those with the same title, from 0
	AnnotationChunkCount = "cocoonstack.chunk.count"
)

// PAX keys of sparse files in tar streams.
const (
	PAXSparseMap  = "COCOON.sparse.map"  // JSON list of Extent; the entry's data are the extents, one after the other
	PAXSparseSize = "COCOON.sparse.size" // decimal: size of the whole file
	PAXSum        = "COCOON.sha256"      // hex: of the entry's data as they are in the stream
)

// FileSums is the last entry of a tar stream whose writer reads each file once. It has lines in sha256sum's format, of
// the entries' data as they are in the stream.
const FileSums = "SHA256SUMS"

// Extent is a piece of a file that is not a hole.
type Extent = sparse.Extent

// Config is the config blob of a snapshot's manifest.
type Config struct {
	SchemaVersion int                 `json:"schemaVersion"` // 1
	SnapshotID    string              `json:"snapshotId"`
	Description   string              `json:"description,omitempty"`
	Image         string              `json:"image,omitempty"`
	ImageDigest   string              `json:"imageDigest,omitempty"`
	ImageType     vm.ImageType        `json:"imageType,omitempty"`
	ImageBlobIDs  map[string]struct{} `json:"imageBlobIds,omitempty"`
	Hypervisor    string              `json:"hypervisor"`
	CPU           int                 `json:"cpu"`
	Memory        int64               `json:"memory"`  // bytes
	Storage       int64               `json:"storage"` // bytes
	NICs          int                 `json:"nics"`
	Network       string              `json:"network,omitempty"`
	Windows       bool                `json:"windows,omitempty"`
	Files         map[string]File     `json:"files"` // by name
	CreatedAt     time.Time           `json:"createdAt"`
}

// File is one file of a snapshot.
type File struct {
	Mode       uint32   `json:"mode"`                 // permission bits
	SparseMap  []Extent `json:"sparseMap,omitempty"`  // of a file that is one layer: the offsets of its bytes
	SparseSize int64    `json:"sparseSize,omitempty"` // size of such a file
	Size       int64    `json:"size,omitempty"`       // of a chunked file
	Chunks     []Chunk  `json:"chunks,omitempty"`     // in ascending order; zeros between them
}

// Chunk is one piece of a chunked file. Its layer has the digest of the compressed blob. The layers of one file are in
// the order of their first use; a chunk that occurs again has no second layer.
type Chunk struct {
	Offset int64  `json:"o"`
	Length int64  `json:"l"`           // bytes, uncompressed
	Layer  string `json:"d"`           // digest of the layer's blob
	Sum    string `json:"s,omitempty"` // sha256 of the uncompressed bytes, hex
}

// TarHeader is the first entry of a tar stream, as earlier systems expect it; Snapshot is our own record.
type TarHeader struct {
	Version  int             `json:"version"` // 1
	Config   TarConfig       `json:"config"`
	Snapshot json.RawMessage `json:"snapshot,omitempty"`
}

// TarConfig describes the snapshot in the first entry.
type TarConfig struct {
	ID           string              `json:"id"`
	Name         string              `json:"name"`
	Description  string              `json:"description,omitempty"`
	Image        string              `json:"image,omitempty"`
	ImageDigest  string              `json:"image_digest,omitempty"`
	ImageType    vm.ImageType        `json:"image_type,omitempty"`
	ImageBlobIDs map[string]struct{} `json:"image_blob_ids,omitempty"`
	Hypervisor   string              `json:"hypervisor"`
	CPU          int                 `json:"cpu"`
	Memory       int64               `json:"memory"`
	Storage      int64               `json:"storage"`
	NICs         int                 `json:"nics"`
	Network      string              `json:"network,omitempty"`
	Windows      bool                `json:"windows,omitempty"`
}

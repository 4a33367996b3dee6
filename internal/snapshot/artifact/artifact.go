// Package artifact is the transfer format of snapshots: media types, annotations and the config document of OCI
// artifacts, and the sparse map of tar streams.
//
// It is pure: the registry and both ends of a transfer share these values (reference: epoch's manifest encoding).
package artifact

import (
	"encoding/json"
	"slices"

	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// Artifact types of manifests.
const (
	TypeSnapshot       = "application/vnd.cocoonstack.snapshot.v1+json"        // documented: every layer is a whole file
	TypeSnapshotV2     = "application/vnd.cocoonstack.snapshot.v2+json"        // documented: files may be split and compressed; earlier releases push ours so
	TypeSnapshotChunks = "application/vnd.cocoonstack.snapshot.chunks.v1+json" // ours: files are split into compressed chunks with offsets
	TypeOSImage        = "application/vnd.cocoonstack.os-image.v1+json"        // a cloud image: its disk in parts, sorted by title
	TypeWindowsImage   = "application/vnd.cocoonstack.windows-image.v1+json"
)

// Media types.
const (
	MediaManifest     = "application/vnd.oci.image.manifest.v1+json"
	MediaConfig       = "application/vnd.cocoonstack.snapshot.config.v1+json"
	MediaConfigChunks = "application/vnd.cocoonstack.snapshot.chunks.config.v1+json" // of TypeSnapshotChunks
	MediaVMConfig     = "application/vnd.cocoonstack.vm.config+json"                 // TitleVMConfig: our record, or another program's file
	MediaState        = "application/vnd.cocoonstack.vm.state"
	MediaMemory       = "application/vnd.cocoonstack.vm.memory"
	MediaCidata       = "application/vnd.cocoonstack.vm.cidata"
	MediaQCOW2        = "application/vnd.cocoonstack.disk.qcow2"
	MediaRaw          = "application/vnd.cocoonstack.disk.raw"
	MediaOther        = "application/octet-stream"

	SuffixZstd = "+zstd" // of a media type: the blob is one zstd frame
	SuffixPart = ".part" // of a disk's media type: one of several blobs
)

// TitleVMConfig is the file of our record, the JSON of snapshot.Snapshot: an uncompressed layer of MediaVMConfig in
// every manifest that we write, and the second entry of every tar stream. As a file it survives programs that know only
// the documented keys of the first entry. Other programs have a file of this name too; IsRecord tells them apart.
const TitleVMConfig = "config.json"

// MaxMaps limits the JSON of all sparse maps of one snapshot in the documented form, in bytes. Readers of that form read
// 1 MiB of the config, where a map is an escaped string, and 1 MiB of a tar header.
const MaxMaps = 640 << 10

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

// FitMap returns a map that covers all of m and fits into half of *left, the bytes that are left of MaxMaps, and takes
// its JSON off *left. So each further file finds room. To shorten a map, it treats the smallest holes as data.
func FitMap(m []Extent, left *int) []Extent {
	m = sparse.Fit(m, max(*left/2, 1<<10))
	*left -= len(sparse.Encode(m))
	return m
}

// IsSnapshot reports whether manifests of this artifact type are snapshots.
func IsSnapshot(artifactType string) bool {
	return slices.Contains([]string{TypeSnapshot, TypeSnapshotV2, TypeSnapshotChunks}, artifactType)
}

// IsConfig reports whether blobs of this media type are read by ParseConfig.
func IsConfig(mediaType string) bool {
	return mediaType == MediaConfig || mediaType == MediaConfigChunks
}

// TarHeader is the first entry of a tar stream, as documented.
type TarHeader struct {
	Version int       `json:"version"` // 1
	Config  TarConfig `json:"config"`
	// Snapshot is our record. In streams of earlier releases it is a key of this entry; now it is the next entry,
	// TitleVMConfig.
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
	Hypervisor   string              `json:"hypervisor"`       // snapshot.Snapshot.Backend
	Driver       string              `json:"driver,omitempty"` // our own key: snapshot.Snapshot.Hypervisor
	CPU          int                 `json:"cpu"`
	Memory       int64               `json:"memory"`
	Storage      int64               `json:"storage"`
	NICs         int                 `json:"nics"`
	Network      string              `json:"network,omitempty"`
	Windows      bool                `json:"windows,omitempty"`
}

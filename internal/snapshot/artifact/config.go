package artifact

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// Limits of a config. They bound the memory that decoding takes.
const (
	maxFiles   = 4096
	maxExtents = 2 << 20 // of one file
	maxChunks  = 2 << 20 // of one file
)

// SchemaVersion is the version of the config that we write, as documented.
const SchemaVersion Version = "v1"

// Config is the config blob of a snapshot's manifest. We write the documented keys in their documented types.
// ParseConfig also reads what earlier releases wrote.
type Config struct {
	SchemaVersion Version             `json:"schemaVersion"`
	SnapshotID    string              `json:"snapshotId"`
	Description   string              `json:"description,omitempty"`
	Image         string              `json:"image,omitempty"`
	ImageDigest   string              `json:"imageDigest,omitempty"`
	ImageType     vm.ImageType        `json:"imageType,omitempty"`
	ImageBlobIDs  map[string]struct{} `json:"imageBlobIds,omitempty"`
	Hypervisor    string              `json:"hypervisor"`       // snapshot.Snapshot.Backend
	Driver        string              `json:"driver,omitempty"` // our own key: snapshot.Snapshot.Hypervisor
	CPU           int                 `json:"cpu"`
	Memory        int64               `json:"memory"`  // bytes
	Storage       int64               `json:"storage"` // bytes
	NICs          int                 `json:"nics"`
	Network       string              `json:"network,omitempty"`
	Windows       bool                `json:"windows,omitempty"`
	Files         Files               `json:"files"`
	CreatedAt     time.Time           `json:"createdAt"`
}

// Files are the files of a snapshot by name.
type Files map[string]File

// UnmarshalJSON refuses too many files.
func (f *Files) UnmarshalJSON(data []byte) error {
	*f = nil
	if bytes.Equal(data, []byte("null")) {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if first, err := d.Token(); err != nil || first != json.Delim('{') {
		return errdefs.Invalidf("its files are not an object")
	}
	*f = Files{}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return err
		}
		var one File
		if err := d.Decode(&one); err != nil {
			return err
		}
		if (*f)[key.(string)] = one; len(*f) > maxFiles {
			return errdefs.Invalidf("it has more than the allowed %d files", maxFiles)
		}
	}
	return nil
}

// File is one file of a snapshot.
type File struct {
	Mode       int64 `json:"mode,omitempty"`       // permission bits
	SparseMap  Map   `json:"sparseMap,omitzero"`   // of a file of whole layers: the offsets of their bytes; nil: no holes
	SparseSize int64 `json:"sparseSize,omitempty"` // size of a file with a map
	Size       int64 `json:"size,omitempty"`       // of any other file
	// Chunks are the blobs of a file of ours, in ascending order; zeros are between their parts. See Pieces.
	Chunks []Chunk `json:"chunks,omitempty"`
	// Pages is the checksum of a file that has chunks with ranges: the sha256, in hex, of the hashes of all its pages. The
	// hash of a page is the first half of its sha256, or zeros for a page of zeros.
	Pages string `json:"pages,omitempty"`
	// Layers are the digests of a file's layers in the order of their bytes. It is the documented form of the key
	// chunks, which we read and never write.
	Layers []string `json:"-"`
}

// Chunk is one blob of a chunked file, and where its bytes are in the file. Its layer has the digest of the compressed
// blob. The layers of one file are in the order of their first use; a chunk that occurs again has no second layer.
type Chunk struct {
	Offset int64  `json:"o"`           // of all its bytes; 0 if it has ranges
	Length int64  `json:"l"`           // bytes, uncompressed
	Layer  string `json:"d"`           // digest of the layer's blob
	Sum    string `json:"s,omitempty"` // sha256 of the uncompressed bytes, hex
	// Ranges are the parts of the chunk that are in the file; nil: all of it is. The chunk was made for an earlier
	// snapshot, or of pages that are not next to each other.
	Ranges Ranges `json:"r,omitempty"`
}

// ParseConfig reads the config of a snapshot in the documented form, in ours, or in that of our earlier releases. It
// checks types and limits; the caller must check the values.
// Errors: InvalidArgument.
func ParseConfig(data []byte) (Config, error) {
	var c Config
	if err := json.Unmarshal(data, &c); err != nil {
		return Config{}, errdefs.Invalidf("the configuration of the snapshot cannot be read: %w", err)
	}
	return c, nil
}

// Version is the version of a config: "v1", or a number in earlier releases.
type Version string

// UnmarshalJSON accepts a string or a number.
func (v *Version) UnmarshalJSON(data []byte) error {
	var n json.Number
	if json.Unmarshal(data, &n) == nil {
		data = []byte(`"v` + n.String() + `"`)
	}
	var s string
	if err := json.Unmarshal(data, &s); err != nil {
		return err
	}
	switch s {
	case "", "v", "v0", "v1", "v2": // the first three: it is not given
		*v = Version(s)
		return nil
	}
	return errdefs.Invalidf("it has version %.40q, but this release reads versions v1 and v2", s)
}

// Map is a sparse map. Its documented JSON is a string that contains a list of extents.
type Map []Extent

// IsZero reports whether the file has no map. An empty map is of a file that is all zero.
func (m Map) IsZero() bool { return m == nil }

// MarshalJSON returns the documented form.
func (m Map) MarshalJSON() ([]byte, error) { return json.Marshal(string(sparse.Encode(m))) }

// UnmarshalJSON accepts the documented form and the list that earlier releases wrote.
func (m *Map) UnmarshalJSON(data []byte) error {
	*m = nil
	if len(data) > 0 && data[0] == '"' {
		var s string
		if err := json.Unmarshal(data, &s); err != nil {
			return err
		}
		if s == "" {
			return nil
		}
		data = []byte(s)
	}
	list, err := list(data, maxExtents, one[Extent])
	if err != nil {
		return errdefs.Invalidf("a sparse map is not a list of extents: %w", err)
	}
	*m = list
	return nil
}

// UnmarshalJSON accepts chunks in both forms.
func (f *File) UnmarshalJSON(data []byte) error {
	type plain File
	in := struct {
		*plain
		Chunks json.RawMessage `json:"chunks"`
	}{plain: (*plain)(f)}
	*f = File{}
	if err := json.Unmarshal(data, &in); err != nil {
		return err
	}
	rest, ok := bytes.CutPrefix(in.Chunks, []byte("["))
	if rest = bytes.TrimLeft(rest, " \t\r\n"); ok && len(rest) > 0 && rest[0] == '"' {
		var err error
		if f.Layers, err = list(in.Chunks, maxChunks, one[string]); err != nil {
			return errdefs.Invalidf("the chunks of a file are not a list of digests: %w", err)
		}
		return nil
	}
	var err error
	if f.Chunks, err = list(in.Chunks, maxChunks, Chunk.weight); err != nil {
		return errdefs.Invalidf("the chunks of a file are neither digests nor pieces: %w", err)
	}
	return nil
}

// one is the weight of an element that has no list of its own.
func one[T any](T) int { return 1 }

// list reads a JSON list whose elements have at most the weight most in all; nil for null or nothing. It reads one after
// the other, because a small document can have very many elements.
func list[T any](data []byte, most int, weigh func(T) int) ([]T, error) {
	if len(data) == 0 || bytes.Equal(data, []byte("null")) {
		return nil, nil
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if first, err := d.Token(); err != nil || first != json.Delim('[') {
		return nil, errdefs.Invalidf("it is not a list")
	}
	out, sum := []T{}, 0
	for d.More() {
		var next T
		if err := d.Decode(&next); err != nil {
			return nil, err
		}
		if sum += weigh(next); sum > most {
			return nil, errdefs.Invalidf("it has more than the allowed %d elements", most)
		}
		out = append(out, next)
	}
	if _, err := d.Token(); err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errdefs.Invalidf("data follows the list")
	}
	return out, nil
}

// IsRecord reports whether data, of a file TitleVMConfig, is our record of the snapshot with this id, and returns the
// name in it. Cloud Hypervisor keeps its own configuration in a file of that name.
func IsRecord(data []byte, id string) (name string, ok bool) {
	var is struct{ ID, Name string }
	ok = json.Unmarshal(data, &is) == nil && is.ID != "" && is.ID == id
	return is.Name, ok
}

// Foreign is the error for a snapshot without our record. hypervisor is what its config says.
func Foreign(hypervisor string) error {
	return errdefs.Invalidf("it is a snapshot that another system made, of a guest of the hypervisor %.100q: no hypervisor here can resume it; run its image here instead", hypervisor)
}

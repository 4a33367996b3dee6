package chunked

import (
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/ociname"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// Limits for manifests. A manifest is untrusted input.
const (
	maxConfig       = 64 << 20 // bytes
	maxRecord       = 16 << 20
	maxLayers       = 20_000
	maxFiles        = 256
	maxChunks       = 2 << 20
	maxForeignChunk = 64 << 20 // bytes of one chunk, from any system
	maxState        = 4 << 30  // bytes of devices
	maxGuest        = 64 << 40 // bytes of memory or of a disk
	slack           = 256 << 20
)

var fileName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

// incoming is a validated file of a manifest.
type incoming struct {
	name   string
	size   int64
	chunks []blob                 // of a chunked file
	pages  string                 // checksum of a chunked file, see artifact.File; "": it has none
	layers []ociclient.Descriptor // of any other: consecutive layers; empty: all of it is zero
	extent []sparse.Extent        // offsets of the layers' bytes; nil: consecutive
}

// blob is a blob of a chunked file.
type blob struct {
	layer  ociclient.Descriptor
	length int64 // uncompressed
	parts  artifact.Ranges
}

// data returns the maximum number of bytes that are written.
func (f incoming) data() int64 {
	switch {
	case len(f.layers) > 0 && f.extent != nil:
		return sparse.Data(f.extent)
	case len(f.layers) > 0:
		return f.size
	}
	var n int64
	for _, c := range f.chunks {
		for _, r := range c.parts {
			n += r.Length
		}
	}
	return n
}

func isRecord(d ociclient.Descriptor) bool {
	return d.MediaType == artifact.MediaVMConfig && d.Annotations[artifact.AnnotationTitle] == artifact.TitleVMConfig
}

// checkManifest reports whether m is a snapshot that we can read.
func checkManifest(m ociclient.Manifest) error {
	switch {
	case !artifact.IsSnapshot(m.ArtifactType):
		return errdefs.Invalidf("it is not a snapshot but %s", cmp.Or(clipped(m.ArtifactType), clipped(m.Config.MediaType), "something unknown"))
	case !artifact.IsConfig(m.Config.MediaType):
		return errdefs.Invalidf("its configuration is of the type %q, not a snapshot's", clipped(m.Config.MediaType))
	case m.Config.Size <= 0 || m.Config.Size > maxConfig:
		return errdefs.Invalidf("its configuration has %d bytes; 1 to %d are allowed", m.Config.Size, maxConfig)
	case len(m.Layers) > maxLayers:
		return errdefs.Invalidf("it has %d layers; at most %d are allowed", len(m.Layers), maxLayers)
	}
	for n, l := range append(slices.Clone(m.Layers), m.Config) {
		if !ociname.IsSHA256(l.Digest) || l.Size < 0 || l.Size > maxGuest {
			return errdefs.Invalidf("layer %d has an invalid digest or size: %q, %d bytes", n, clipped(l.Digest), l.Size)
		}
	}
	return nil
}

func clipped(s string) string {
	if len(s) > 80 {
		return s[:80] + "..."
	}
	return s
}

// parseRecord reads the snapshot's record and checks it against the config. It refuses what is not our record, and a
// snapshot that another driver than the given ones took; none: any.
func parseRecord(data []byte, c artifact.Config, drivers []string) (snapshot.Snapshot, error) {
	if _, ok := artifact.IsRecord(data, c.SnapshotID); !ok {
		return snapshot.Snapshot{}, artifact.Foreign(c.Hypervisor)
	}
	var s snapshot.Snapshot
	if err := json.Unmarshal(data, &s); err != nil {
		return snapshot.Snapshot{}, errdefs.Invalidf("the record of the snapshot cannot be read: %w", err)
	}
	if len(drivers) > 0 && !slices.Contains(drivers, s.Hypervisor) {
		return snapshot.Snapshot{}, errdefs.Invalidf("it is a snapshot of the hypervisor %q, and this node runs %s, which cannot read it", clipped(s.Hypervisor), strings.Join(drivers, ", "))
	}
	if !s.TakenBy(c.Hypervisor, c.Driver) {
		return snapshot.Snapshot{}, errdefs.Invalidf("the record and the configuration of the snapshot disagree on hypervisor: %q and %q", clipped(s.Hypervisor), clipped(cmp.Or(c.Driver, c.Hypervisor)))
	}
	for _, d := range []struct {
		what      string
		one, both any
	}{
		{"cpu", s.CPU, c.CPU},
		{"memory", s.Memory, c.Memory},
		{"storage", s.Storage, c.Storage},
		{"nics", s.NICs, c.NICs},
		{"image digest", s.ImageDigest, c.ImageDigest},
	} {
		if d.one != d.both {
			return snapshot.Snapshot{}, errdefs.Invalidf("the record and the configuration of the snapshot disagree on %s: %v and %v", d.what, d.one, d.both)
		}
	}
	if s.CPU < 0 || s.Memory < 0 || s.Live && s.Memory == 0 || s.Memory > maxGuest || s.Storage < 0 || s.Storage > maxGuest || len(s.Disks) > maxFiles {
		return snapshot.Snapshot{}, errdefs.Invalidf("the record describes an invalid VM: %d CPUs, %d bytes of memory, %d of storage and %d disks", s.CPU, s.Memory, s.Storage, len(s.Disks))
	}
	return s, nil
}

// plan determines how to assemble each file that the record needs, and refuses invalid input.
func plan(s snapshot.Snapshot, c artifact.Config, m ociclient.Manifest) ([]incoming, error) {
	limits, err := limitsOf(s)
	if err != nil {
		return nil, err
	}
	for name := range c.Files {
		if _, ok := limits[name]; !ok && !aside(name) {
			return nil, errdefs.Invalidf("the record does not list the file %q", clipped(name))
		}
	}
	titled := map[string][]ociclient.Descriptor{}
	for _, l := range m.Layers {
		name := l.Annotations[artifact.AnnotationTitle]
		if _, ok := limits[name]; !ok && !isRecord(l) && name != artifact.FileSums {
			return nil, errdefs.Invalidf("the layer %s belongs to the file %q, which the record does not list", l.Digest, clipped(name))
		}
		titled[name] = append(titled[name], l)
	}
	var out []incoming
	total := 0
	for _, n := range filesOf(s) {
		desc, ok := c.Files[n.name]
		if !ok {
			return nil, errdefs.DataLossf("the file %s, which the record lists, is missing", n.name)
		}
		if total += desc.Weight() + len(desc.Layers); total > maxChunks {
			return nil, errdefs.Invalidf("it has more than the allowed %d chunks", maxChunks)
		}
		f, err := assemble(n.name, desc, titled[n.name])
		if err != nil {
			return nil, fmt.Errorf("file %s: %w", n.name, err)
		}
		if f.size > limits[n.name] {
			return nil, errdefs.Invalidf("the file %s has %d bytes; in this VM it can have at most %d", n.name, f.size, limits[n.name])
		}
		if n.name == snapshot.FileMemory && f.size == 0 {
			return nil, errdefs.DataLossf("the memory of the snapshot is empty")
		}
		out = append(out, f)
	}
	return out, nil
}

// aside reports whether a file is in no record. A program that pushes an exported stream makes a layer of its checksums
// too; a pull needs none, because layers have digests.
func aside(name string) bool { return name == artifact.TitleVMConfig || name == artifact.FileSums }

// limitsOf returns the maximum size of each file of s.
func limitsOf(s snapshot.Snapshot) (map[string]int64, error) {
	limits := map[string]int64{}
	if s.Live {
		limits[snapshot.FileState], limits[snapshot.FileMemory] = maxState+s.Plugged(), s.Memory
	}
	for _, d := range s.Disks {
		size := max(d.Size, s.Storage)
		if d.Size < 0 || d.Size > maxGuest {
			return nil, errdefs.Invalidf("the disk %q has the invalid size of %d bytes", clipped(d.Serial), d.Size)
		}
		for _, l := range d.Layers {
			switch {
			case !fileName.MatchString(l.File) || l.File == snapshot.FileMeta || l.File == artifact.TitleVMConfig || l.File == snapshot.FileState || l.File == snapshot.FileMemory:
				return nil, errdefs.Invalidf("the disk %q has a layer in the file %q, which is not a valid name for it", clipped(d.Serial), clipped(l.File))
			case l.Format != vm.DiskRaw && l.Format != vm.DiskQCOW2:
				return nil, errdefs.Invalidf("the disk file %s has the format %q, which is not known", l.File, clipped(string(l.Format)))
			}
			if limits[l.File] = size; l.Format == vm.DiskQCOW2 || d.Size == 0 {
				limits[l.File] += size/8 + slack // tables, and clusters kept by internal snapshots
			}
		}
	}
	if len(limits) > maxFiles {
		return nil, errdefs.Invalidf("it has %d files; at most %d are allowed", len(limits), maxFiles)
	}
	return limits, nil
}

// assemble validates one file.
func assemble(name string, d artifact.File, layers []ociclient.Descriptor) (incoming, error) {
	f := incoming{name: name, size: d.Size}
	if f.size < 0 || f.size > maxGuest || d.SparseSize < 0 || d.SparseSize > maxGuest {
		return f, errdefs.Invalidf("its size of %d or %d bytes is invalid", d.Size, d.SparseSize)
	}
	switch {
	case len(d.Chunks) > 0:
		return f, f.fromChunks(d, layers)
	case len(layers) == 0 && len(d.Layers) == 0:
		f.size = max(f.size, d.SparseSize)
		return f, nil
	case d.SparseMap != nil:
		f.size, f.extent = d.SparseSize, d.SparseMap
		if err := sparse.Check(f.extent, f.size); err != nil {
			return f, err
		}
		if d.Size != 0 && d.Size != f.size && d.Size != sparse.Data(f.extent) {
			return f, errdefs.Invalidf("its size of %d bytes is neither that of the file, %d, nor that of its map, %d", d.Size, f.size, sparse.Data(f.extent))
		}
	case d.SparseSize > 0:
		return f, errdefs.Invalidf("it is sparse but has no map")
	}
	var err error
	if f.layers, err = ordered(layers, d.Layers); err != nil {
		return f, err
	}
	plain := !slices.ContainsFunc(f.layers, compressed)
	var sum int64
	for _, l := range f.layers {
		if sum += l.Size; sum > maxGuest {
			return f, errdefs.Invalidf("its layers have more than %d bytes", int64(maxGuest))
		}
	}
	switch {
	case f.extent == nil && f.size == 0 && plain: // earlier systems do not record the size
		f.size = sum
	case f.extent == nil && f.size == 0:
		return f, errdefs.Invalidf("its layers are compressed and its size is missing")
	case plain && sum != f.data():
		return f, errdefs.DataLossf("its layers have %d bytes instead of %d", sum, f.data())
	}
	return f, nil
}

func compressed(d ociclient.Descriptor) bool {
	return strings.HasSuffix(d.MediaType, artifact.SuffixZstd)
}

// ordered sorts the layers of one file: by the given digests if there are any, else by their annotations if all have
// one.
func ordered(layers []ociclient.Descriptor, digests []string) ([]ociclient.Descriptor, error) {
	if len(digests) > 0 {
		return picked(layers, digests)
	}
	out := make([]ociclient.Descriptor, len(layers))
	for n, l := range layers {
		at := l.Annotations[artifact.AnnotationChunkIndex]
		if at == "" && n == 0 {
			return layers, nil
		}
		i, err := strconv.Atoi(at)
		if err != nil || i < 0 || i >= len(layers) || out[i].Digest != "" {
			return nil, errdefs.Invalidf("the layer %s has the invalid number %q of %d", l.Digest, clipped(at), len(layers))
		}
		out[i] = l
	}
	return out, nil
}

// picked returns the layer of each digest. A layer can occur several times.
func picked(layers []ociclient.Descriptor, digests []string) ([]ociclient.Descriptor, error) {
	if len(digests) > maxLayers {
		return nil, errdefs.Invalidf("it has %d layers; at most %d are allowed", len(digests), maxLayers)
	}
	by := map[string]ociclient.Descriptor{}
	for _, l := range layers {
		by[l.Digest] = l
	}
	out := make([]ociclient.Descriptor, 0, len(digests))
	for n, d := range digests {
		l, ok := by[d]
		if !ok {
			return nil, errdefs.DataLossf("chunk %d is in the layer %q, which the manifest does not have", n, clipped(d))
		}
		out = append(out, l)
	}
	return out, nil
}

func (f *incoming) fromChunks(d artifact.File, layers []ociclient.Descriptor) error {
	by := map[string]ociclient.Descriptor{}
	for _, l := range layers {
		by[l.Digest] = l
	}
	if _, err := artifact.Pieces(d.Chunks, f.size); err != nil {
		return err
	}
	lengths := map[string]int64{}
	for n, c := range d.Chunks {
		l, ok := by[c.Layer]
		switch {
		case c.Length > maxForeignChunk:
			return errdefs.Invalidf("chunk %d has %d bytes; at most %d are allowed", n, c.Length, maxForeignChunk)
		case !ok:
			return errdefs.DataLossf("chunk %d is in the layer %q, which the manifest does not have", n, clipped(c.Layer))
		case lengths[c.Layer] != 0 && lengths[c.Layer] != c.Length:
			return errdefs.Invalidf("the layer %s has two lengths, %d and %d", c.Layer, lengths[c.Layer], c.Length)
		case !compressed(l) && l.Size != c.Length, l.Size > c.Length+c.Length/64+4096:
			return errdefs.Invalidf("the layer %s of %d bytes cannot be a chunk of %d", c.Layer, l.Size, c.Length)
		}
		lengths[c.Layer] = c.Length
		f.chunks = append(f.chunks, blob{l, c.Length, chunk{Offset: c.Offset, Length: c.Length, Ranges: c.Ranges}.parts()})
	}
	f.pages = d.Pages
	if f.pages != "" && !f.paged() {
		return errdefs.Invalidf("it has a checksum of its pages, but does not consist of whole pages")
	}
	return nil
}

// paged reports whether all parts of a chunked file are whole pages.
func (f *incoming) paged() bool {
	for _, c := range f.chunks {
		for _, r := range c.parts {
			if (r.Offset|r.Length)%page != 0 {
				return false
			}
		}
	}
	return len(f.chunks) > 0 && f.size%page == 0
}

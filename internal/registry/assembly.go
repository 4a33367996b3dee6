package registry

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"io"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/stream"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/sparse"
)

const (
	maxConfig    = 64 << 20
	maxMap       = 1<<20 - 8<<10 // of one file, in a tar header: readers accept no more
	maxFile      = 64 << 40
	headerName   = "snapshot.json" // the first entry
	windowsDisks = "application/vnd.cocoonstack.windows.disk."
	tarBlock     = 512
)

var fileName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

// assembly composes a body from the blobs that a manifest names. It finds and validates everything before the first
// byte.
type assembly struct {
	g      *Registry
	repo   string
	doc    *content.Document
	pieces []stream.Piece
	sum    string // sha256 of the body in hex, if known
}

func title(d v1.Descriptor) string { return d.Annotations[artifact.AnnotationTitle] }

func compressed(d v1.Descriptor) bool { return strings.HasSuffix(d.MediaType, artifact.SuffixZstd) }

// order returns a layer's position among those with the same title; layers without the annotation keep their order.
func order(d v1.Descriptor) int {
	n, err := strconv.Atoi(d.Annotations[artifact.AnnotationChunkIndex])
	if err != nil {
		return 0
	}
	return n
}

// have checks that a layer exists with the size that the manifest states.
func (a *assembly) have(ctx context.Context, d v1.Descriptor) error {
	info, err := a.g.content.Blob(ctx, a.repo, d.Digest)
	if err == nil && info.Size != d.Size {
		err = errdefs.DataLossf("layer %s has %d bytes instead of %d; push it again", d.Digest, info.Size, d.Size)
	}
	if errdefs.IsNotFound(err) {
		err = errdefs.DataLossf("layer %s is missing; push it again", d.Digest)
	}
	return err
}

// disk builds the body of an OS image: the layers of its disk, sorted by title.
func (a *assembly) disk(ctx context.Context) error {
	var layers []v1.Descriptor
	for _, l := range a.doc.Layers {
		kind := strings.TrimSuffix(strings.TrimSuffix(l.MediaType, artifact.SuffixZstd), artifact.SuffixPart)
		if kind == artifact.MediaRaw || kind == artifact.MediaQCOW2 || strings.HasPrefix(kind, windowsDisks) {
			layers = append(layers, l)
		}
	}
	if len(layers) == 0 {
		return errdefs.DataLossf("the OS image %s has no layer of a disk", a.repo)
	}
	slices.SortStableFunc(layers, func(x, y v1.Descriptor) int {
		return cmp.Or(cmp.Compare(title(x), title(y)), cmp.Compare(order(x), order(y)))
	})
	for _, l := range layers {
		if err := a.have(ctx, l); err != nil {
			return err
		}
		p, err := a.layer(ctx, l)
		if err != nil {
			return err
		}
		a.pieces = append(a.pieces, p)
	}
	if l := layers[0]; len(layers) == 1 && !compressed(l) && l.Digest.Algorithm() == digest.SHA256 {
		a.sum = l.Digest.Encoded()
	}
	return nil
}

// layer returns a whole layer, decompressed.
func (a *assembly) layer(ctx context.Context, l v1.Descriptor) (stream.Piece, error) {
	open := a.g.source(a.repo, l)
	if !compressed(l) {
		return stream.Plain(l.Size, open), nil
	}
	size, err := a.g.sums.size(l.Digest, func() (int64, error) { return stream.UnpackedSize(ctx, open) })
	return stream.Unpacked(size, open), err
}

// tar builds the body of a snapshot, in the format of package bundle.
func (a *assembly) tar(ctx context.Context) error {
	if a.doc.Config == nil || !artifact.IsConfig(a.doc.Config.MediaType) {
		return errdefs.DataLossf("the snapshot %s has no configuration of a snapshot", a.repo)
	}
	raw, err := a.small(ctx, *a.doc.Config)
	if err != nil {
		return err
	}
	config, err := artifact.ParseConfig(raw)
	if err != nil {
		return errdefs.DataLossf("the snapshot %s: %w", a.repo, err)
	}
	titled := map[string][]v1.Descriptor{}
	for _, l := range a.doc.Layers {
		titled[title(l)] = append(titled[title(l)], l)
	}
	record, name, err := a.record(ctx, config, titled)
	if err != nil {
		return err
	}
	head, err := json.Marshal(artifact.TarHeader{Version: 1, Config: artifact.TarConfig{
		ID: config.SnapshotID, Name: cmp.Or(name, path.Base(a.repo)), Description: config.Description, Image: config.Image, ImageDigest: config.ImageDigest,
		ImageType: config.ImageType, ImageBlobIDs: config.ImageBlobIDs, Hypervisor: config.Hypervisor, Driver: config.Driver, CPU: config.CPU, Memory: config.Memory,
		Storage: config.Storage, NICs: config.NICs, Network: config.Network, Windows: config.Windows,
	}})
	if err != nil {
		return err
	}
	if err := a.entry(headerName, int64(len(head)), 0o600, nil, 0, []stream.Piece{stream.Bytes(head)}); err != nil {
		return err
	}
	if record != nil {
		if err := a.entry(artifact.TitleVMConfig, int64(len(record)), 0o600, nil, 0, []stream.Piece{stream.Bytes(record)}); err != nil {
			return err
		}
	}
	files := slices.Collect(maps.Keys(config.Files))
	for t := range titled { // earlier systems did not list every file
		if _, ok := config.Files[t]; !ok {
			files = append(files, t)
		}
	}
	slices.Sort(files)
	for _, f := range files {
		if f == artifact.TitleVMConfig && record != nil || f == artifact.FileSums { // the sums are of another stream; layers have digests
			continue
		}
		if !fileName.MatchString(f) || f == headerName {
			return errdefs.DataLossf("the snapshot %s has a file of the name %.80q", a.repo, f)
		}
		if err := a.file(ctx, f, config.Files[f], titled[f]); err != nil {
			return err
		}
	}
	a.pieces = append(a.pieces, stream.Zeros(2*tarBlock))
	return nil
}

func (a *assembly) small(ctx context.Context, d v1.Descriptor) ([]byte, error) {
	if d.Size > maxConfig {
		return nil, errdefs.DataLossf("blob %s of the snapshot %s has %d bytes; at most %d are allowed", d.Digest, a.repo, d.Size, maxConfig)
	}
	if err := a.have(ctx, d); err != nil {
		return nil, err
	}
	f, err := a.g.source(a.repo, d)(ctx)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}

// record returns the snapshot's record and the name in it, or nil if the snapshot has none of ours.
func (a *assembly) record(ctx context.Context, c artifact.Config, titled map[string][]v1.Descriptor) ([]byte, string, error) {
	layers := titled[artifact.TitleVMConfig]
	if len(layers) != 1 || layers[0].MediaType != artifact.MediaVMConfig {
		return nil, "", nil
	}
	raw, err := a.small(ctx, layers[0])
	if err != nil {
		return nil, "", err
	}
	if name, ok := artifact.IsRecord(raw, c.SnapshotID); ok {
		return raw, name, nil
	}
	return nil, "", nil
}

// file adds one file of a snapshot.
func (a *assembly) file(ctx context.Context, name string, f artifact.File, layers []v1.Descriptor) error {
	bad := func(format string, args ...any) error {
		return errdefs.DataLossf("file %s of the snapshot %s: %w", name, a.repo, errdefs.Invalidf(format, args...))
	}
	if f.Size < 0 || f.Size > maxFile || f.SparseSize < 0 || f.SparseSize > maxFile {
		return bad("its size is invalid")
	}
	for _, l := range layers {
		if err := a.have(ctx, l); err != nil {
			return err
		}
	}
	if len(f.Chunks) > 0 {
		return a.chunked(name, f, layers, bad)
	}
	if len(layers) == 0 && len(f.Layers) == 0 {
		size := max(f.Size, f.SparseSize)
		return a.entry(name, size, f.Mode, []sparse.Extent{}, size, nil)
	}
	layers, ok := ordered(layers, f.Layers)
	if !ok {
		return bad("it lists a layer that the manifest does not have")
	}
	var pieces []stream.Piece
	var size int64
	for _, l := range layers {
		p, err := a.layer(ctx, l)
		if err != nil {
			return err
		}
		if size += p.Size; size > maxFile {
			return bad("its layers have more than %d bytes", int64(maxFile))
		}
		pieces = append(pieces, p)
	}
	if f.SparseMap == nil {
		if f.Size > 0 && f.Size != size {
			return bad("its layers have %d bytes instead of %d", size, f.Size)
		}
		return a.entry(name, size, f.Mode, nil, 0, pieces)
	}
	if err := sparse.Check(f.SparseMap, f.SparseSize); err != nil {
		return bad("%w", err)
	}
	if n := sparse.Data(f.SparseMap); n != size {
		return bad("its layers have %d bytes, its map %d", size, n)
	}
	wide := sparse.Fit(f.SparseMap, maxMap)
	if len(wide) == len(f.SparseMap) {
		return a.entry(name, size, f.Mode, f.SparseMap, f.SparseSize, pieces)
	}
	// Pieces are whole layers: split them at the extents.
	parts := make([]part, 0, len(f.SparseMap))
	var at int64
	for _, e := range f.SparseMap {
		from := at
		parts = append(parts, part{e, stream.Piece{Size: e.Length, Open: func(ctx context.Context, offset int64) (io.ReadCloser, error) {
			return section(ctx, pieces, from+offset, e.Length-offset)
		}}})
		at += e.Length
	}
	return a.entry(name, sparse.Data(wide), f.Mode, wide, f.SparseSize, widen(parts, wide))
}

// ordered sorts the layers of one file: by the given digests if there are any, else by their annotations. It reports
// whether there is a layer of each digest.
func ordered(layers []v1.Descriptor, digests []string) ([]v1.Descriptor, bool) {
	if len(digests) == 0 {
		slices.SortStableFunc(layers, func(x, y v1.Descriptor) int { return cmp.Compare(order(x), order(y)) })
		return layers, true
	}
	by := map[string]v1.Descriptor{}
	for _, l := range layers {
		by[l.Digest.String()] = l
	}
	out := make([]v1.Descriptor, 0, len(digests))
	for _, d := range digests {
		l, ok := by[d]
		if !ok {
			return nil, false
		}
		out = append(out, l)
	}
	return out, true
}

// section reads n bytes of pieces.
func section(ctx context.Context, pieces []stream.Piece, offset, n int64) (io.ReadCloser, error) {
	s := stream.New(ctx, pieces)
	if _, err := s.Seek(offset, io.SeekStart); err != nil {
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{io.LimitReader(s, n), s}, nil
}

// part is a piece and the offset of its bytes in the file.
type part struct {
	sparse.Extent
	stream.Piece
}

// widen returns the data of the extents in wide: the parts, with zeros between them.
func widen(parts []part, wide []sparse.Extent) []stream.Piece {
	var out []stream.Piece
	for _, w := range wide {
		at := w.Offset
		for len(parts) > 0 && parts[0].Offset < w.End() {
			p := parts[0]
			parts = parts[1:]
			out = append(out, stream.Zeros(p.Offset-at), p.Piece)
			at = p.End()
		}
		out = append(out, stream.Zeros(w.End()-at))
	}
	return out
}

// chunked adds a file that consists of chunks.
func (a *assembly) chunked(name string, f artifact.File, layers []v1.Descriptor, bad func(string, ...any) error) error {
	by := map[string]v1.Descriptor{}
	for _, l := range layers {
		by[l.Digest.String()] = l
	}
	pieces, err := artifact.Pieces(f.Chunks, f.Size)
	if err != nil {
		return bad("%w", err)
	}
	if n := turns(pieces, f.Chunks); n > maxTurns*f.Size+someTurns {
		return bad("its ranges take turns so often that %d bytes would be decompressed for its %d bytes", n, f.Size)
	}
	parts := make([]part, 0, len(pieces))
	var extents []sparse.Extent
	for _, x := range pieces {
		c := f.Chunks[x.Chunk]
		l, ok := by[c.Layer]
		switch {
		case !ok:
			return bad("chunk %d is in none of its layers", x.Chunk)
		case !compressed(l) && l.Size != c.Length:
			return bad("chunk %d has %d bytes, its layer %d", x.Chunk, c.Length, l.Size)
		}
		open := a.g.source(a.repo, l)
		p := part{sparse.Extent{Offset: x.Offset, Length: x.Length}, stream.Plain(x.Length, open)}
		switch {
		case c.Ranges != nil:
			p.Piece = a.ranged(l, c.Length, x.Range)
		case compressed(l):
			p.Piece = stream.Unpacked(x.Length, open)
		}
		parts = append(parts, p)
		if n := len(extents); n > 0 && extents[n-1].End() == x.Offset {
			extents[n-1].Length += x.Length
		} else {
			extents = append(extents, p.Extent)
		}
	}
	wide := sparse.Fit(extents, maxMap)
	if len(wide) == 1 && wide[0].Length == f.Size { // no holes
		return a.entry(name, f.Size, f.Mode, nil, 0, widen(parts, wide))
	}
	return a.entry(name, sparse.Data(wide), f.Mode, wide, f.Size, widen(parts, wide))
}

// entry adds a file to the tar stream: size bytes of data, placed by the map m if it is not nil.
func (a *assembly) entry(name string, size, mode int64, m []sparse.Extent, whole int64, data []stream.Piece) error {
	if mode = mode & 0o777; mode == 0 {
		mode = 0o600
	}
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: mode, ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
	if m != nil {
		h.PAXRecords = map[string]string{artifact.PAXSparseMap: string(sparse.Encode(m)), artifact.PAXSparseSize: strconv.FormatInt(whole, 10)}
		h.Size = sparse.Data(m)
	}
	var buf bytes.Buffer
	if err := tar.NewWriter(&buf).WriteHeader(h); err != nil {
		return errdefs.DataLossf("file %s of the snapshot %s: %w", name, a.repo, err)
	}
	a.pieces = append(a.pieces, stream.Bytes(buf.Bytes()))
	a.pieces = append(a.pieces, data...)
	a.pieces = append(a.pieces, stream.Zeros((tarBlock-h.Size%tarBlock)%tarBlock))
	return nil
}

package registry

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// Push implements snapshot.Remote. ref must not name a digest.
func (c *Client) Push(ctx context.Context, h snapshot.Held, ref string, auth snapshot.Auth, progress func(snapshot.Progress)) (string, error) {
	var digest string
	err := c.session(ctx, ref, auth, ociclient.Push, func(r ociclient.Ref, s *ociclient.Session) error {
		if r.Digest != "" {
			return errdefs.Invalidf("a push names a tag, not a digest: %s", r)
		}
		coarse, fresh := 1, false
		for {
			p := &push{c: c, s: s, h: h, snap: h.Snapshot(), tag: r.Tag, coarse: coarse, fresh: fresh, claimed: map[string]bool{}, m: &meter{s: s, tell: progress}}
			var err error
			digest, err = p.run(ctx)
			switch {
			case errors.Is(err, errStale) && !fresh:
				fresh = true // the index spoke of other bytes: read them all
			case errors.Is(err, errTooMany) && coarse < maxAverage/minAverage:
				coarse *= 4
			case err != nil:
				return fmt.Errorf("push snapshot %s to %s: %w", p.snap.Name, r, err)
			default:
				return nil
			}
		}
	})
	return digest, err
}

var (
	errStale   = errors.New("the chunk index does not fit the files")
	errTooMany = errdefs.Exhaustedf("the manifest would be larger than registries take")
)

// push is one attempt.
type push struct {
	c      *Client
	s      *ociclient.Session
	h      snapshot.Held
	snap   snapshot.Snapshot
	tag    string
	coarse int  // what the average chunk is multiplied with
	fresh  bool // the index is not asked
	m      *meter
	files  []*file
	room   *semaphore.Weighted
	pools  sync.Map // capacity -> *sync.Pool of chunk buffers

	mu      sync.Mutex
	claimed map[string]bool // blobs that are or will be there
}

// file is one of a snapshot on its way out.
type file struct {
	name   string
	media  string
	f      *sparse.File // nil: data is all
	data   []byte
	id     identity
	sizing sizing
	known  bool     // chunks are from the index
	chunks []*chunk // of a chunked file
	layers []ociclient.Descriptor
	desc   artifact.File
	total  int64 // bytes of data
}

func (f *file) chunked() bool { return f.sizing.average > 0 }

func (p *push) run(ctx context.Context) (string, error) {
	p.m.p.Total = -1
	p.m.phase("preparing")
	defer func() {
		for _, f := range p.files {
			if f.f != nil {
				f.f.Close()
			}
		}
	}()
	if err := p.open(); err != nil {
		return "", err
	}
	total := int64(0)
	for _, f := range p.files {
		total += f.total
	}
	p.m.total(total)
	p.m.phase("sending")
	if err := p.send(ctx); err != nil {
		return "", err
	}
	for _, f := range p.files {
		if err := p.settle(f); err != nil {
			return "", err
		}
	}
	return p.seal(ctx)
}

// open finds the files of the snapshot and decides how each is sent.
func (p *push) open() error {
	record, err := recordOf(p.snap)
	if err != nil {
		return err
	}
	p.files = append(p.files, &file{name: artifact.TitleVMConfig, media: artifact.MediaVMConfig, data: record, total: int64(len(record)), desc: artifact.File{Mode: 0o600, Size: int64(len(record))}})
	for _, n := range filesOf(p.snap) {
		f := &file{name: n.name, media: n.media}
		p.files = append(p.files, f)
		if f.f, err = p.h.Open(n.name); err != nil {
			return err
		}
		info, err := f.f.Stat()
		if err != nil {
			return err
		}
		f.id = identityOf(info)
		size := f.f.Size()
		f.desc = artifact.File{Mode: 0o600, Size: size}
		if p.c.cfg.Whole {
			f.total = size
			continue
		}
		if size <= wholeFile {
			f.total = size
			if f.data, err = io.ReadAll(io.NewSectionReader(f.f, 0, size)); err != nil {
				return fmt.Errorf("read %s: %w", n.name, err)
			}
			continue
		}
		f.sizing = sizingOf(size)
		f.sizing.average = min(f.sizing.average*p.coarse, maxAverage)
		if d, ok := p.c.index.load(f.id); ok && !p.fresh && d.Average == f.sizing.average && d.Codec == p.codec() {
			f.known = true
			for i := range d.Chunks {
				f.chunks = append(f.chunks, &d.Chunks[i])
				f.total += d.Chunks[i].Length
			}
			continue
		}
		if f.total, err = dataBytes(f.f); err != nil {
			return err
		}
	}
	return nil
}

func (p *push) codec() string {
	if p.c.cfg.Uncompressed {
		return "none"
	}
	return codecVersion
}

// job is a chunk to be sent. raw is nil when the index knows its blob.
type job struct {
	f     *file
	chunk *chunk
	raw   []byte
}

// send reads the files once, one after the other, while workers beside it compress, hash and upload.
func (p *push) send(ctx context.Context) error {
	p.room = semaphore.NewWeighted(budget)
	g, ctx := errgroup.WithContext(ctx)
	jobs := make(chan job)
	g.Go(func() error {
		defer close(jobs)
		for _, f := range p.files {
			if err := p.read(ctx, f, jobs); err != nil {
				return fmt.Errorf("read %s: %w", f.name, err)
			}
		}
		return nil
	})
	for range pushers {
		g.Go(func() error {
			e, err := newEncoder(p.c.cfg.Uncompressed)
			if err != nil {
				return err
			}
			for j := range jobs {
				err := p.work(ctx, e, j)
				e.trim()
				p.put(j.raw)
				if err != nil {
					return err
				}
				if j.raw == nil {
					p.m.done(j.chunk.Length)
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// read makes the jobs of a file.
func (p *push) read(ctx context.Context, f *file, jobs chan<- job) error {
	hand := func(j job) error {
		select {
		case jobs <- j:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	switch {
	case p.c.cfg.Whole && f.f != nil:
		return p.whole(ctx, f)
	case !f.chunked():
		return p.small(ctx, f)
	case f.known:
		for _, c := range f.chunks {
			if err := hand(job{f: f, chunk: c}); err != nil {
				return err
			}
		}
		return nil
	}
	c := chunker{
		s:   f.sizing,
		get: func() ([]byte, error) { return p.get(ctx, f.sizing.max()) },
		emit: func(offset int64, b []byte) error {
			c := &chunk{Offset: offset, Length: int64(len(b))}
			f.chunks = append(f.chunks, c) // the workers fill c, and look at nothing else
			return hand(job{f, c, b})
		},
	}
	return c.run(ctx, f.f, p.m.done)
}

// get returns a chunk buffer when there is room for it.
func (p *push) get(ctx context.Context, size int) ([]byte, error) {
	if err := p.room.Acquire(ctx, int64(size)); err != nil {
		return nil, err
	}
	pool, _ := p.pools.LoadOrStore(size, &sync.Pool{New: func() any { b := make([]byte, 0, size); return &b }})
	return *pool.(*sync.Pool).Get().(*[]byte), nil
}

func (p *push) put(b []byte) {
	if b == nil {
		return
	}
	p.room.Release(int64(cap(b)))
	pool, _ := p.pools.Load(cap(b))
	b = b[:0]
	pool.(*sync.Pool).Put(&b)
}

// work makes sure that the registry has a chunk.
func (p *push) work(ctx context.Context, e *encoder, j job) error {
	if j.raw == nil {
		return p.recall(ctx, e, j)
	}
	blob, compressed := e.encode(j.raw)
	j.chunk.Digest, j.chunk.Size, j.chunk.Compressed = ociclient.Digest(blob), int64(len(blob)), compressed
	return p.blob(ctx, j.chunk.Digest, blob)
}

// recall is work for a chunk whose blob the index knows. It is made again only when the registry does not have it.
func (p *push) recall(ctx context.Context, e *encoder, j job) error {
	if !p.claim(j.chunk.Digest) {
		return nil
	}
	if have, err := p.s.HasBlob(ctx, j.chunk.Digest); err != nil || have {
		return err
	}
	if j.chunk.Length > int64(j.f.sizing.max()) {
		return errStale
	}
	raw, err := p.get(ctx, j.f.sizing.max())
	if err != nil {
		return err
	}
	defer p.put(raw)
	raw = raw[:j.chunk.Length]
	if _, err := j.f.f.ReadAt(raw, j.chunk.Offset); err != nil {
		return fmt.Errorf("read %s: %w", j.f.name, err)
	}
	blob, _ := e.encode(raw)
	if ociclient.Digest(blob) != j.chunk.Digest {
		p.c.index.forget(j.f.id)
		return errStale
	}
	return p.s.PutBlob(ctx, j.chunk.Digest, int64(len(blob)), func() io.Reader { return bytes.NewReader(blob) })
}

// claim reports whether the caller is the first to see to a blob. If it fails, the push fails.
func (p *push) claim(digest string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	first := !p.claimed[digest]
	p.claimed[digest] = true
	return first
}

func (p *push) blob(ctx context.Context, digest string, data []byte) error {
	if !p.claim(digest) {
		return nil
	}
	if have, err := p.s.HasBlob(ctx, digest); err != nil || have {
		return err
	}
	return p.s.PutBlob(ctx, digest, int64(len(data)), func() io.Reader { return bytes.NewReader(data) })
}

// small sends a file that is one layer and in memory.
func (p *push) small(ctx context.Context, f *file) error {
	media, data := f.media, f.data
	if f.name != artifact.TitleVMConfig && len(data) > 0 { // the record is to be read by anybody
		e, err := newEncoder(p.c.cfg.Uncompressed)
		if err != nil {
			return err
		}
		if out, compressed := e.encode(data); compressed {
			media, data = media+artifact.SuffixZstd, out
		}
	}
	d := ociclient.Descriptor{MediaType: media, Digest: ociclient.Digest(data), Size: int64(len(data)), Annotations: map[string]string{artifact.AnnotationTitle: f.name}}
	f.layers = []ociclient.Descriptor{d}
	if err := p.blob(ctx, d.Digest, data); err != nil {
		return err
	}
	p.m.done(f.total)
	return nil
}

// maxExtents bounds the map of a file that is one layer: of more, the smallest holes are sent.
const maxExtents = 100_000

// whole sends the data of a file as one layer. It is read twice, to know first whether the registry has it.
func (p *push) whole(ctx context.Context, f *file) error {
	m, err := f.f.Extents()
	if err != nil {
		return err
	}
	m = sparse.Coarsen(m, maxExtents)
	size := sparse.Data(m)
	if size < f.f.Size() {
		f.desc.Size, f.desc.SparseSize, f.desc.SparseMap = 0, f.f.Size(), m
	}
	if size == 0 {
		return nil
	}
	sum := sha256.New()
	if _, err := io.CopyBuffer(sum, &cancelled{ctx, sparse.Reader(f.f, m)}, make([]byte, 1<<20)); err != nil {
		return err
	}
	d := ociclient.Descriptor{MediaType: f.media, Digest: "sha256:" + hex.EncodeToString(sum.Sum(nil)), Size: size, Annotations: map[string]string{artifact.AnnotationTitle: f.name}}
	f.layers = []ociclient.Descriptor{d}
	if p.claim(d.Digest) {
		have, err := p.s.HasBlob(ctx, d.Digest)
		if err == nil && !have {
			err = p.s.PutBlob(ctx, d.Digest, size, func() io.Reader { return sparse.Reader(f.f, m) })
		}
		if err != nil {
			return err
		}
	}
	p.m.done(f.total)
	return nil
}

// cancelled ends with its context.
type cancelled struct {
	ctx context.Context //nolint:containedctx // of the one copy that this value is for
	r   io.Reader
}

func (c *cancelled) Read(b []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(b)
}

// settle checks that a file is still what was read, describes it, and remembers its chunks.
func (p *push) settle(f *file) error {
	if f.f != nil {
		info, err := f.f.Stat()
		if err != nil {
			return err
		}
		if identityOf(info) != f.id {
			return errdefs.DataLossf("%s of the snapshot changed while it was pushed; nobody may write to it", f.name)
		}
	}
	if !f.chunked() {
		return nil
	}
	seen := map[string]bool{}
	for _, c := range f.chunks {
		f.desc.Chunks = append(f.desc.Chunks, artifact.Chunk{Offset: c.Offset, Length: c.Length, Layer: c.Digest})
		if seen[c.Digest] {
			continue
		}
		seen[c.Digest] = true
		media := f.media
		if c.Compressed {
			media += artifact.SuffixZstd
		}
		f.layers = append(f.layers, ociclient.Descriptor{MediaType: media, Digest: c.Digest, Size: c.Size, Annotations: map[string]string{artifact.AnnotationTitle: f.name}})
	}
	for i, l := range f.layers {
		l.Annotations[artifact.AnnotationChunkIndex] = fmt.Sprint(i)
		l.Annotations[artifact.AnnotationChunkCount] = fmt.Sprint(len(f.layers))
	}
	if f.known {
		return nil
	}
	d := document{Codec: p.codec(), Average: f.sizing.average, Chunks: make([]chunk, 0, len(f.chunks))}
	for _, c := range f.chunks {
		d.Chunks = append(d.Chunks, *c)
	}
	if err := p.c.index.save(f.id, d); err != nil {
		p.c.cfg.Log.Warn("chunk index not written", "snapshot", p.snap.Name, "err", err)
	}
	return nil
}

// seal writes the config and the manifest, and has the registry confirm it.
func (p *push) seal(ctx context.Context) (string, error) {
	p.m.phase("verifying")
	config, err := json.Marshal(configOf(p.snap, p.files))
	if err != nil {
		return "", fmt.Errorf("encode config: %w", err)
	}
	m := ociclient.Manifest{
		SchemaVersion: 2, MediaType: artifact.MediaManifest, ArtifactType: artifact.TypeSnapshotChunked,
		Config:      ociclient.Descriptor{MediaType: artifact.MediaConfig, Digest: ociclient.Digest(config), Size: int64(len(config))},
		Annotations: map[string]string{artifact.AnnotationCreated: p.snap.CreatedAt.UTC().Format(time.RFC3339)},
	}
	if p.c.cfg.Whole {
		m.ArtifactType = artifact.TypeSnapshot
	}
	if base := cmp.Or(p.snap.Image, p.snap.ImageDigest); base != "" {
		m.Annotations[artifact.AnnotationBaseImage] = base
	}
	for _, f := range p.files {
		m.Layers = append(m.Layers, f.layers...)
	}
	raw, err := json.Marshal(m)
	if err != nil {
		return "", fmt.Errorf("encode manifest: %w", err)
	}
	if len(raw) > ociclient.MaxManifest {
		return "", errTooMany
	}
	if err := p.blob(ctx, m.Config.Digest, config); err != nil {
		return "", err
	}
	digest, err := p.s.PutManifest(ctx, p.tag, artifact.MediaManifest, raw)
	p.m.done(0) // what moved since
	return digest, err
}

// named is a file of a snapshot and its media type.
type named struct{ name, media string }

// filesOf lists the files of s, other than its record, in the order in which they travel.
func filesOf(s snapshot.Snapshot) []named {
	var out []named
	if s.Live {
		out = append(out, named{snapshot.FileState, artifact.MediaState}, named{snapshot.FileMemory, artifact.MediaMemory})
	}
	for _, d := range s.Disks {
		for _, l := range d.Layers {
			media := artifact.MediaRaw
			if l.Format == vm.DiskQCOW2 {
				media = artifact.MediaQCOW2
			}
			if n := (named{l.File, media}); !slices.ContainsFunc(out, func(o named) bool { return o.name == n.name }) {
				out = append(out, n)
			}
		}
	}
	return out
}

// recordOf is the record as it travels: without what only this node knows, so that an unchanged snapshot is the same
// manifest again.
func recordOf(s snapshot.Snapshot) ([]byte, error) {
	s = s.Foreign().Whole()
	s.Digest, s.UsedAt, s.Size = "", time.Time{}, 0
	data, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("encode record: %w", err)
	}
	return data, nil
}

func configOf(s snapshot.Snapshot, files []*file) artifact.Config {
	c := artifact.Config{
		SchemaVersion: 1, SnapshotID: s.ID, Description: s.Description, Image: s.Image, ImageDigest: s.ImageDigest, ImageType: s.ImageType,
		Hypervisor: s.Hypervisor, CPU: s.CPU, Memory: s.Memory, Storage: s.Storage, NICs: s.NICs, Network: s.Network, Windows: s.Windows,
		Files: map[string]artifact.File{}, CreatedAt: s.CreatedAt.UTC(),
	}
	if len(s.ImageBlobIDs) > 0 {
		c.ImageBlobIDs = map[string]struct{}{}
		for _, id := range s.ImageBlobIDs {
			c.ImageBlobIDs[id] = struct{}{}
		}
	}
	for _, f := range files {
		c.Files[f.name] = f.desc
	}
	return c
}

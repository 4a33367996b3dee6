package chunked

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

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
	if err := h.Snapshot().Portable(); err != nil {
		return "", err
	}
	var digest string
	err := c.session(ctx, ref, auth, ociclient.Push, func(r ociclient.Ref, s *ociclient.Session) error {
		if r.Digest != "" {
			return errdefs.Invalidf("a push needs a tag, not a digest: %s", r)
		}
		coarse, fresh := 1, false
		for {
			p := &push{c: c, s: &ociclient.Sender{Session: s}, h: h, snap: h.Snapshot(), ref: r, coarse: coarse, fresh: fresh, maps: artifact.MaxMaps, m: &meter{s: s, tell: progress}}
			var err error
			digest, err = p.run(ctx)
			switch {
			case errors.Is(err, errStale) && !fresh:
				fresh = true // the index was stale: read all files
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
	s      *ociclient.Sender
	h      snapshot.Held
	snap   snapshot.Snapshot
	ref    ociclient.Ref
	coarse int  // factor for the average chunk size
	fresh  bool // ignore the index
	m      *meter
	files  []*file
	room   *semaphore.Weighted
	pools  sync.Map // capacity -> *sync.Pool of chunk buffers
	maps   int      // bytes left for the sparse maps of whole files
}

// file is one file of a snapshot that is being pushed.
type file struct {
	name   string
	media  string
	f      *sparse.File // nil: data is the content
	data   []byte
	id     identity
	sizing sizing
	known  bool     // chunks are from the index
	chunks []*chunk // of a chunked file
	layers []ociclient.Descriptor
	desc   artifact.File
	total  int64  // bytes of data
	pages  *pages // of memory that is read; nil: no hashes of its pages are needed
	filled bool   // pages are complete
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
			f.pages.close()
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
	digest, err := p.seal(ctx)
	if err == nil {
		p.remember(ctx)
	}
	return digest, err
}

// open opens the files of the snapshot and decides how to send each.
func (p *push) open() error {
	record, err := json.Marshal(p.snap.Travels())
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
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
			f.known, f.desc.Pages = true, d.Pages
			for i := range d.Chunks {
				f.chunks = append(f.chunks, &d.Chunks[i])
				f.total += d.Chunks[i].Length
			}
			continue
		}
		if f.total, err = dataBytes(f.f); err != nil {
			return err
		}
		if p.hashed(f) {
			if f.pages, err = p.c.index.newPages(size); err != nil {
				p.anew(err)
			}
		}
	}
	return nil
}

// hashed reports whether the hashes of the pages of f are kept, for the next push.
func (p *push) hashed(f *file) bool {
	return f.name == snapshot.FileMemory && f.chunked() && f.f.Size()%page == 0 && p.c.index.dir != ""
}

func (p *push) codec() string {
	if p.c.cfg.Uncompressed {
		return "none"
	}
	return codecVersion
}

// settle checks that a file has not changed since it was read, describes it, and stores its chunks in the index.
func (p *push) settle(f *file) error {
	if f.f != nil {
		info, err := f.f.Stat()
		if err != nil {
			return err
		}
		if identityOf(info) != f.id {
			return errdefs.DataLossf("%s of the snapshot changed during the push; no program may write to it", f.name)
		}
	}
	if !f.chunked() {
		return nil
	}
	slices.SortStableFunc(f.chunks, byFirst)
	seen, ranged := map[string]bool{}, false
	for _, c := range f.chunks {
		f.desc.Chunks = append(f.desc.Chunks, c.wire())
		ranged = ranged || c.Ranges != nil
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
	if !ranged {
		f.desc.Pages = ""
	}
	if err := p.c.index.save(f.id, p.document(f)); err != nil {
		p.c.cfg.Log.Warn("chunk index not written", "snapshot", p.snap.Name, "err", err)
	}
	return nil
}

// document is what the index stores of a file.
func (p *push) document(f *file) document {
	d := document{Codec: p.codec(), Average: f.sizing.average, Pages: f.desc.Pages, Chunks: make([]chunk, 0, len(f.chunks))}
	for _, c := range f.chunks {
		d.Chunks = append(d.Chunks, *c)
	}
	return d
}

// remember makes the memory, which the repository has now, the base of the next push. A failure is no failure of the push.
func (p *push) remember(ctx context.Context) {
	for _, f := range p.files {
		if f.f == nil || !p.hashed(f) {
			continue
		}
		key := keyOf(p.snap, p.ref, f.f.Size())
		if f.known && p.c.index.isBase(key, f.id.String()) {
			continue
		}
		err := p.hash(ctx, f)
		if err == nil {
			err = p.c.index.saveBase(key, f.id.String(), p.document(f), f.pages)
		}
		if err != nil && ctx.Err() == nil {
			p.c.cfg.Log.Warn("base of the next push not written", "snapshot", p.snap.Name, "err", err)
		}
	}
}

// hash makes the hashes of the pages of f, if they were not made while it was read.
func (p *push) hash(ctx context.Context, f *file) (err error) {
	if f.pages != nil {
		return nil
	}
	if f.pages, err = p.c.index.newPages(f.f.Size()); err != nil {
		return err
	}
	return f.pages.fill(ctx, f.f)
}

// seal sends the config and the manifest; the registry then confirms the manifest.
func (p *push) seal(ctx context.Context) (string, error) {
	p.m.phase("verifying")
	config, err := json.Marshal(configOf(p.snap, p.files))
	if err != nil {
		return "", fmt.Errorf("encode config: %w", err)
	}
	m := ociclient.Manifest{
		SchemaVersion: 2, MediaType: artifact.MediaManifest, ArtifactType: artifact.TypeSnapshotChunks,
		Config:      ociclient.Descriptor{MediaType: artifact.MediaConfigChunks, Digest: ociclient.Digest(config), Size: int64(len(config))},
		Annotations: map[string]string{artifact.AnnotationCreated: p.snap.CreatedAt.UTC().Format(time.RFC3339)},
	}
	if p.c.cfg.Whole {
		m.ArtifactType, m.Config.MediaType = artifact.TypeSnapshot, artifact.MediaConfig
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
	digest, err := p.s.PutManifest(ctx, p.ref.Tag, artifact.MediaManifest, raw)
	p.m.done(0) // reports the bytes moved since the last report
	return digest, err
}

// named is a file of a snapshot and its media type.
type named struct{ name, media string }

// filesOf lists the files of s, without its record, in the order in which they are transferred.
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

func configOf(s snapshot.Snapshot, files []*file) artifact.Config {
	c := artifact.Config{
		SchemaVersion: artifact.SchemaVersion, SnapshotID: s.ID, Description: s.Description, Image: s.Image, ImageDigest: s.ImageDigest, ImageType: s.ImageType,
		Hypervisor: s.Backend(), Driver: s.Hypervisor, CPU: s.CPU, Memory: s.Memory, Storage: s.Storage, NICs: s.NICs, Network: s.Network, Windows: s.Windows,
		Files: artifact.Files{}, CreatedAt: s.CreatedAt.UTC(),
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

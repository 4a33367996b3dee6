package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/sparse"
)

// Pull implements snapshot.Remote.
func (c *Client) Pull(ctx context.Context, ref, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	var out snapshot.Snapshot
	err := c.session(ctx, ref, auth, ociclient.Pull, func(r ociclient.Ref, s *ociclient.Session) (err error) {
		p := &pull{c: c, s: s, m: &meter{s: s, tell: progress}, held: map[string]snapshot.Held{}}
		if out, err = p.run(ctx, r, name); err != nil {
			return fmt.Errorf("pull %s: %w", r, full(err))
		}
		return nil
	})
	return out, err
}

// full says what a full disk means.
func full(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errdefs.As(errdefs.ResourceExhausted, fmt.Errorf("the disk is full; remove snapshots with `cocoon snapshot rm`: %w", err))
	}
	return err
}

// pull is one pull.
type pull struct {
	c     *Client
	s     *ociclient.Session
	m     *meter
	files []incoming
	dir   string
	open  map[string]*os.File
	local map[string]place
	held  map[string]snapshot.Held // snapshots that chunks are taken from
	room  *semaphore.Weighted
}

func (p *pull) run(ctx context.Context, r ociclient.Ref, name string) (snapshot.Snapshot, error) {
	none := snapshot.Snapshot{}
	p.m.p.Total = -1
	p.m.phase("preparing")
	digest, manifest, config, record, err := p.describe(ctx, r)
	if err != nil {
		return none, err
	}
	if p.files, err = plan(record, config, manifest); err != nil {
		return none, err
	}
	if name == "" {
		name = record.Name
	}
	draft, err := p.c.store.Create(ctx, name)
	if err != nil {
		return none, err
	}
	defer func() {
		if err := draft.Discard(); err != nil {
			p.c.cfg.Log.Warn("draft not removed", "snapshot", draft.ID(), "err", err)
		}
	}()
	p.dir = draft.Dir()
	if err := p.enough(); err != nil {
		return none, err
	}
	if err := p.fetch(ctx); err != nil {
		return none, err
	}
	p.m.phase("verifying")
	record.Digest = digest
	s, err := draft.Commit(ctx, record)
	if err != nil {
		return none, err
	}
	p.remember(ctx, s)
	return s, nil
}

// describe reads what there is, before any data.
func (p *pull) describe(ctx context.Context, r ociclient.Ref) (digest string, m ociclient.Manifest, config artifact.Config, record snapshot.Snapshot, err error) {
	if digest, m, err = p.s.Image(ctx, r.Identifier(), runtime.GOARCH); err != nil {
		return digest, m, config, record, err
	}
	if err = checkManifest(m); err != nil {
		return digest, m, config, record, err
	}
	raw, err := p.small(ctx, m.Config)
	if err != nil {
		return digest, m, config, record, fmt.Errorf("its configuration: %w", err)
	}
	if err := json.Unmarshal(raw, &config); err != nil {
		return digest, m, config, record, errdefs.Invalidf("its configuration cannot be read: %w", err)
	}
	if err = foreign(config, m, p.c.cfg.Hypervisor); err != nil {
		return digest, m, config, record, err
	}
	l := m.Layers[slices.IndexFunc(m.Layers, isRecord)]
	if l.Size > maxRecord {
		return digest, m, config, record, errdefs.Invalidf("its record has %d bytes; at most %d are plausible", l.Size, maxRecord)
	}
	if raw, err = p.small(ctx, l); err != nil {
		return digest, m, config, record, fmt.Errorf("its record: %w", err)
	}
	record, err = parseRecord(raw, config)
	return digest, m, config, record, err
}

// small reads a blob whose size was found plausible.
func (p *pull) small(ctx context.Context, d ociclient.Descriptor) ([]byte, error) {
	b := p.s.Blob(ctx, d.Digest, d.Size)
	defer b.Close()
	return io.ReadAll(b)
}

// enough refuses to begin what cannot end.
func (p *pull) enough() error {
	var need, total int64
	for _, f := range p.files {
		total += f.data()
	}
	p.m.total(total)
	var st unix.Statfs_t
	if err := unix.Statfs(p.dir, &st); err != nil {
		return nil //nolint:nilerr // then the disk will tell
	}
	if need = total; need > int64(st.Bavail)*st.Bsize { //nolint:gosec // of a file system
		return errdefs.Exhaustedf("the snapshot needs %d MiB and the disk has %d MiB left; remove snapshots with `cocoon snapshot rm`", need>>20, int64(st.Bavail)*st.Bsize>>20) //nolint:gosec // likewise
	}
	return nil
}

// task is one blob, or one file made of whole layers.
type task struct {
	layer   ociclient.Descriptor
	length  int64
	targets []target
	whole   *incoming
}

type target struct {
	f      *os.File
	offset int64
}

// fetch makes the files.
func (p *pull) fetch(ctx context.Context) error {
	p.m.phase("fetching")
	p.open = map[string]*os.File{}
	defer func() {
		for _, f := range p.open {
			f.Close()
		}
		for _, h := range p.held {
			h.Release()
		}
	}()
	tasks, err := p.tasks()
	if err != nil {
		return err
	}
	if err := p.borrow(ctx, tasks); err != nil {
		return err
	}
	p.room = semaphore.NewWeighted(budget)
	g, ctx := errgroup.WithContext(ctx)
	queue := make(chan task)
	g.Go(func() error {
		defer close(queue)
		for _, t := range tasks {
			select {
			case queue <- t:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	})
	for range min(pullers, max(1, len(tasks))) {
		g.Go(func() error {
			w, err := p.newWorker()
			if err != nil {
				return err
			}
			defer w.dec.close()
			for t := range queue {
				if err := w.do(ctx, t); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, f := range p.open {
		err := f.Close()
		if err != nil {
			return err
		}
	}
	clear(p.open)
	return nil
}

// tasks makes the files, empty and of their size, and lists what fills them: each blob once.
func (p *pull) tasks() ([]task, error) {
	var out []task
	at := map[string]int{}
	for i := range p.files {
		f := &p.files[i]
		w, err := os.OpenFile(filepath.Join(p.dir, f.name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return nil, err
		}
		p.open[f.name] = w
		if err := w.Truncate(f.size); err != nil {
			return nil, err
		}
		if len(f.layers) > 0 {
			out = append(out, task{whole: f})
		}
		for _, c := range f.chunks {
			n, ok := at[c.layer.Digest]
			if ok && out[n].length != c.length {
				return nil, errdefs.Invalidf("the layer %s has two lengths, %d and %d", c.layer.Digest, out[n].length, c.length)
			}
			if !ok {
				n, at[c.layer.Digest] = len(out), len(out)
				out = append(out, task{layer: c.layer, length: c.length})
			}
			out[n].targets = append(out[n].targets, target{w, c.offset})
		}
	}
	return out, nil
}

// borrow finds what local snapshots have already, and keeps those from going away.
func (p *pull) borrow(ctx context.Context, tasks []task) error {
	wanted := map[string]bool{}
	for _, t := range tasks {
		wanted[t.layer.Digest] = t.whole == nil
	}
	p.local = p.c.index.places(ctx, p.c.store, wanted)
	for digest, at := range p.local {
		if p.held[at.snapshot] != nil {
			continue
		}
		h, err := p.c.store.Hold(ctx, at.snapshot)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			delete(p.local, digest)
			continue
		}
		p.held[at.snapshot] = h
	}
	return nil
}

// worker is one of those that fetch at once.
type worker struct {
	p   *pull
	dec *decoder
	enc *encoder // made when something is borrowed
	raw []byte
}

func (p *pull) newWorker() (*worker, error) {
	d, err := newDecoder()
	return &worker{p: p, dec: d}, err
}

func (w *worker) do(ctx context.Context, t task) error {
	if t.whole != nil {
		if err := w.whole(ctx, t.whole); err != nil {
			return fmt.Errorf("file %s: %w", t.whole.name, err)
		}
		return nil
	}
	need := min(t.length+t.layer.Size, budget)
	if err := w.p.room.Acquire(ctx, need); err != nil {
		return err
	}
	defer func() {
		w.trim()
		w.p.room.Release(need)
	}()
	data, ok := w.borrow(t)
	if !ok {
		var err error
		if data, err = w.fetch(ctx, t); err != nil {
			return err
		}
	}
	for _, to := range t.targets {
		if err := sparse.WriteAt(to.f, data, to.offset); err != nil {
			return err
		}
		sparse.Flush(to.f, to.offset, int64(len(data)))
		w.p.m.done(int64(len(data)))
	}
	return nil
}

// trim lets go of what the budget does not count between chunks.
func (w *worker) trim() {
	w.dec.trim()
	if w.enc != nil {
		w.enc.trim()
	}
	if cap(w.raw) > keep {
		w.raw = nil
	}
}

// fetch returns the bytes of a chunk from the registry.
func (w *worker) fetch(ctx context.Context, t task) ([]byte, error) {
	if int64(cap(w.raw)) < t.layer.Size {
		w.raw = make([]byte, t.layer.Size)
	}
	blob := w.raw[:t.layer.Size]
	r := w.p.s.Blob(ctx, t.layer.Digest, t.layer.Size)
	defer r.Close()
	if _, err := io.ReadFull(r, blob); err != nil {
		return nil, err
	}
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, io.EOF) { // the verdict on the digest
		return nil, err
	}
	if !compressed(t.layer) {
		return blob, nil
	}
	data, err := w.dec.decode(blob, int(t.length))
	if err != nil {
		return nil, fmt.Errorf("the layer %s: %w", t.layer.Digest, err)
	}
	return data, nil
}

// borrow returns the bytes of a chunk from a local snapshot. They are verified by making their blob again; should that
// come out otherwise, they are fetched.
func (w *worker) borrow(t task) ([]byte, bool) {
	at, ok := w.p.local[t.layer.Digest]
	h := w.p.held[at.snapshot]
	if !ok || h == nil || at.chunk.Length != t.length {
		return nil, false
	}
	if w.enc == nil {
		e, err := newEncoder(false)
		if err != nil {
			return nil, false
		}
		w.enc = e
	}
	f, err := h.Open(at.file)
	if err != nil {
		return nil, false
	}
	defer f.Close()
	if int64(cap(w.raw)) < t.length {
		w.raw = make([]byte, t.length)
	}
	raw := w.raw[:t.length]
	if _, err := f.ReadAt(raw, at.chunk.Offset); err != nil {
		return nil, false
	}
	blob := raw
	if compressed(t.layer) {
		blob, _ = w.enc.encode(raw)
	}
	return raw, ociclient.Digest(blob) == t.layer.Digest
}

// whole makes a file of layers that follow each other.
func (w *worker) whole(ctx context.Context, f *incoming) error {
	extents := f.extent
	if extents == nil {
		extents = []sparse.Extent{{Length: f.size}}
	}
	out := &scatter{f: w.p.open[f.name], to: slices.Clone(extents), m: w.p.m}
	buf := make([]byte, 1<<20)
	for _, l := range f.layers {
		if err := w.layer(ctx, l, out, buf); err != nil {
			return err
		}
	}
	if out.left() > 0 {
		return errdefs.DataLossf("it is truncated: %d bytes are missing", out.left())
	}
	return nil
}

func (w *worker) layer(ctx context.Context, l ociclient.Descriptor, out io.Writer, buf []byte) error {
	b := w.p.s.Blob(ctx, l.Digest, l.Size)
	defer b.Close()
	var r io.Reader = b
	if compressed(l) {
		z, err := zstd.NewReader(b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxForeignChunk), zstd.WithDecoderLowmem(true))
		if err != nil {
			return err
		}
		defer z.Close()
		r = z
	}
	if _, err := io.CopyBuffer(out, r, buf); err != nil {
		return damaged(l, err)
	}
	if _, err := io.Copy(io.Discard, b); err != nil { // to the verdict on the digest
		return err
	}
	return nil
}

// damaged classes what a decompressor says.
func damaged(l ociclient.Descriptor, err error) error {
	if compressed(l) && errdefs.ClassOf(err) == errdefs.Internal && !errors.Is(err, unix.ENOSPC) && !errors.Is(err, context.Canceled) {
		return errdefs.DataLossf("the layer %s is no zstd frame: %w", l.Digest, err)
	}
	return err
}

// scatter writes a stream to the extents of a file.
type scatter struct {
	f  *os.File
	to []sparse.Extent
	m  *meter
}

func (s *scatter) left() int64 { return sparse.Data(s.to) }

func (s *scatter) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		if len(s.to) == 0 {
			return done, errdefs.DataLossf("it is longer than the manifest says")
		}
		e := &s.to[0]
		n := min(int64(len(p)-done), e.Length)
		if err := sparse.WriteAt(s.f, p[done:done+int(n)], e.Offset); err != nil {
			return done, err
		}
		sparse.Flush(s.f, e.Offset, n)
		done += int(n)
		if e.Offset, e.Length = e.Offset+n, e.Length-n; e.Length == 0 {
			s.to = s.to[1:]
		}
	}
	s.m.done(int64(done))
	return done, nil
}

// remember keeps the chunks of a snapshot that was pulled, so that pushing it again reads nothing.
func (p *pull) remember(ctx context.Context, s snapshot.Snapshot) {
	if p.c.index.dir == "" {
		return
	}
	h, err := p.c.store.Hold(ctx, s.ID)
	if err != nil {
		return
	}
	defer h.Release()
	for _, f := range p.files {
		if len(f.chunks) == 0 {
			continue
		}
		info, err := os.Stat(filepath.Join(h.Dir(), f.name))
		if err != nil {
			continue
		}
		d := document{Codec: codecVersion, Average: sizingOf(f.size).average}
		for _, c := range f.chunks {
			d.Chunks = append(d.Chunks, chunk{c.offset, c.length, c.layer.Digest, c.layer.Size, compressed(c.layer)})
		}
		if !d.native() {
			continue
		}
		if err := p.c.index.save(identityOf(info), d); err != nil {
			p.c.cfg.Log.Warn("chunk index not written", "snapshot", s.Name, "err", err)
		}
	}
}

package chunked

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/sparse"
)

// task is one blob, or one file made of whole layers.
type task struct {
	layer   ociclient.Descriptor
	length  int64
	targets []target
	whole   *incoming
}

// target is a part of a file that the blob fills.
type target struct {
	f *output
	artifact.Range
}

// output is a file that is being written.
type output struct {
	*os.File

	pages *pages // nil: no hashes of its pages are needed

	mu sync.Mutex
}

// fetch writes the files.
func (p *pull) fetch(ctx context.Context) error {
	p.m.phase("fetching")
	p.open = map[string]*output{}
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
	if p.early {
		tasks = p.postpone(tasks)
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
			dec, err := newDecoder()
			if err != nil {
				return err
			}
			defer dec.close()
			w := &worker{p: p, dec: dec}
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

// worker is one of the concurrent fetchers.
type worker struct {
	p   *pull
	dec *decoder
	enc *encoder // created for the first borrowed chunk
	raw []byte
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
	done := int64(0)
	for _, to := range t.targets {
		if err := to.write(data[to.From : to.From+to.Length]); err != nil {
			return err
		}
		done += to.Length
	}
	w.p.m.done(done)
	return nil
}

const flushed = 64 << 10 // a part of at least this many bytes is sent to the disk at once

// write writes data at its offset. The kernel serializes writes to one file; waiting for this mutex costs less than
// waiting in the kernel.
func (t target) write(data []byte) error {
	if t.f.pages != nil {
		t.f.pages.put(t.Offset, data)
	}
	t.f.mu.Lock()
	err := sparse.WriteAt(t.f.File, data, t.Offset)
	t.f.mu.Unlock()
	if err == nil && len(data) >= flushed {
		sparse.Flush(t.f.File, t.Offset, int64(len(data)))
	}
	return err
}

// trim frees buffers between chunks that the budget does not count.
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
	r := w.p.blob(ctx, t.layer)
	defer r.Close()
	if _, err := io.ReadFull(r, blob); err != nil {
		return nil, err
	}
	if _, err := r.Read(make([]byte, 1)); !errors.Is(err, io.EOF) { // this read verifies the digest
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

// borrow returns the bytes of a chunk from a local snapshot. It verifies them: it makes their blob again and compares
// the digest; on a mismatch, the caller fetches the chunk.
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
	if err := readChunk(f, at.chunk.whole(), raw); err != nil {
		return nil, false
	}
	blob := raw
	if compressed(t.layer) {
		blob, _ = w.enc.encode(raw)
	}
	return raw, ociclient.Digest(blob) == t.layer.Digest
}

// whole writes a file from consecutive layers.
func (w *worker) whole(ctx context.Context, f *incoming) error {
	extents := f.extent
	if extents == nil {
		extents = []sparse.Extent{{Length: f.size}}
	}
	out := &scatter{f: w.p.open[f.name].File, to: slices.Clone(extents), m: w.p.m}
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
	b := w.p.blob(ctx, l)
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
	if _, err := io.Copy(io.Discard, b); err != nil { // read to the end to verify the digest
		return err
	}
	return nil
}

// damaged classifies a decompression error.
func damaged(l ociclient.Descriptor, err error) error {
	if compressed(l) && errdefs.ClassOf(err) == errdefs.Internal && !errors.Is(err, unix.ENOSPC) && !errors.Is(err, context.Canceled) {
		return errdefs.DataLossf("the layer %s is not a zstd frame: %w", l.Digest, err)
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

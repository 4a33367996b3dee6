package chunked

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"sync"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/sparse"
)

// job is a chunk to send. raw is nil if the index knows the chunk's blob.
type job struct {
	f     *file
	chunk *chunk
	raw   []byte
}

// send reads the files once, one after the other, while workers compress, hash and upload concurrently.
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
	if f.pages != nil && p.coarse == 1 {
		if done, err := p.rebase(ctx, f, hand); done || err != nil {
			return err
		}
	}
	c := chunker{
		s:   f.sizing,
		get: func() ([]byte, error) { return p.get(ctx, f.sizing.max()) },
		emit: func(offset int64, b []byte) error {
			c := &chunk{Offset: offset, Length: int64(len(b))}
			f.chunks = append(f.chunks, c) // only the workers fill c, and they access nothing else
			return hand(job{f, c, b})
		},
	}
	return c.run(ctx, f.f, p.m.done)
}

// get waits for room in the budget and returns a chunk buffer.
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
	if j.f.pages != nil && !j.f.filled {
		j.f.pages.put(j.chunk.Offset, j.raw)
	}
	return p.blob(ctx, j.chunk.Digest, blob)
}

// recall is work for a chunk whose blob is in the index. It makes the blob again only if the registry does not have it.
func (p *push) recall(ctx context.Context, e *encoder, j job) error {
	if !p.s.Claim(j.chunk.Digest) {
		return nil
	}
	if have, err := p.s.HasBlob(ctx, j.chunk.Digest); err != nil || have {
		return err
	}
	parts := j.chunk.whole()
	if parts == nil || j.chunk.Length > int64(j.f.sizing.max()) {
		return errStale
	}
	raw, err := p.get(ctx, j.f.sizing.max())
	if err != nil {
		return err
	}
	defer p.put(raw)
	raw = raw[:j.chunk.Length]
	if err := readChunk(j.f.f, parts, raw); err != nil {
		return fmt.Errorf("read %s: %w", j.f.name, err)
	}
	blob, _ := e.encode(raw)
	if ociclient.Digest(blob) != j.chunk.Digest {
		p.c.index.forget(j.f.id)
		return errStale
	}
	return p.s.PutBlob(ctx, j.chunk.Digest, int64(len(blob)), func() io.Reader { return bytes.NewReader(blob) })
}

func (p *push) blob(ctx context.Context, digest string, data []byte) error {
	return p.s.Send(ctx, digest, int64(len(data)), func() io.Reader { return bytes.NewReader(data) })
}

// small sends a file that is in memory as one layer.
func (p *push) small(ctx context.Context, f *file) error {
	media, data := f.media, f.data
	if f.name != artifact.TitleVMConfig && len(data) > 0 { // the record stays uncompressed: anybody can read it
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

// whole sends the data of a file as one layer, as documented. It reads the file twice: the first time to learn whether
// the registry has it. A file without data has an empty layer, because readers make a file of each layer.
func (p *push) whole(ctx context.Context, f *file) error {
	m, err := f.f.Extents()
	if err != nil {
		return err
	}
	if sparse.Data(m) < f.f.Size() {
		m = artifact.FitMap(m, &p.maps)
		f.desc.Size, f.desc.SparseSize, f.desc.SparseMap = 0, f.f.Size(), append(artifact.Map{}, m...) // not nil, even if the whole file is a hole
	}
	size := sparse.Data(m)
	digest, err := ociclient.DigestOf(ctx, sparse.Reader(f.f, m))
	if err != nil {
		return err
	}
	f.layers = []ociclient.Descriptor{{MediaType: f.media, Digest: digest, Size: size, Annotations: map[string]string{artifact.AnnotationTitle: f.name}}}
	if err := p.s.Send(ctx, digest, size, func() io.Reader { return sparse.Reader(f.f, m) }); err != nil {
		return err
	}
	p.m.done(f.total)
	return nil
}

package chunked

import (
	"bytes"
	"cmp"
	"context"
	"io"
	"slices"

	"golang.org/x/sync/errgroup"

	"cocoonstack.io/cocoon/internal/snapshot/artifact"
	"cocoonstack.io/cocoon/internal/sparse"
)

// Limits of a push that refers to the blobs of earlier ones. Each such push leaves bytes in them that no file needs, and
// splits the file into more parts. What is beyond the limits is sent again.
const (
	leastUsed  = 2         // a blob of which less than one in this many bytes is used is not referred to
	mostUnused = 4         // there is at most one unused byte in the blobs for this many used ones
	mostParts  = 256 << 10 // of the file; each adds about 24 bytes to the configuration
	mostBlobs  = 8192
	gathered   = 512 << 10 // bytes of changed pages in one blob
)

// reused is a blob of the base, and what the file still has of it.
type reused struct {
	chunk

	used int64 // bytes
}

// rebase is the plan of a push that refers to the blobs of a base.
type rebase struct {
	blobs   []*reused
	changed []sparse.Extent // what is sent: pages that differ from the base, and pages of blobs that are not referred to
	bytes   int64           // of changed
	total   int64           // bytes of changed and of all blobs
}

// compare lists what the pages of a file have in common with those of the base, whose bytes are in its pieces.
func compare(b *base, now *pages) ([]*reused, error) {
	if err := now.err(); err != nil {
		return nil, err
	}
	by := map[string]*reused{}
	var out []*reused
	was := make([]byte, readSize/page*pageHash)
	is := make([]byte, len(was))
	for _, p := range b.pieces {
		c := b.Chunks[p.Chunk]
		r := by[c.Digest]
		if r == nil {
			r = &reused{chunk: chunk{Length: c.Length, Digest: c.Digest, Size: c.Size, Compressed: c.Compressed, Ranges: artifact.Ranges{}}}
			by[c.Digest], out = r, append(out, r)
		}
		if p.Offset%page != 0 || p.Length%page != 0 || p.From%page != 0 || c.Length > artifact.MaxRangedBlob || c.Length != r.Length {
			continue // of another system
		}
		same := run{r: r, shift: p.From - p.Offset}
		for at := p.Offset; at < p.End(); at += readSize {
			n := min(readSize, p.End()-at) / page * pageHash
			if _, err := b.pages.readAt(was[:n], at); err != nil {
				return nil, err
			}
			if _, err := now.readAt(is[:n], at); err != nil {
				return nil, err
			}
			for k := int64(0); k < n; k += pageHash {
				same.add(at+k/pageHash*page, was[k:k+pageHash], is[k:k+pageHash])
			}
		}
		same.flush()
	}
	return slices.DeleteFunc(out, func(r *reused) bool { return r.used*leastUsed < r.Length }), nil
}

// run collects consecutive pages that did not change. It begins and ends with pages that are not zero.
type run struct {
	r          *reused
	shift      int64 // from an offset in the file to one in the blob
	start, end int64
}

func (s *run) add(at int64, was, is []byte) {
	switch {
	case !bytes.Equal(was, is):
		s.flush()
	case bytes.Equal(is, zeroes[:pageHash]): // it is in the run if a page that is not zero follows
	case s.end == 0:
		s.start, s.end = at, at+page
	default:
		s.end = at + page
	}
}

func (s *run) flush() {
	if s.end > 0 {
		s.r.Ranges = append(s.r.Ranges, artifact.Range{Offset: s.start, Length: s.end - s.start, From: s.start + s.shift})
		s.r.used += s.end - s.start
	}
	s.start, s.end = 0, 0
}

// plan decides what to send of a file with these pages.
func (r *rebase) plan(now *pages) error {
	if err := r.diff(now); err != nil {
		return err
	}
	r.total = r.bytes
	unused := int64(0)
	for _, b := range r.blobs {
		r.total += b.used
		unused += max(0, b.Length-b.used)
	}
	slices.SortFunc(r.blobs, func(a, b *reused) int {
		return cmp.Or(cmp.Compare(float64(a.used)/float64(a.Length), float64(b.used)/float64(b.Length)), cmp.Compare(a.Digest, b.Digest))
	})
	for len(r.blobs) > 0 && unused*mostUnused > r.total {
		unused -= max(0, r.blobs[0].Length-r.blobs[0].used)
		r.blobs = r.blobs[1:]
	}
	return r.diff(now)
}

// diff sets what the blobs do not have.
func (r *rebase) diff(now *pages) error {
	have, differs := sparse.NewPages(now.size), sparse.NewPages(now.size)
	for _, b := range r.blobs {
		for _, x := range b.Ranges {
			have.Add([]sparse.Extent{{Offset: x.Offset, Length: x.Length}})
		}
	}
	hashes := make([]byte, readSize)
	for at := int64(0); at < now.size; at += readSize / pageHash * page {
		n := min(readSize, (now.size-at)/page*pageHash)
		if _, err := now.readAt(hashes[:n], at); err != nil {
			return err
		}
		if sparse.IsZero(hashes[:n]) {
			continue
		}
		for k := int64(0); k < n; k += pageHash {
			if p := at/page + k/pageHash; !have.Has(p) && !bytes.Equal(hashes[k:k+pageHash], zeroes[:pageHash]) {
				differs.Set(p)
			}
		}
	}
	r.changed, r.bytes = differs.Extents(now.size), differs.Count()*page
	return nil
}

// good reports whether a push by this plan is better than one of new chunks.
func (r *rebase) good() bool {
	parts := int64(len(r.changed))
	for _, b := range r.blobs {
		parts += int64(len(b.Ranges))
	}
	return r.bytes*2 <= r.total && parts <= mostParts && int64(len(r.blobs))+r.bytes/gathered < mostBlobs
}

// rebase reports whether f differs so little from the VM's last push that this push refers to its blobs. Then it hands out
// the jobs of f. Otherwise it has sent nothing.
func (p *push) rebase(ctx context.Context, f *file, hand func(job) error) (bool, error) {
	b, ok := p.c.index.base(keyOf(p.snap, p.ref, f.f.Size()))
	if !ok {
		return false, nil
	}
	defer b.pages.close()
	if err := f.pages.fill(ctx, f.f); err != nil {
		return false, err
	}
	f.filled = true
	blobs, err := compare(b, f.pages)
	if err != nil {
		p.anew(err)
		return false, nil
	}
	if blobs, err = p.present(ctx, blobs); err != nil {
		return false, err
	}
	r := rebase{blobs: blobs}
	if err := r.plan(f.pages); err != nil {
		p.anew(err)
		return false, nil
	}
	if !r.good() {
		return false, nil
	}
	if f.desc.Pages, err = f.pages.sum(ctx); err != nil {
		p.anew(err)
		return false, nil
	}
	for _, b := range r.blobs {
		c := &b.chunk
		if len(c.Ranges) == 1 && c.Ranges[0].Length == c.Length {
			c.Offset, c.Ranges = c.Ranges[0].Offset, nil
		}
		f.chunks = append(f.chunks, c)
	}
	p.m.done(max(0, f.total-r.bytes))
	return true, p.gather(ctx, f, r.changed, hand)
}

// anew logs that the hashes of pages are of no use. That is no failure of the push, which sends everything.
func (p *push) anew(err error) {
	p.c.cfg.Log.Warn("every page is sent", "snapshot", p.snap.Name, "err", err)
}

// present returns the blobs that the registry has.
func (p *push) present(ctx context.Context, blobs []*reused) ([]*reused, error) {
	have := make([]bool, len(blobs))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(pushers)
	for i, b := range blobs {
		g.Go(func() (err error) {
			if have[i], err = p.s.HasBlob(ctx, b.Digest); have[i] {
				p.s.Claim(b.Digest)
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	var out []*reused
	for i, b := range blobs {
		if have[i] {
			out = append(out, b)
		}
	}
	return out, nil
}

// gather makes chunks of the extents of a file, one after the other.
func (p *push) gather(ctx context.Context, f *file, extents []sparse.Extent, hand func(job) error) error {
	var raw []byte
	var c *chunk
	emit := func() error {
		if c == nil {
			return nil
		}
		if c.Length = int64(len(raw)); len(c.Ranges) == 1 {
			c.Offset, c.Ranges = c.Ranges[0].Offset, nil
		}
		f.chunks = append(f.chunks, c) // as in read
		j := job{f, c, raw}
		c, raw = nil, nil
		return hand(j)
	}
	for _, e := range extents {
		for e.Length > 0 {
			if c == nil {
				var err error
				if raw, err = p.get(ctx, gathered); err != nil {
					return err
				}
				c = &chunk{}
			}
			at, n := len(raw), min(e.Length, int64(gathered-len(raw)))
			raw = raw[:at+int(n)]
			if _, err := f.f.ReadAt(raw[at:], e.Offset); err != nil && err != io.EOF { //nolint:errorlint // io.ReaderAt returns io.EOF itself
				return err
			}
			c.Ranges = append(c.Ranges, artifact.Range{Offset: e.Offset, Length: n, From: int64(at)})
			p.m.done(n)
			if e.Offset, e.Length = e.Offset+n, e.Length-n; len(raw) == gathered {
				if err := emit(); err != nil {
					return err
				}
			}
		}
	}
	return emit()
}

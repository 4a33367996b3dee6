package chunked

import (
	"context"
	"errors"
	"hash/crc32"
	"io"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
)

const (
	page = 4 << 10 // chunks begin and end at multiples of this, bytes

	minAverage = 512 << 10
	maxAverage = 16 << 20
	maxChunk   = 2 * maxAverage

	wholeFile = 4 << 20 // a file up to this size is one layer
	readSize  = 256 << 10
)

// sizing determines where chunks may end. Equal sizing and equal bytes give equal chunks.
type sizing struct {
	average int // bytes, a power of two
}

// sizingOf chooses the average chunk size for a file, in steps of a factor of four: so the memories of different VMs
// mostly share one size, and each file has at most about 1000 chunks. A blob costs a registry about as much as half a
// mebibyte of data.
func sizingOf(size int64) sizing {
	average := minAverage
	for int64(average)*1024 < size && average < maxAverage {
		average *= 4
	}
	return sizing{min(average, maxAverage)}
}

func (s sizing) min() int { return s.average / 4 }
func (s sizing) max() int { return s.average * 2 }

// gap is the length of the run of zeros that ends a chunk. Shorter runs stay inside, where compression removes them, so
// the number of chunks is bounded even for a scattered file.
func (s sizing) gap() int { return s.average / 4 }

// cut reports whether a page ends a chunk; this depends only on its content.
func (s sizing) cut(p []byte) bool {
	return crc32.Checksum(p, castagnoli)&uint32(s.average/page-1) == 0 //nolint:gosec // a power of two, at most 4096
}

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	zeroes     = make([]byte, page)
)

// chunker cuts a file into chunks in one pass. It treats zeros and holes alike.
type chunker struct {
	s    sizing
	get  func() ([]byte, error)             // an empty buffer with room for a chunk
	emit func(offset int64, b []byte) error // takes ownership of the buffer

	buf   []byte
	start int64
	zeros int // trailing zeros in buf
}

// add adds the next page, at offset.
func (c *chunker) add(offset int64, p []byte) error {
	if sparse.IsZero(p) {
		return c.zero(len(p))
	}
	if c.buf == nil {
		b, err := c.get()
		if err != nil {
			return err
		}
		c.buf, c.start = b, offset
	}
	c.buf, c.zeros = append(c.buf, p...), 0
	if len(c.buf) >= c.s.max() || len(c.buf) >= c.s.min() && c.s.cut(p) {
		return c.flush()
	}
	return nil
}

// zero adds n bytes of zeros or hole: at most one page, or at least a gap.
func (c *chunker) zero(n int) error {
	if c.buf == nil {
		return nil
	}
	if c.zeros+n >= c.s.gap() || len(c.buf)+n >= c.s.max() {
		return c.flush()
	}
	c.buf, c.zeros = append(c.buf, zeroes[:n]...), c.zeros+n
	return nil
}

// hole adds a hole of any length.
func (c *chunker) hole(n int64) error {
	if c.buf == nil {
		return nil
	}
	if int64(c.zeros)+n >= int64(c.s.gap()) {
		return c.flush()
	}
	for ; n > 0; n -= page {
		if err := c.zero(int(min(n, page))); err != nil {
			return err
		}
	}
	return nil
}

func (c *chunker) flush() error {
	if c.buf == nil {
		return nil
	}
	b := c.buf[:len(c.buf)-c.zeros]
	c.buf, c.zeros = nil, 0
	return c.emit(c.start, b)
}

// run reads f from beginning to end. It reports the bytes of data read to progress.
func (c *chunker) run(ctx context.Context, f *sparse.File, progress func(int64)) error {
	size := f.Size()
	data, err := f.Extents()
	if err != nil {
		return err
	}
	buf := make([]byte, readSize)
	at := int64(0)
	for _, e := range data {
		from, to := max(e.Offset/page*page, at), min((e.End()+page-1)/page*page, size)
		if err := c.hole(from - at); err != nil {
			return err
		}
		for at = from; at < to; {
			if err := ctx.Err(); err != nil {
				return err
			}
			n := int(min(readSize, to-at))
			if _, err := f.ReadAt(buf[:n], at); errors.Is(err, io.EOF) {
				return errdefs.DataLossf("%s became shorter while it was read", f.Name())
			} else if err != nil {
				return err
			}
			for p := 0; p < n; p += page {
				if err := c.add(at+int64(p), buf[p:min(p+page, n)]); err != nil {
					return err
				}
			}
			at += int64(n)
			progress(int64(n))
		}
	}
	return c.flush()
}

// dataBytes returns the bytes that are not in holes.
func dataBytes(f *sparse.File) (int64, error) {
	m, err := f.Extents()
	return sparse.Data(m), err
}

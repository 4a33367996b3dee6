package artifact

import (
	"bytes"
	"cmp"
	"slices"
	"strconv"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
)

// Limits of the blobs of which a file takes only ranges. They bound what a reader holds and unpacks for it.
const (
	MaxRangedBlob = 64 << 20 // bytes of one blob, uncompressed
	MaxUnused     = 2        // all blobs of a file together have at most this many times the bytes of the file
)

// Range is a part of a file that is in the middle of a chunk. All three are multiples of sparse.Block.
type Range struct {
	Offset int64 // in the file
	Length int64
	From   int64 // in the uncompressed bytes of the chunk
}

// Ranges are the parts of a file that are in one chunk, in ascending order. Their JSON is a list of numbers, three for
// each range: a file of scattered pages has tens of thousands.
type Ranges []Range

// MarshalJSON implements json.Marshaler.
func (r Ranges) MarshalJSON() ([]byte, error) {
	b := make([]byte, 0, 2+24*len(r))
	b = append(b, '[')
	for i, x := range r {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, x.Offset, 10)
		b = strconv.AppendInt(append(b, ','), x.Length, 10)
		b = strconv.AppendInt(append(b, ','), x.From, 10)
	}
	return append(b, ']'), nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (r *Ranges) UnmarshalJSON(data []byte) error {
	*r = nil
	if bytes.Equal(data, []byte("null")) {
		return nil
	}
	numbers, err := list(data, 3*maxChunks/rangeWeight, one[int64])
	if err != nil {
		return errdefs.Invalidf("the ranges of a chunk are not a list of numbers: %w", err)
	}
	if len(numbers)%3 != 0 {
		return errdefs.Invalidf("the ranges of a chunk are %d numbers, which is not a multiple of 3", len(numbers))
	}
	*r = make(Ranges, 0, len(numbers)/3)
	for n := range slices.Chunk(numbers, 3) {
		*r = append(*r, Range{n[0], n[1], n[2]})
	}
	return nil
}

// rangeWeight is how much a range counts, compared with a chunk: its JSON is that much smaller.
const rangeWeight = 4

func (c Chunk) weight() int { return max(1, rangeWeight*len(c.Ranges)) }

// Weight counts the chunks of a file, as limits do.
func (f File) Weight() (n int) {
	for _, c := range f.Chunks {
		n += c.weight()
	}
	return n
}

// Piece is a part of a file and where its bytes are.
type Piece struct {
	Range

	Chunk int // index of the chunk
}

// End is the offset of the first byte of the file after the piece.
func (p Piece) End() int64 { return p.Offset + p.Length }

// Pieces returns the parts of a file of size bytes in ascending order, and validates them. Zeros are between them. Chunks
// without ranges must be in ascending order, unless others have ranges.
// Errors: InvalidArgument.
func Pieces(chunks []Chunk, size int64) ([]Piece, error) {
	out := make([]Piece, 0, len(chunks))
	blobs, ranged := int64(0), false
	seen := map[string]bool{}
	for i, c := range chunks {
		if err := c.check(i, size); err != nil {
			return nil, err
		}
		if !seen[c.Layer] {
			seen[c.Layer], blobs = true, min(blobs+c.Length, 1<<62)
		}
		if c.Ranges == nil {
			out = append(out, Piece{Range{Offset: c.Offset, Length: c.Length}, i})
			continue
		}
		ranged = true
		for _, r := range c.Ranges {
			out = append(out, Piece{r, i})
		}
	}
	if ranged {
		slices.SortFunc(out, func(a, b Piece) int { return cmp.Compare(a.Offset, b.Offset) })
		if blobs > MaxUnused*size {
			return nil, errdefs.Invalidf("its chunks have %d bytes, more than %d times those of the file", blobs, MaxUnused)
		}
	}
	for i := 1; i < len(out); i++ {
		if out[i].Offset < out[i-1].End() {
			return nil, errdefs.Invalidf("chunk %d at byte %d overlaps the one before it", out[i].Chunk, out[i].Offset)
		}
	}
	return out, nil
}

// check validates chunk number n, without regard to others.
func (c Chunk) check(n int, size int64) error {
	switch {
	case c.Length <= 0 || c.Length > size || c.Offset < 0 || c.Offset > size-c.Length:
		return errdefs.Invalidf("chunk %d of %d bytes at %d does not fit in the file's %d bytes", n, c.Length, c.Offset, size)
	case c.Ranges == nil:
		return nil
	case len(c.Ranges) == 0 || c.Offset != 0:
		return errdefs.Invalidf("chunk %d has %d ranges and the offset %d", n, len(c.Ranges), c.Offset)
	case c.Length > MaxRangedBlob:
		return errdefs.Invalidf("chunk %d has ranges of %d bytes; at most %d are allowed", n, c.Length, MaxRangedBlob)
	}
	for _, r := range c.Ranges {
		switch {
		case r.Length <= 0 || r.Offset < 0 || r.Offset > size || r.Length > size-r.Offset:
			return errdefs.Invalidf("chunk %d has a range of %d bytes at %d, which does not fit in the file's %d bytes", n, r.Length, r.Offset, size)
		case r.From < 0 || r.From > c.Length || r.Length > c.Length-r.From:
			return errdefs.Invalidf("chunk %d has a range of %d bytes from %d on, which is not in its %d bytes", n, r.Length, r.From, c.Length)
		case (r.Offset|r.Length|r.From)%sparse.Block != 0:
			return errdefs.Invalidf("chunk %d has a range at %d that is not of whole pages", n, r.Offset)
		}
	}
	return nil
}

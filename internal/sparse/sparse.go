// Package sparse handles files with holes: where their data are, how to copy them and keep the holes, and how the list of
// extents is encoded.
//
// It names no files, chooses no folders and does not interpret the bytes.
package sparse

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strconv"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Extent is a piece of a file that is not a hole. The JSON is used in tar streams and manifests.
type Extent struct {
	Offset int64 `json:"o"`
	Length int64 `json:"l"`
}

// End is the offset of the first byte after the extent.
func (e Extent) End() int64 { return e.Offset + e.Length }

// Block is the unit in which zeros become holes, in bytes: the size of a page and of a file system block.
const Block = 4096

var zeros [64 << 10]byte

// IsZero reports whether p holds only zeros.
func IsZero(p []byte) bool {
	for len(p) > len(zeros) {
		if !bytes.Equal(p[:len(zeros)], zeros[:]) {
			return false
		}
		p = p[len(zeros):]
	}
	return bytes.Equal(p, zeros[:len(p)])
}

// WriteAt writes the parts of p that are not zero to w, so that in a new file the others become holes. Blocks are aligned
// to the file, not to p.
func WriteAt(w io.WriterAt, p []byte, off int64) error {
	start := 0 // of the data that are not written yet
	flush := func(end int) error {
		if start == end {
			return nil
		}
		_, err := w.WriteAt(p[start:end], off+int64(start))
		return err
	}
	for at := 0; at < len(p); {
		n := min(int(Block-(off+int64(at))%Block), len(p)-at)
		if IsZero(p[at : at+n]) {
			if err := flush(at); err != nil {
				return err
			}
			start = at + n
		}
		at += n
	}
	return flush(len(p))
}

// Data returns how many bytes the extents of m hold.
func Data(m []Extent) int64 {
	var n int64
	for _, e := range m {
		n += e.Length
	}
	return n
}

// Check reports whether m can be the map of a file of size bytes: in order, without overlaps, within the file.
// The error is InvalidArgument.
func Check(m []Extent, size int64) error {
	if size < 0 {
		return errdefs.Invalidf("invalid file size of %d bytes", size)
	}
	var end int64
	for n, e := range m {
		switch {
		case e.Offset < 0 || e.Length <= 0:
			return errdefs.Invalidf("extent %d of the sparse map has invalid offset %d or length %d", n, e.Offset, e.Length)
		case e.Offset < end:
			return errdefs.Invalidf("extent %d of the sparse map begins at byte %d, before the end of the one before it", n, e.Offset)
		case e.Offset > size || e.Length > size-e.Offset: // no overflow: both are within size
			return errdefs.Invalidf("extent %d of the sparse map reaches beyond the file's %d bytes", n, size)
		}
		end = e.End()
	}
	return nil
}

// MaxMap is the largest encoded map that Parse accepts, in bytes.
const MaxMap = 64 << 20

// Parse reads the JSON of a map and checks it against the size of the file. The error is InvalidArgument.
func Parse(data []byte, size int64) ([]Extent, error) {
	if len(data) > MaxMap {
		return nil, errdefs.Invalidf("the sparse map has %d bytes; at most %d are read", len(data), MaxMap)
	}
	var m []Extent
	if err := json.Unmarshal(data, &m); err != nil {
		return nil, errdefs.Invalidf("the sparse map is not a list of extents: %w", err)
	}
	return m, Check(m, size)
}

// Encode returns the JSON of m.
func Encode(m []Extent) []byte {
	b := append(make([]byte, 0, 2+32*len(m)), '[')
	for n, e := range m {
		if n > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"o":`...)
		b = strconv.AppendInt(b, e.Offset, 10)
		b = append(b, `,"l":`...)
		b = strconv.AppendInt(b, e.Length, 10)
		b = append(b, '}')
	}
	return append(b, ']')
}

// Fit returns a map that covers all of m and whose JSON has at most limit bytes. To shorten it, it treats the smallest
// holes as data; how many bytes that adds depends on how scattered they are. limit must have room for one extent.
func Fit(m []Extent, limit int) []Extent {
	if len(Encode(m)) <= limit || len(m) < 2 {
		return m
	}
	last := strconv.FormatInt(m[len(m)-1].End(), 10) // no number in the map is longer
	keep := max(1, limit/(len(`{"o":,"l":},`)+2*len(last)))
	return Coarsen(m, keep)
}

// Coarsen returns a map of at most n extents that covers all of m. It drops the smallest holes. n is at least 1.
func Coarsen(m []Extent, n int) []Extent {
	if len(m) <= n {
		return m
	}
	gaps := make([]Extent, 0, len(m)-1)
	for i := range m[1:] {
		gaps = append(gaps, Extent{m[i].End(), m[i+1].Offset - m[i].End()})
	}
	slices.SortFunc(gaps, func(a, b Extent) int { return cmp.Or(cmp.Compare(b.Length, a.Length), cmp.Compare(a.Offset, b.Offset)) })
	gaps = gaps[:n-1]
	slices.SortFunc(gaps, func(a, b Extent) int { return cmp.Compare(a.Offset, b.Offset) })
	out := make([]Extent, 0, n)
	start := m[0].Offset
	for _, g := range gaps {
		out = append(out, Extent{start, g.Offset - start})
		start = g.End()
	}
	return append(out, Extent{start, m[len(m)-1].End() - start})
}

// Reader returns the bytes of the extents of m in r, one after the other.
func Reader(r io.ReaderAt, m []Extent) io.Reader {
	parts := make([]io.Reader, 0, len(m))
	for _, e := range m {
		parts = append(parts, io.NewSectionReader(r, e.Offset, e.Length))
	}
	return io.MultiReader(parts...)
}

// Widen returns a reader of the bytes of the extents of wide, given a reader of those of m. wide must cover m. Bytes that
// are only in wide are zero.
func Widen(r io.Reader, m, wide []Extent) io.Reader {
	return &widened{r: r, m: m, wide: wide}
}

type widened struct {
	r       io.Reader
	m, wide []Extent
	at      int64 // offset in wide[0]
}

func (w *widened) Read(p []byte) (int, error) {
	for len(w.wide) > 0 && w.at == w.wide[0].Length {
		w.wide, w.at = w.wide[1:], 0
	}
	if len(w.wide) == 0 {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), w.wide[0].Length-w.at)]
	pos := w.wide[0].Offset + w.at
	for len(w.m) > 0 && w.m[0].End() <= pos {
		w.m = w.m[1:]
	}
	if len(w.m) > 0 && w.m[0].Offset <= pos {
		p = p[:min(int64(len(p)), w.m[0].End()-pos)]
		n, err := w.r.Read(p)
		w.at += int64(n)
		if n == 0 && errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		} else if errors.Is(err, io.EOF) {
			err = nil
		}
		return n, err
	}
	if len(w.m) > 0 {
		p = p[:min(int64(len(p)), w.m[0].Offset-pos)]
	}
	clear(p)
	w.at += int64(len(p))
	return len(p), nil
}

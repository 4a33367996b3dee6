package stream

import (
	"bytes"
	"errors"
	"io"
	"os"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
)

// base is the earlier memory with which pages are compared. It is read, not mapped: a failing disk then gives an error and does
// not kill this process.
type base struct {
	f    *os.File
	data sparse.Pages // pages that are not holes
	buf  []byte       // data read ahead
	at   int64        // offset of buf
	next int64        // offset after the last requested page
}

// readAhead is how many bytes are read at once when pages are requested in sequence, as in the first pass of a save.
const readAhead = 256 << 10

// open reports whether the base has exactly size bytes, and finds where it has data.
func (b *base) open(size int64) (fits bool, err error) {
	info, err := b.f.Stat()
	if err != nil || info.Size() != size || size%sparse.Block != 0 {
		return false, err
	}
	m, err := sparse.Extents(b.f, size)
	if err != nil {
		return false, err
	}
	b.data, b.next = sparse.NewPages(size), -1
	b.data.Add(m)
	b.buf = make([]byte, 0, readAhead)
	return true, nil
}

// same reports whether the base has this data at offset at. data must not be all zeros.
func (b *base) same(at int64, data []byte) (bool, error) {
	if !b.data.Has(at / PageSize) {
		return false, nil
	}
	if off := at - b.at; off < 0 || off+PageSize > int64(len(b.buf)) {
		length := int64(PageSize)
		if at == b.next {
			length = readAhead
		}
		b.buf, b.at = b.buf[:min(length, int64(len(b.data))*64*PageSize-at)], at
		if err := b.read(b.buf, at); err != nil {
			b.buf = b.buf[:0]
			return false, err
		}
	}
	b.next = at + PageSize
	off := at - b.at
	return bytes.Equal(b.buf[off:off+PageSize], data), nil
}

// read fills p with the content at offset at. Beyond the end it is zeros.
func (b *base) read(p []byte, at int64) error {
	n, err := b.f.ReadAt(p, at)
	if err != nil && !errors.Is(err, io.EOF) {
		return errdefs.DataLossf("read the memory %s, the base of this save: %w; remove the snapshots that use it", b.f.Name(), err)
	}
	clear(p[n:])
	return nil
}

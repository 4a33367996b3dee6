package qcow2

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Methods by which the clusters of an image are compressed.
const (
	Deflate = 0
	Zstd    = 1
)

// Inflate decompresses the beginning of in to all of out. in may go on after the end of the compressed bytes.
type Inflate func(method uint8, in, out []byte) error

// Content reads the bytes that a guest sees of an image without a backing file, from the first to the last. It implements sparse.Holed.
// It trusts no entry of a table: whatever the file says, it returns VirtualSize bytes or an error, and keeps three clusters in memory.
type Content struct {
	q       Header
	r       io.ReaderAt
	size    int64 // of the file
	inflate Inflate

	at       int64 // in the content
	l1       []byte
	table    []byte // L2 table that was read last
	tableOff uint64
	plain    []byte // cluster that was decompressed last
	plainOf  uint64 // its entry; 0: none
	packed   []byte
}

// piece is what follows at one place of the content.
type piece struct {
	length int64
	zero   bool
	off    int64  // in the file; of bytes that are not compressed
	entry  uint64 // of a compressed cluster; 0: it is not compressed
	within int64  // the place in the compressed cluster
}

// Content returns the content of the image r, whose header is q and which has size bytes.
// Errors: DataLoss when the image is truncated.
func (q *Header) Content(r io.ReaderAt, size int64, inflate Inflate) (*Content, error) {
	c := &Content{q: *q, r: r, size: size, inflate: inflate}
	length := int64(q.l1Entries) * 8
	if q.l1Offset > uint64(size) || length > size-int64(q.l1Offset) {
		return nil, q.truncated("L1 table", q.l1Offset, size)
	}
	c.l1 = make([]byte, length)
	return c, readAt(r, c.l1, int64(q.l1Offset))
}

// Skip implements sparse.Holed.
func (c *Content) Skip() (n int64, err error) {
	for c.at < c.q.VirtualSize {
		p, err := c.next()
		if err != nil || !p.zero {
			return n, err
		}
		c.at, n = c.at+p.length, n+p.length
	}
	return n, nil
}

// Read implements io.Reader.
func (c *Content) Read(b []byte) (int, error) {
	if c.at >= c.q.VirtualSize {
		return 0, io.EOF
	}
	p, err := c.next()
	if err != nil {
		return 0, fmt.Errorf("read the disk at byte %d: %w", c.at, err)
	}
	b = b[:min(int64(len(b)), p.length)]
	switch {
	case p.zero:
		clear(b)
	case p.entry != 0:
		if err := c.decompress(p.entry); err != nil {
			return 0, fmt.Errorf("read the disk at byte %d: %w", c.at, err)
		}
		copy(b, c.plain[p.within:])
	default:
		if err := c.stored(b, p.off); err != nil {
			return 0, fmt.Errorf("read the disk at byte %d: %w", c.at, err)
		}
	}
	c.at += int64(len(b))
	return len(b), nil
}

// stored reads what is at off in the file. Bytes after its end are zero, because QEMU does not write the end of a last cluster of zeros.
func (c *Content) stored(b []byte, off int64) error {
	n, err := c.r.ReadAt(b, off)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read the disk image: %w", err)
	}
	clear(b[n:])
	return nil
}

// next says what is at the current place.
func (c *Content) next() (piece, error) {
	cluster := c.q.clusterSize()
	perTable := cluster / c.q.l2EntrySize()
	index, within := c.at/cluster, c.at%cluster
	p := piece{length: min(cluster-within, c.q.VirtualSize-c.at), zero: true}
	if index/perTable >= int64(len(c.l1)/8) {
		return p, nil
	}
	off := binary.BigEndian.Uint64(c.l1[index/perTable*8:]) & offsetMask
	if off == 0 {
		p.length = min((index/perTable+1)*perTable*cluster-c.at, c.q.VirtualSize-c.at)
		return p, nil
	}
	if err := c.load(off); err != nil {
		return p, err
	}
	at := index % perTable * c.q.l2EntrySize()
	entry := binary.BigEndian.Uint64(c.table[at:])
	if entry&flagCompressed != 0 {
		p.zero, p.entry, p.within = false, entry, within
		return p, nil
	}
	if c.q.extendedL2 {
		p.length, p.zero = c.subclusters(binary.BigEndian.Uint64(c.table[at+8:]), within, p.length)
	} else {
		p.zero = entry&flagZero != 0 || entry&offsetMask == 0
	}
	if p.zero {
		return p, nil
	}
	data := entry & offsetMask
	switch {
	case data == 0 || data%uint64(cluster) != 0:
		return p, errdefs.DataLossf("the qcow2 disk is damaged: a cluster begins at byte %d, in the middle of another", data)
	case data >= uint64(c.size):
		return p, c.q.truncated("data", data, c.size)
	}
	p.off = int64(data) + within
	return p, nil
}

// subclusters is the number of subclusters of an extended L2 entry.
const subclusters = 32

// subclusters returns how many bytes from within on, at most length, are all zero or all stored, and which of them. The low half of bitmap
// has a bit for each subcluster that is stored, the high half one for each that is zero.
func (c *Content) subclusters(bitmap uint64, within, length int64) (n int64, zero bool) {
	each := c.q.clusterSize() / subclusters
	isZero := func(i int64) bool { return bitmap>>(subclusters+i)&1 != 0 || bitmap>>i&1 == 0 }
	first := within / each
	last := first + 1
	for last < subclusters && isZero(last) == isZero(first) {
		last++
	}
	return min(last*each-within, length), isZero(first)
}

// load reads the L2 table at off, unless it is the one that was read last.
func (c *Content) load(off uint64) error {
	if c.table != nil && c.tableOff == off {
		return nil
	}
	cluster := uint64(c.q.clusterSize())
	switch {
	case off%cluster != 0:
		return errdefs.DataLossf("the qcow2 disk is damaged: its L1 table points at byte %d, in the middle of a cluster", off)
	case off+cluster > uint64(c.size):
		return c.q.truncated("L2 table", off, c.size)
	case c.table == nil:
		c.table = make([]byte, cluster)
	}
	c.tableOff = 0
	if err := readAt(c.r, c.table, int64(off)); err != nil {
		return err
	}
	c.tableOff = off
	return nil
}

// decompress makes the cluster of entry the one that was decompressed last.
func (c *Content) decompress(entry uint64) error {
	if c.plainOf == entry {
		return nil
	}
	off, end := c.q.compressed(entry)
	end = min(end, uint64(c.size))
	if off >= end {
		return c.q.truncated("compressed data", off, c.size)
	}
	if c.plain == nil {
		c.plain = make([]byte, c.q.clusterSize())
	}
	if need := int(end - off); cap(c.packed) < need {
		c.packed = make([]byte, need)
	}
	c.packed, c.plainOf = c.packed[:end-off], 0
	if err := readAt(c.r, c.packed, int64(off)); err != nil {
		return err
	}
	if err := c.inflate(c.q.compressionTyp, c.packed, c.plain); err != nil {
		return errdefs.DataLossf("the qcow2 disk is damaged: the compressed data at byte %d cannot be read (%w); fetch it again", off, err)
	}
	c.plainOf = entry
	return nil
}

// Package qcow2 reads qcow2 images, which may come from untrusted sources, and writes the empty overlays on which VMs run.
//
// It writes no guest data: hypervisors do. It trusts no file name in a header and opens none.
package qcow2

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Magic is the first four bytes of every qcow2 image.
const Magic = "QFI\xfb"

// HeadSize is the number of bytes from the start of an image that Parse needs at most.
const HeadSize = 64 << 10

// SectorSize divides the size of every virtual disk.
const SectorSize = 512

// MaxVirtualSize is the largest accepted disk, in bytes.
const MaxVirtualSize = 64 << 40

const (
	headerV2 = 72
	headerV3 = 104

	minClusterBits = 9
	maxClusterBits = 21
	maxL1Entries   = 4 << 20 // QEMU's own limit, 32 MiB
	maxHeader      = 64 << 10
	maxSnapshots   = 65536 // QEMU's own limit
)

// Incompatible feature bits of qcow2 version 3.
const (
	incompatDirty       = 1 << 0 // reference counts may be wrong; reading is safe
	incompatCorrupt     = 1 << 1
	incompatDataFile    = 1 << 2
	incompatCompression = 1 << 3
	incompatExtendedL2  = 1 << 4
)

// Header extensions that make an image depend on another file, or unreadable without a key.
const (
	extEnd           = 0
	extBackingFormat = 0xe2792aca
	extDataFile      = 0x44415441
	extEncryption    = 0x0537be77
)

// Entries of L1 and L2 tables.
const (
	offsetMask     = 0x00fffffffffffe00
	flagCompressed = 1 << 62
	flagZero       = 1 << 0
)

// Header holds the values of a qcow2 header.
type Header struct {
	Version     uint32
	ClusterBits uint32
	VirtualSize int64 // bytes

	l1Entries      uint32
	l1Offset       uint64
	refOffset      uint64
	refClusters    uint32
	snapshots      uint32
	snapOffset     uint64
	extendedL2     bool
	headerLength   uint32
	incompatible   uint64
	backingOffset  uint64
	backingSize    uint32
	encryption     uint32
	refcountOrder  uint32
	compressionTyp uint8
}

func (q *Header) clusterSize() int64 { return 1 << q.ClusterBits }

func (q *Header) l2EntrySize() int64 {
	if q.extendedL2 {
		return 16
	}
	return 8
}

// Parse reads the header of a qcow2 image, version 2 or 3. It refuses what is not safe to give to a hypervisor: references
// to other files, encryption, absurd sizes and features that are not known to be safe. head holds the start of the image:
// at least its header with all extensions (HeadSize suffices).
// Errors: InvalidArgument, or DataLoss when the header is cut short or says that the image is corrupt.
func Parse(head []byte) (Header, error) {
	q, err := ParseLayer(head)
	if err == nil && (q.backingOffset != 0 || q.backingSize != 0) {
		return Header{}, errdefs.Invalidf("the qcow2 disk has a backing file and is not complete by itself; convert it with `qemu-img convert -O qcow2`")
	}
	return q, err
}

// ParseLayer is Parse for an image that may have a backing file. It ignores the file's name in the header: the hypervisor
// is told which backing file to use.
func ParseLayer(head []byte) (Header, error) {
	q, err := parseFixed(head)
	if err != nil {
		return Header{}, err
	}
	if err := q.refuse(); err != nil {
		return Header{}, err
	}
	if err := q.extensions(head); err != nil {
		return Header{}, err
	}
	return q, q.tables()
}

func parseFixed(head []byte) (Header, error) {
	cut := errdefs.DataLossf("the qcow2 disk is truncated: its header ends after %d bytes; fetch it again", len(head))
	if len(head) < headerV2 {
		return Header{}, cut
	}
	be := binary.BigEndian
	if string(head[:4]) != Magic {
		return Header{}, errdefs.Invalidf("not a qcow2 disk: it does not begin with QFI")
	}
	q := Header{
		Version:       be.Uint32(head[4:]),
		backingOffset: be.Uint64(head[8:]),
		backingSize:   be.Uint32(head[16:]),
		ClusterBits:   be.Uint32(head[20:]),
		encryption:    be.Uint32(head[32:]),
		l1Entries:     be.Uint32(head[36:]),
		l1Offset:      be.Uint64(head[40:]),
		refOffset:     be.Uint64(head[48:]),
		refClusters:   be.Uint32(head[56:]),
		snapshots:     be.Uint32(head[60:]),
		snapOffset:    be.Uint64(head[64:]),
		headerLength:  headerV2,
		refcountOrder: 4,
	}
	size := be.Uint64(head[24:])
	if size == 0 || size > MaxVirtualSize {
		return Header{}, errdefs.Invalidf("the qcow2 disk claims a size of %d bytes; the valid range is 1 to %d (64 TiB)", size, int64(MaxVirtualSize))
	}
	q.VirtualSize = int64(size)
	switch q.Version {
	case 2:
		return q, nil
	case 3:
	default:
		return Header{}, errdefs.Invalidf("the qcow2 disk has version %d; only 2 and 3 are supported", q.Version)
	}
	if len(head) < headerV3 {
		return Header{}, cut
	}
	q.incompatible = be.Uint64(head[72:])
	q.refcountOrder = be.Uint32(head[96:])
	q.headerLength = be.Uint32(head[100:])
	if q.headerLength < headerV3 || q.headerLength > maxHeader || q.headerLength%8 != 0 {
		return Header{}, errdefs.Invalidf("the qcow2 disk claims a header of %d bytes: refused", q.headerLength)
	}
	if q.headerLength > headerV3 {
		if len(head) <= headerV3 {
			return Header{}, cut
		}
		q.compressionTyp = head[headerV3]
	}
	q.extendedL2 = q.incompatible&incompatExtendedL2 != 0
	return q, nil
}

func (q *Header) refuse() error {
	known := uint64(incompatDirty | incompatCorrupt | incompatDataFile | incompatCompression | incompatExtendedL2)
	minBits := uint32(minClusterBits)
	if q.extendedL2 {
		minBits = 14
	}
	switch {
	case q.incompatible&incompatDataFile != 0:
		return errdefs.Invalidf("the qcow2 disk keeps its data in another file; convert it with `qemu-img convert -O qcow2`")
	case q.encryption != 0:
		return errdefs.Invalidf("the qcow2 disk is encrypted; decrypt it with `qemu-img convert -O qcow2`")
	case q.incompatible&incompatCorrupt != 0:
		return errdefs.DataLossf("the qcow2 disk is marked corrupt; repair it with `qemu-img check -r all` or fetch it again")
	case q.incompatible&^known != 0:
		return errdefs.Invalidf("the qcow2 disk needs unknown features (bits %#x); rewrite it with `qemu-img convert -O qcow2`", q.incompatible&^known)
	case q.incompatible&incompatCompression != 0 && q.compressionTyp > 1, q.incompatible&incompatCompression == 0 && q.compressionTyp != 0:
		return errdefs.Invalidf("the qcow2 disk is compressed by the unknown method %d; rewrite it with `qemu-img convert -O qcow2`", q.compressionTyp)
	case q.ClusterBits < minBits || q.ClusterBits > maxClusterBits:
		return errdefs.Invalidf("the qcow2 disk claims clusters of 2^%d bytes: refused", q.ClusterBits)
	case q.refcountOrder > 6:
		return errdefs.Invalidf("the qcow2 disk claims reference counts of 2^%d bits: refused", q.refcountOrder)
	}
	return nil
}

// extensions reads the header extensions, which end within the first cluster.
func (q *Header) extensions(head []byte) error {
	end := min(int64(len(head)), q.clusterSize())
	for off := int64(q.headerLength); off+8 <= end; {
		typ, length := binary.BigEndian.Uint32(head[off:]), int64(binary.BigEndian.Uint32(head[off+4:]))
		switch typ {
		case extEnd:
			return nil
		case extDataFile:
			return errdefs.Invalidf("the qcow2 disk names an external data file; convert it with `qemu-img convert -O qcow2`")
		case extEncryption:
			return errdefs.Invalidf("the qcow2 disk is encrypted; decrypt it with `qemu-img convert -O qcow2`")
		}
		if length > q.clusterSize() {
			return errdefs.Invalidf("the qcow2 disk claims a header extension of %d bytes: refused", length)
		}
		off += 8 + (length+7)&^7
	}
	return nil
}

// tables checks that the header's fields about its tables are consistent.
func (q *Header) tables() error {
	cluster := uint64(q.clusterSize())
	perL1 := q.clusterSize() * (q.clusterSize() / q.l2EntrySize())
	need := (q.VirtualSize + perL1 - 1) / perL1
	switch {
	case int64(q.l1Entries) < need || q.l1Entries > maxL1Entries:
		return errdefs.Invalidf("the qcow2 disk has an L1 table of %d entries where %d are needed: refused", q.l1Entries, need)
	case q.l1Offset == 0 || q.l1Offset%cluster != 0 || q.refOffset == 0 || q.refOffset%cluster != 0 || q.refClusters == 0:
		return errdefs.Invalidf("the qcow2 disk has tables at impossible places: refused")
	case q.snapshots > maxSnapshots:
		return errdefs.Invalidf("the qcow2 disk claims %d internal snapshots: refused", q.snapshots)
	case uint64(q.refClusters)*cluster > 8<<20+cluster: // QEMU's own limit
		return errdefs.Invalidf("the qcow2 disk claims a reference count table of %d clusters: refused", q.refClusters)
	}
	return nil
}

// ReadLayer is ParseLayer for an open image of size bytes.
func ReadLayer(r io.ReaderAt, size int64) (Header, error) {
	head := make([]byte, min(max(size, 0), HeadSize))
	if err := readAt(r, head, 0); err != nil {
		return Header{}, err
	}
	return ParseLayer(head)
}

// ReadBacking returns the path and the format of the backing file that the header of an open image of size bytes names: "" if it names none. A hypervisor that is
// not told which backing file to use takes this one.
func ReadBacking(r io.ReaderAt, size int64) (path string, format vm.DiskFormat, err error) {
	head := make([]byte, min(max(size, 0), HeadSize))
	if err := readAt(r, head, 0); err != nil {
		return "", "", err
	}
	q, err := ParseLayer(head)
	if err != nil || q.backingOffset == 0 {
		return "", "", err
	}
	end := q.backingOffset + uint64(q.backingSize)
	if q.backingSize > maxBackingName || end < q.backingOffset || end > uint64(len(head)) {
		return "", "", errdefs.Invalidf("the qcow2 disk names a backing file at an impossible place: refused")
	}
	for off := int64(q.headerLength); off+8 <= int64(len(head)); {
		typ, length := binary.BigEndian.Uint32(head[off:]), int64(binary.BigEndian.Uint32(head[off+4:]))
		if typ == extEnd || off+8+length > int64(len(head)) {
			break
		}
		if typ == extBackingFormat {
			format = vm.DiskFormat(head[off+8 : off+8+length])
		}
		off += 8 + (length+7)&^7
	}
	return string(head[q.backingOffset:end]), format, nil
}

// Check reads every table of the image and checks that all they point at lies within its size bytes.
// Errors: DataLoss when it does not: the file is truncated or damaged.
func (q *Header) Check(r io.ReaderAt, size int64) error {
	if int64(q.refOffset) < 0 || int64(q.refOffset)+int64(q.refClusters)*q.clusterSize() > size {
		return q.truncated("reference count table", q.refOffset, size)
	}
	if q.snapshots > 0 && q.snapOffset >= uint64(size) {
		return q.truncated("snapshot table", q.snapOffset, size)
	}
	if end := q.l1Offset + uint64(q.l1Entries)*8; end > uint64(size) || end < q.l1Offset {
		return q.truncated("L1 table", q.l1Offset, size)
	}
	l1 := make([]byte, q.l1Entries*8)
	if err := readAt(r, l1, int64(q.l1Offset)); err != nil {
		return err
	}
	seen := make(map[uint64]bool)
	// A cluster of data that is listed twice could make a small file an almost endless disk.
	room := (size + q.clusterSize() - 1) / q.clusterSize()
	table := make([]byte, q.clusterSize())
	for ; len(l1) > 0; l1 = l1[8:] {
		off := binary.BigEndian.Uint64(l1) & offsetMask
		if off == 0 {
			continue
		}
		if off%uint64(q.clusterSize()) != 0 || seen[off] { // a table that is listed twice could make reading almost endless
			return errdefs.DataLossf("the qcow2 disk is damaged: its L1 table points at byte %d twice or in the middle of a cluster", off)
		}
		seen[off] = true
		if off+uint64(q.clusterSize()) > uint64(size) {
			return q.truncated("L2 table", off, size)
		}
		if err := readAt(r, table, int64(off)); err != nil {
			return err
		}
		n, err := q.checkL2(table, size)
		if err != nil {
			return err
		}
		if room -= n; room < 0 {
			return errdefs.DataLossf("the qcow2 disk is damaged: its tables list more clusters than it has")
		}
	}
	return nil
}

// checkL2 checks a table, and returns how many clusters of data it lists that are not compressed.
func (q *Header) checkL2(table []byte, size int64) (clusters int64, err error) {
	for step := q.l2EntrySize(); len(table) > 0; table = table[step:] {
		e := binary.BigEndian.Uint64(table)
		if e&flagCompressed != 0 {
			off, end := q.compressed(e)
			if off >= uint64(size) || end > (uint64(size)+SectorSize-1)&^(SectorSize-1) {
				return 0, q.truncated("compressed data", off, size)
			}
			continue
		}
		off := e & offsetMask
		if off == 0 || !q.extendedL2 && e&flagZero != 0 {
			continue
		}
		// QEMU does not write the end of a last cluster that holds only zeros, so only its start must exist.
		if off%uint64(q.clusterSize()) != 0 {
			return 0, errdefs.DataLossf("the qcow2 disk is damaged: a cluster begins at byte %d, in the middle of another", off)
		}
		if off >= uint64(size) {
			return 0, q.truncated("data", off, size)
		}
		clusters++
	}
	return clusters, nil
}

// compressed returns where in the file the bytes of a compressed cluster are. The low bits of its entry are the offset, the bits above them the
// number of further 512-byte sectors.
func (q *Header) compressed(entry uint64) (off, end uint64) {
	bits := 62 - (q.ClusterBits - 8)
	off = entry & (1<<bits - 1)
	sectors := entry & (1<<62 - 1) >> bits
	return off, off&^(SectorSize-1) + (sectors+1)*SectorSize
}

func (q *Header) truncated(what string, off uint64, size int64) error {
	return errdefs.DataLossf("the qcow2 disk is truncated: %s at byte %d lies beyond its end at %d; fetch it again", what, off, size)
}

func readAt(r io.ReaderAt, p []byte, off int64) error {
	if n, err := r.ReadAt(p, off); n < len(p) {
		if errors.Is(err, io.EOF) {
			return errdefs.DataLossf("the qcow2 disk is truncated: byte %d lies beyond its end; fetch it again", off+int64(n))
		}
		return fmt.Errorf("read the disk image: %w", err)
	}
	return nil
}

package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/qcow2"
)

const (
	vhdMagic = "conectix"

	vhdFixed        = 2
	vhdDynamic      = 3
	vhdDifferencing = 4

	hvRemedy = "make it one whole disk with `Convert-VHD` or `qemu-img convert -O qcow2`"
)

// CheckVHD reads the metadata of a dynamic Hyper-V disk (VHD) of size bytes and refuses one that has a parent.
// Errors: InvalidArgument, or DataLoss when it is truncated.
func CheckVHD(r io.ReaderAt, size int64) (virtual int64, err error) {
	buf := make([]byte, qcow2.SectorSize)
	if size < 2*qcow2.SectorSize {
		return 0, errdefs.DataLossf("the Hyper-V disk is truncated: it has only %d bytes; fetch it again", size)
	}
	var sizes [2]int64
	for i, off := range []int64{0, size - qcow2.SectorSize} { // the footer, and its copy at the start
		if err := readAt(r, buf, off); err != nil {
			return 0, err
		}
		if string(buf[:8]) != vhdMagic {
			return 0, errdefs.DataLossf("the Hyper-V disk is truncated: it does not end with its footer; fetch it again")
		}
		be := binary.BigEndian
		switch kind := be.Uint32(buf[60:]); kind {
		case vhdDynamic, vhdFixed:
		case vhdDifferencing:
			return 0, errdefs.Invalidf("the Hyper-V disk is a differencing disk and not complete without its parent; %s", hvRemedy)
		default:
			return 0, errdefs.Invalidf("the Hyper-V disk has the unknown type %d: refused", kind)
		}
		if sizes[i], err = plausible("Hyper-V disk", be.Uint64(buf[48:])); err != nil {
			return 0, err
		}
	}
	if sizes[0] != sizes[1] {
		return 0, errdefs.Invalidf("the Hyper-V disk has a footer that disagrees with its header: refused")
	}
	return sizes[0], nil
}

func plausible(what string, size uint64) (int64, error) {
	if size == 0 || size > qcow2.MaxVirtualSize {
		return 0, errdefs.Invalidf("the %s claims a size of %d bytes; between 1 and %d (64 TiB) are possible", what, size, int64(qcow2.MaxVirtualSize))
	}
	return int64(size), nil
}

const (
	vhdxMagic   = "vhdxfile"
	vhdxHeaders = 64 << 10 // two headers, 64 KiB apart
	vhdxRegions = 192 << 10
	vhdxTable   = 64 << 10 // bytes of a region table and of the metadata table
	vhdxEntries = 2047     // maximum in either table
)

// GUIDs in their form on disk.
var (
	vhdxMetadata = []byte{0x06, 0xa2, 0x7c, 0x8b, 0x90, 0x47, 0x9a, 0x4b, 0xb8, 0xfe, 0x57, 0x5f, 0x05, 0x0f, 0x88, 0x6e}
	vhdxBAT      = []byte{0x66, 0x77, 0xc2, 0x2d, 0x23, 0xf6, 0x00, 0x42, 0x9d, 0x64, 0x11, 0x5e, 0x9b, 0xfd, 0x4a, 0x08}
	vhdxParams   = []byte{0x37, 0x67, 0xa1, 0xca, 0x36, 0xfa, 0x43, 0x4d, 0xb3, 0xb6, 0x33, 0xf0, 0xaa, 0x44, 0xe7, 0x6b}
	vhdxSize     = []byte{0x24, 0x42, 0xa5, 0x2f, 0x1b, 0xcd, 0x76, 0x48, 0xb2, 0x11, 0x5d, 0xbe, 0xd8, 0x3b, 0xf4, 0xb8}
	vhdxParent   = []byte{0x2d, 0x5f, 0xd3, 0xa8, 0x0b, 0xb3, 0x4d, 0x45, 0xab, 0xf7, 0xd3, 0xd8, 0x48, 0x34, 0xab, 0x0c}
)

// CheckVHDX reads the metadata of a Hyper-V disk (VHDX) of size bytes and refuses one that has a parent, or whose log must
// be replayed first.
// Errors: InvalidArgument, or DataLoss when it is truncated.
func CheckVHDX(r io.ReaderAt, size int64) (virtual int64, err error) {
	if err := vhdxLog(r); err != nil {
		return 0, err
	}
	at, err := vhdxRegion(r, size)
	if err != nil {
		return 0, err
	}
	table := make([]byte, vhdxTable)
	if err := readAt(r, table, at); err != nil {
		return 0, err
	}
	le := binary.LittleEndian
	count := int(le.Uint16(table[10:]))
	if string(table[:8]) != "metadata" || count > vhdxEntries {
		return 0, errdefs.Invalidf("the Hyper-V disk has no metadata table at the offset in its header: refused")
	}
	params := false
	for e := table[32 : 32+count*32]; len(e) > 0; e = e[32:] {
		off, length := int64(le.Uint32(e[16:])), le.Uint32(e[20:])
		var item [8]byte
		switch {
		case bytes.Equal(e[:16], vhdxParent):
			return 0, vhdxHasParent()
		case bytes.Equal(e[:16], vhdxParams), bytes.Equal(e[:16], vhdxSize):
			if length != 8 || off < vhdxTable || off > 1<<20 {
				return 0, errdefs.Invalidf("the Hyper-V disk has an invalid metadata item of %d bytes at %d: refused", length, off)
			}
			if err := readAt(r, item[:], at+off); err != nil {
				return 0, err
			}
		default:
			continue
		}
		if bytes.Equal(e[:16], vhdxSize) {
			if virtual, err = plausible("Hyper-V disk", le.Uint64(item[:])); err != nil {
				return 0, err
			}
			continue
		}
		params = true
		block, bits := le.Uint32(item[:]), le.Uint32(item[4:])
		if bits&2 != 0 {
			return 0, vhdxHasParent()
		}
		if block < 1<<20 || block > 256<<20 || block&(block-1) != 0 {
			return 0, errdefs.Invalidf("the Hyper-V disk has the invalid block size of %d bytes: refused", block)
		}
	}
	if virtual == 0 || !params {
		return 0, errdefs.Invalidf("the Hyper-V disk does not say how large it is: refused")
	}
	return virtual, nil
}

func vhdxHasParent() error {
	return errdefs.Invalidf("the Hyper-V disk is a differencing disk and not complete without its parent; %s", hvRemedy)
}

// vhdxLog checks both headers. Either may be the current one, so neither may have an open log.
func vhdxLog(r io.ReaderAt) error {
	buf := make([]byte, 4<<10)
	found := false
	for i := range int64(2) {
		if err := readAt(r, buf, vhdxHeaders*(i+1)); err != nil {
			return err
		}
		if string(buf[:4]) != "head" {
			continue
		}
		found = true
		if !bytes.Equal(buf[48:64], make([]byte, 16)) && newest(r, i, buf) {
			return errdefs.Invalidf("the Hyper-V disk was not closed cleanly: its log holds writes that are not applied yet; attach and detach it once on the machine that it comes from")
		}
	}
	if !found {
		return errdefs.Invalidf("the Hyper-V disk has no header: refused")
	}
	return nil
}

// newest reports whether the sequence number of header i, in buf, is at least that of the other.
func newest(r io.ReaderAt, i int64, buf []byte) bool {
	other := make([]byte, 16)
	if err := readAt(r, other, vhdxHeaders*(2-i)); err != nil || string(other[:4]) != "head" {
		return true
	}
	return binary.LittleEndian.Uint64(buf[8:]) >= binary.LittleEndian.Uint64(other[8:])
}

// vhdxRegion returns where the metadata start. All regions must lie inside the file, in both copies of the table.
func vhdxRegion(r io.ReaderAt, size int64) (at int64, err error) {
	table := make([]byte, vhdxTable)
	le := binary.LittleEndian
	for i := range int64(2) {
		if err := readAt(r, table, vhdxRegions+i*vhdxTable); err != nil {
			return 0, err
		}
		count := int(le.Uint32(table[8:]))
		if string(table[:4]) != "regi" {
			continue
		}
		if count > vhdxEntries {
			return 0, errdefs.Invalidf("the Hyper-V disk has an invalid number of regions, %d: refused", count)
		}
		for e := table[16 : 16+count*32]; len(e) > 0; e = e[32:] {
			off, length := le.Uint64(e[16:]), uint64(le.Uint32(e[24:]))
			if off < 1<<20 || off+length < off || off+length > uint64(size) {
				return 0, errdefs.DataLossf("the Hyper-V disk is truncated: a region ends at byte %d, beyond its end at %d; fetch it again", off+length, size)
			}
			switch {
			case bytes.Equal(e[:16], vhdxMetadata):
				if at != 0 && at != int64(off) {
					return 0, errdefs.Invalidf("the Hyper-V disk has two copies of its regions that disagree: refused")
				}
				at = int64(off)
			case !bytes.Equal(e[:16], vhdxBAT) && le.Uint32(e[28:])&1 != 0:
				return 0, errdefs.Invalidf("the Hyper-V disk needs a region of an unknown type: refused")
			}
		}
	}
	if at == 0 {
		return 0, errdefs.Invalidf("the Hyper-V disk has no metadata table: refused")
	}
	return at, nil
}

func readAt(r io.ReaderAt, p []byte, off int64) error {
	if n, err := r.ReadAt(p, off); n < len(p) {
		if errors.Is(err, io.EOF) {
			return errdefs.DataLossf("the disk is truncated: byte %d lies beyond its end; fetch it again", off+int64(n))
		}
		return fmt.Errorf("read the disk image: %w", err)
	}
	return nil
}

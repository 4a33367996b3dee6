package disk

import (
	"bytes"
	"encoding/binary"
	"io"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/qcow2"
)

const (
	vmdkMagic     = "KDMV"
	vmdkHeader    = 79                    // bytes of the header that are used
	vmdkAtEnd     = ^uint64(0)            // value of gdAt when the grain directory is in the footer
	vmdkFooter    = 3 * qcow2.SectorSize  // marker, footer, end of stream
	vmdkMaxDesc   = 20 * qcow2.SectorSize // QEMU reads this much; we refuse longer ones
	vmdkNoParent  = "ffffffff"
	vmdkMaxGrain  = 2048 // sectors: 1 MiB, as in QEMU
	vmdkFooterTag = 3    // type of the marker before the footer
	vmdkRemedy    = "make it one whole disk with `qemu-img convert -O qcow2`"
)

// sparseHeader is the header of a sparse VMDK extent. Offsets and sizes are in sectors.
type sparseHeader struct {
	version, flags      uint32
	capacity, grainSize uint64
	descAt, descSize    uint64
	gtesPerGT           uint32
	gdAt                uint64
	compression         uint16
}

func parseSparse(b []byte) (sparseHeader, error) {
	if len(b) < vmdkHeader {
		return sparseHeader{}, errdefs.DataLossf("the VMware disk is truncated: its header ends after %d bytes; fetch it again", len(b))
	}
	if string(b[:4]) != vmdkMagic {
		return sparseHeader{}, errdefs.Invalidf("not a VMware disk: it does not begin with KDMV")
	}
	le := binary.LittleEndian
	h := sparseHeader{
		version: le.Uint32(b[4:]), flags: le.Uint32(b[8:]), capacity: le.Uint64(b[12:]), grainSize: le.Uint64(b[20:]),
		descAt: le.Uint64(b[28:]), descSize: le.Uint64(b[36:]), gtesPerGT: le.Uint32(b[44:]),
		gdAt: le.Uint64(b[56:]), compression: le.Uint16(b[77:]),
	}
	switch {
	case h.version < 1 || h.version > 3:
		return sparseHeader{}, errdefs.Invalidf("the VMware disk has version %d; 1 to 3 are known", h.version)
	case h.capacity == 0: // QEMU would then look for the data in the files that the descriptor names
		return sparseHeader{}, errdefs.Invalidf("the VMware disk holds no data of its own: refused")
	case h.capacity > qcow2.MaxVirtualSize/qcow2.SectorSize:
		return sparseHeader{}, errdefs.Invalidf("the VMware disk claims a size of %d sectors; at most %d (64 TiB) are possible", h.capacity, int64(qcow2.MaxVirtualSize/qcow2.SectorSize))
	case h.grainSize == 0 || h.grainSize > vmdkMaxGrain || h.grainSize&(h.grainSize-1) != 0:
		return sparseHeader{}, errdefs.Invalidf("the VMware disk has the invalid grain size of %d sectors: refused", h.grainSize)
	case h.gtesPerGT == 0 || h.gtesPerGT > 512:
		return sparseHeader{}, errdefs.Invalidf("the VMware disk has invalid grain tables of %d entries: refused", h.gtesPerGT)
	case h.compression > 1:
		return sparseHeader{}, errdefs.Invalidf("the VMware disk uses the unknown compression method %d: refused", h.compression)
	}
	return h, nil
}

// CheckVMDK reads the metadata of a VMware disk of size bytes (monolithicSparse or streamOptimized) and refuses anything
// that would make a reader open another file: parents and extents.
// Errors: InvalidArgument, or DataLoss when it is truncated.
func CheckVMDK(r io.ReaderAt, size int64) (virtual int64, err error) {
	head := make([]byte, min(size, qcow2.SectorSize))
	if err := readAt(r, head, 0); err != nil {
		return 0, err
	}
	h, err := parseSparse(head)
	if err != nil {
		return 0, err
	}
	if err := h.descriptor(r, size); err != nil {
		return 0, err
	}
	f := h
	if h.gdAt == vmdkAtEnd {
		if f, err = footer(r, size); err != nil {
			return 0, err
		}
		if f.capacity != h.capacity || f.grainSize != h.grainSize || f.gtesPerGT != h.gtesPerGT || f.gdAt == vmdkAtEnd {
			return 0, errdefs.Invalidf("the VMware disk has a footer that disagrees with its header: refused")
		}
	}
	if end := uint64(size) / qcow2.SectorSize; f.gdAt >= end {
		return 0, errdefs.DataLossf("the VMware disk is truncated: its grain directory lies at sector %d, beyond its end at %d; fetch it again", f.gdAt, end)
	}
	return int64(h.capacity) * qcow2.SectorSize, nil
}

func footer(r io.ReaderAt, size int64) (sparseHeader, error) {
	if size < vmdkFooter+qcow2.SectorSize {
		return sparseHeader{}, errdefs.DataLossf("the VMware disk is truncated: it has no footer; fetch it again")
	}
	buf := make([]byte, vmdkFooter)
	if err := readAt(r, buf, size-vmdkFooter); err != nil {
		return sparseHeader{}, err
	}
	le := binary.LittleEndian
	if le.Uint64(buf) != 1 || le.Uint32(buf[12:]) != vmdkFooterTag || string(buf[qcow2.SectorSize:qcow2.SectorSize+4]) != vmdkMagic {
		return sparseHeader{}, errdefs.DataLossf("the VMware disk is truncated: it does not end with its footer; fetch it again")
	}
	return parseSparse(buf[qcow2.SectorSize:])
}

// descriptor checks the text inside the disk, which can name a parent and data files.
func (h sparseHeader) descriptor(r io.ReaderAt, size int64) error {
	if h.descAt == 0 { // no descriptor, so it refers to nothing
		return nil
	}
	if h.descAt > 1<<40 || h.descSize*qcow2.SectorSize > vmdkMaxDesc || h.descSize > vmdkMaxDesc {
		return errdefs.Invalidf("the VMware disk has an invalid descriptor of %d sectors at sector %d: refused", h.descSize, h.descAt)
	}
	off := int64(h.descAt) * qcow2.SectorSize
	if off >= size {
		return errdefs.DataLossf("the VMware disk is truncated: its descriptor lies at byte %d, beyond its end at %d; fetch it again", off, size)
	}
	buf := make([]byte, min(vmdkMaxDesc, size-off)) // as much as QEMU searches, whatever the header says
	if err := readAt(r, buf, off); err != nil {
		return err
	}
	if bytes.Contains(buf, []byte("parentFileNameHint")) {
		return errdefs.Invalidf("the VMware disk is not complete without its parent disk; %s", vmdkRemedy)
	}
	text, _, _ := bytes.Cut(buf[:min(int64(len(buf)), int64(h.descSize)*qcow2.SectorSize)], []byte{0})
	return checkDescriptor(string(text))
}

func checkDescriptor(text string) error {
	extents := 0
	for _, line := range strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == '\r' }) {
		line = strings.TrimSpace(line)
		key, value, _ := strings.Cut(line, "=")
		value = strings.Trim(strings.TrimSpace(value), `"`)
		switch strings.ToLower(strings.TrimSpace(key)) {
		case "parentcid":
			if !strings.EqualFold(value, vmdkNoParent) {
				return errdefs.Invalidf("the VMware disk is not complete without its parent disk; %s", vmdkRemedy)
			}
		case "createtype":
			if !strings.EqualFold(value, "monolithicSparse") && !strings.EqualFold(value, "streamOptimized") {
				return errdefs.Invalidf("the VMware disk has the type %q, which keeps its data in other files; %s", value, vmdkRemedy)
			}
		}
		if f := strings.Fields(line); len(f) >= 4 && (f[0] == "RW" || f[0] == "RDONLY" || f[0] == "NOACCESS") {
			if _, err := strconv.ParseUint(f[1], 10, 64); err == nil {
				extents++
				if f[2] != "SPARSE" || strings.ContainsAny(line, `/\`) {
					return errdefs.Invalidf("the VMware disk keeps its data in other files; %s", vmdkRemedy)
				}
			}
		}
	}
	if extents > 1 {
		return errdefs.Invalidf("the VMware disk consists of %d files; %s", extents, vmdkRemedy)
	}
	return nil
}

package qcow2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Layout of the overlays we write: 64 KiB clusters. The header, the reference count table and its first block take one
// cluster each; the L1 table follows. All bytes after the first entries are zero and stay a hole in the file.
const (
	overlayBits     = 16
	overlayCluster  = 1 << overlayBits
	overlayRefTable = 1 * overlayCluster
	overlayRefBlock = 2 * overlayCluster
	overlayL1       = 3 * overlayCluster
	overlayHeader   = 112 // bytes, including the compression type
	maxBackingName  = 1023
)

// Overlay is an empty qcow2 image that shows its backing file until it is written to.
type Overlay struct {
	VirtualSize   int64 // bytes
	Backing       string
	BackingFormat vm.DiskFormat
}

// Create writes the overlay as path. A readable overlay that exists is kept with all its content.
// Errors: InvalidArgument for an impossible overlay, DataLoss when path holds something else.
//
// It does not sync. A power cut can leave an empty file, but only if no guest ever flushed data to the overlay. Create
// replaces an empty file.
func (o Overlay) Create(path string) error {
	head, size, err := o.encode()
	if err != nil {
		return err
	}
	if kept, err := keep(path); kept || err != nil {
		return err
	}
	stale, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".tmp-*"))
	for _, s := range stale { // left by an attempt that was killed: a VM's folder has one writer at a time
		_ = os.Remove(s)
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".tmp-*")
	if err != nil {
		return fmt.Errorf("create overlay %s: %w", path, err)
	}
	defer os.Remove(f.Name())
	if err := errors.Join(o.write(f, head, size), f.Close()); err != nil {
		return fmt.Errorf("create overlay %s: %w", path, err)
	}
	if err := os.Link(f.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) { // a link never replaces a disk
		return fmt.Errorf("create overlay %s: %w", path, err)
	}
	return nil
}

func (o Overlay) write(f *os.File, head []byte, size int64) error {
	if err := f.Truncate(size); err != nil {
		return err
	}
	var refTable [8]byte
	binary.BigEndian.PutUint64(refTable[:], overlayRefBlock)
	counts := bytes.Repeat([]byte{0, 1}, int((size+overlayCluster-1)/overlayCluster))
	for _, part := range []struct {
		off  int64
		data []byte
	}{{0, head}, {overlayRefTable, refTable[:]}, {overlayRefBlock, counts}} {
		if _, err := f.WriteAt(part.data, part.off); err != nil {
			return err
		}
	}
	return nil
}

// encode returns the start of the header cluster and the size of the file.
func (o Overlay) encode() ([]byte, int64, error) {
	const perL1 = overlayCluster * (overlayCluster / 8)
	switch {
	case o.VirtualSize <= 0 || o.VirtualSize > MaxVirtualSize || o.VirtualSize%SectorSize != 0:
		return nil, 0, errdefs.Invalidf("invalid disk size of %d bytes; use %d to %d in steps of %d", o.VirtualSize, SectorSize, int64(MaxVirtualSize), SectorSize)
	case !filepath.IsAbs(o.Backing) || len(o.Backing) > maxBackingName:
		return nil, 0, errdefs.Invalidf("invalid backing file %q; use an absolute path of at most %d bytes", o.Backing, maxBackingName)
	}
	entries := (o.VirtualSize + perL1 - 1) / perL1
	format := string(o.BackingFormat)
	be := binary.BigEndian
	h := make([]byte, overlayHeader)
	copy(h, Magic)
	be.PutUint32(h[4:], 3)
	be.PutUint32(h[20:], overlayBits)
	be.PutUint64(h[24:], uint64(o.VirtualSize))
	be.PutUint32(h[36:], uint32(entries))
	be.PutUint64(h[40:], overlayL1)
	be.PutUint64(h[48:], overlayRefTable)
	be.PutUint32(h[56:], 1)
	be.PutUint32(h[96:], 4) // 16-bit reference counts
	be.PutUint32(h[100:], overlayHeader)
	h = be.AppendUint32(h, extBackingFormat)
	h = be.AppendUint32(h, uint32(len(format)))
	h = append(h, format...)
	h = append(h, make([]byte, (8-len(format)%8)%8)...)
	h = be.AppendUint64(h, extEnd)
	be.PutUint64(h[8:], uint64(len(h)))
	be.PutUint32(h[16:], uint32(len(o.Backing)))
	h = append(h, o.Backing...)
	l1Clusters := (entries*8 + overlayCluster - 1) / overlayCluster
	return h, overlayL1 + l1Clusters*overlayCluster, nil
}

// keep reports whether path holds a qcow2 image. It removes an empty file, or one whose header never reached the disk.
func keep(path string) (bool, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at overlay: %w", err)
	}
	defer f.Close()
	var magic [4]byte
	n, _ := f.ReadAt(magic[:], 0)
	switch {
	case string(magic[:]) == Magic:
		return true, nil
	case n == 0 || magic == [4]byte{}:
		if err := os.Remove(path); err != nil {
			return false, fmt.Errorf("replace the overlay that a power cut emptied: %w", err)
		}
		return false, nil
	}
	return false, errdefs.DataLossf("%s is not the qcow2 disk that was made there; remove the VM and create it again", path)
}

// Package xfs grows mounted file systems to the size of their disks.
//
// It does not make or check file systems; the kernel does the actual work.
package xfs

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// From fs/xfs/libxfs/xfs_fs.h of Linux.
const (
	fsGeometry = 0x80705864 // XFS_IOC_FSGEOMETRY_V1: _IOR('X', 100, struct xfs_fsop_geom_v1)
	growData   = 0x4010586e // XFS_IOC_FSGROWFSDATA: _IOW('X', 110, struct xfs_growfs_data)

	geometrySize = 112 // of struct xfs_fsop_geom_v1, in bytes
	blockSizeAt  = 0   // __u32 blocksize, in bytes
	inodesAt     = 28  // __u32 imaxpct: the share of the blocks that inodes may use, in per cent
	blocksAt     = 32  // __u64 datablocks
)

// growth is struct xfs_growfs_data.
type growth struct {
	blocks uint64
	inodes uint32 // imaxpct; another value than the file system has changes it
	_      uint32
}

// Grow extends the file system of dir, a folder in it, to all of its device dev. It is no error if it has that size already.
// Errors: Unsupported if it is not xfs, Unavailable while another program grows it.
func Grow(dir *os.File, dev string) error {
	disk, err := os.Open(dev)
	if err != nil {
		return fmt.Errorf("look at the disk: %w", err)
	}
	defer disk.Close()
	size, err := disk.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("look at the size of the disk: %w", err)
	}
	var has [geometrySize]byte
	switch errno := ioctl(dir, fsGeometry, unsafe.Pointer(&has)); errno {
	case 0:
	case unix.ENOTTY:
		return errdefs.Unsupportedf("the disk has no xfs file system")
	default:
		return fmt.Errorf("ask for the size of the file system: %w", errno)
	}
	g, more := growthOf(has, size)
	if !more {
		return nil
	}
	switch errno := ioctl(dir, growData, unsafe.Pointer(&g)); errno {
	case 0:
		return nil
	case unix.EWOULDBLOCK:
		return errdefs.Unavailablef("another program is changing the size of the xfs file system; try again")
	default:
		return fmt.Errorf("grow the xfs file system of the disk to %d bytes: %w", size, errno)
	}
}

// growthOf returns how a file system with the geometry has grows to a disk of size bytes, and whether it does. It never shrinks one.
func growthOf(has [geometrySize]byte, size int64) (g growth, more bool) {
	block := uint64(binary.NativeEndian.Uint32(has[blockSizeAt:]))
	if block == 0 || size <= 0 {
		return growth{}, false
	}
	g = growth{blocks: uint64(size) / block, inodes: binary.NativeEndian.Uint32(has[inodesAt:])}
	return g, g.blocks > binary.NativeEndian.Uint64(has[blocksAt:])
}

func ioctl(f *os.File, request uintptr, arg unsafe.Pointer) unix.Errno {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg))
	return errno
}

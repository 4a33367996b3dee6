// Package ext4 lets the file system of the writable disk follow the size of that disk, while it is mounted.
//
// It does not make, check or shrink file systems, and leaves the work itself to the kernel.
package ext4

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// resizeFS is EXT4_IOC_RESIZE_FS: _IOW('f', 16, __u64). Its argument is the number of blocks.
//
// Our file systems reserve no room for more group descriptors (resize_inode), so the kernel turns to meta_bg when they
// outgrow their block: one holds those of 8 GiB. It must have the fix "ext4: fix corruption during on-line resize", of 2024.
const resizeFS = 0x40086610

const (
	sectorSize = 512 // of /sys, whatever the disk's is
	lookAgain  = 2 * time.Millisecond
)

// Grow gives the file system of dir, a folder in it, all of the disk that it is on. It is no error when it has it already.
func Grow(dir *os.File) error {
	size, err := diskSize("/sys/dev/block", dir)
	if err != nil {
		return err
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &fs); err != nil {
		return fmt.Errorf("look at the writable disk: %w", err)
	}
	if fs.Type != unix.EXT4_SUPER_MAGIC || fs.Bsize <= 0 {
		return errdefs.Unsupportedf("the writable disk holds no ext4, which alone can grow")
	}
	blocks := uint64(size / fs.Bsize)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), resizeFS, uintptr(unsafe.Pointer(&blocks))); errno != 0 {
		return fmt.Errorf("grow the file system of the writable disk to %d bytes: %w", size, errno)
	}
	return nil
}

// Await returns when the disk that dir is on has at least size bytes: the kernel learns of it some time after the host has
// grown it. Unavailable when ctx ends before.
func Await(ctx context.Context, dir *os.File, size int64) error {
	tick := time.NewTicker(lookAgain)
	defer tick.Stop()
	for {
		has, err := diskSize("/sys/dev/block", dir)
		if err != nil || has >= size {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errdefs.Unavailablef("the writable disk has %d bytes still instead of %d", has, size)
		}
	}
}

// diskSize is how many bytes the kernel thinks the disk has that dir is on. It does not need the disk's device file, which
// the guest's users may remove.
func diskSize(sys string, dir *os.File) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return 0, fmt.Errorf("look at the writable disk: %w", err)
	}
	text, err := os.ReadFile(filepath.Join(sys, fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)), "size"))
	if err != nil {
		return 0, fmt.Errorf("look at the size of the writable disk: %w", err)
	}
	sectors, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("look at the size of the writable disk: %w", err)
	}
	return sectors * sectorSize, nil
}

// Of struct ext4_super_block.
const (
	superAt       = 1024
	superSize     = 1024
	blocksLow     = 0x04
	logBlockSize  = 0x18
	magic         = 0x38
	incompat      = 0x60
	blocksHigh    = 0x150
	incompat64bit = 0x80
)

// Smaller reports whether the file system on the device dev leaves some of it unused.
func Smaller(dev string) (bool, error) {
	f, err := os.Open(dev)
	if err != nil {
		return false, fmt.Errorf("look at the writable disk: %w", err)
	}
	defer f.Close()
	super := make([]byte, superSize)
	if _, err := f.ReadAt(super, superAt); err != nil {
		return false, fmt.Errorf("look at the file system of the writable disk: %w", err)
	}
	size, block := sizeIn(super)
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return false, fmt.Errorf("look at the size of the writable disk: %w", err)
	}
	return block > 0 && uint64(end)/block > size, nil
}

// sizeIn is how many blocks of how many bytes a file system has, by its super block; zeros when it is none of ext4.
func sizeIn(super []byte) (blocks, block uint64) {
	u32 := func(at int) uint64 { return uint64(binary.LittleEndian.Uint32(super[at:])) }
	const largest = 6 // 64 KiB
	if len(super) < superSize || binary.LittleEndian.Uint16(super[magic:]) != 0xef53 || u32(logBlockSize) > largest {
		return 0, 0
	}
	blocks = u32(blocksLow)
	if u32(incompat)&incompat64bit != 0 {
		blocks |= u32(blocksHigh) << 32
	}
	return blocks, 1024 << u32(logBlockSize)
}

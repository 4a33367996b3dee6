// Package ext4 grows mounted file systems to the size of their disks, and tells what state the file system of a disk is in.
//
// It does not make, check or shrink file systems; the kernel does the actual work.
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
// Our file systems reserve no space for more group descriptors (resize_inode), so the kernel switches to meta_bg when
// they no longer fit their block: one block holds those of 8 GiB. The kernel must have the fix "ext4: fix corruption
// during on-line resize", of 2024.
const resizeFS = 0x40086610

const (
	sectorSize = 512 // of /sys, for every disk
	lookAgain  = 2 * time.Millisecond
)

// Grow extends the file system of dir, a folder in it, to its whole disk. It is no error if it has that size already.
func Grow(dir *os.File) error {
	size, err := diskSize("/sys/dev/block", dir)
	if err != nil {
		return err
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &fs); err != nil {
		return fmt.Errorf("look at the disk: %w", err)
	}
	if fs.Type != unix.EXT4_SUPER_MAGIC || fs.Bsize <= 0 {
		return errdefs.Unsupportedf("the disk has no ext4 file system")
	}
	blocks := uint64(size / fs.Bsize)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), resizeFS, uintptr(unsafe.Pointer(&blocks))); errno != 0 {
		return fmt.Errorf("grow the file system of the disk to %d bytes: %w", size, errno)
	}
	return nil
}

// Await returns when the disk of dir, a folder on it or its device, has at least size bytes: the kernel learns of a new size some time after the host
// has grown the disk. Unavailable when ctx ends first.
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
			return errdefs.Unavailablef("the disk still has %d bytes instead of %d", has, size)
		}
	}
}

// diskSize is the size in bytes that the kernel reports for the disk of dir, a folder on it or its device. It does not need the disk's device file,
// which users of the guest may remove.
func diskSize(sys string, dir *os.File) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return 0, fmt.Errorf("look at the disk: %w", err)
	}
	dev := st.Dev
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		dev = st.Rdev
	}
	text, err := os.ReadFile(filepath.Join(sys, fmt.Sprintf("%d:%d", unix.Major(dev), unix.Minor(dev)), "size"))
	if err != nil {
		return 0, fmt.Errorf("look at the size of the disk: %w", err)
	}
	sectors, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("look at the size of the disk: %w", err)
	}
	return sectors * sectorSize, nil
}

// From struct ext4_super_block.
const (
	superAt      = 1024
	superSize    = 1024
	blocksLow    = 0x04
	logBlockSize = 0x18
	magic        = 0x38
	state        = 0x3a
	compat       = 0x5c
	incompat     = 0x60
	blocksHigh   = 0x150
	errorCount   = 0x194

	stateValid      = 1
	stateErrors     = 2
	compatJournal   = 0x4
	incompatRecover = 0x4
	incompat64bit   = 0x80
)

// Smaller reports whether the file system on the device dev leaves a part of dev unused.
func Smaller(dev string) (bool, error) {
	f, err := os.Open(dev)
	if err != nil {
		return false, fmt.Errorf("look at the disk: %w", err)
	}
	defer f.Close()
	super, err := readSuper(f)
	if err != nil {
		return false, err
	}
	size, block := sizeIn(super)
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return false, fmt.Errorf("look at the size of the disk: %w", err)
	}
	return block > 0 && uint64(end)/block > size, nil
}

// sizeIn returns the number of blocks and the block size in bytes from a super block; zeros when it is not ext4.
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

// State is the state of a file system in its superblock. The zero State is clean.
type State struct {
	Damaged bool // the kernel has found errors, or a file system without a journal was not unmounted
	Replay  bool // its journal must be replayed, which the kernel does when it mounts it
}

// StateOf returns the state of the file system on the device dev. DataLoss if there is none.
func StateOf(dev string) (State, error) {
	f, err := os.Open(dev)
	if err != nil {
		return State{}, fmt.Errorf("look at the disk: %w", err)
	}
	defer f.Close()
	super, err := readSuper(f)
	if err != nil {
		return State{}, err
	}
	return stateIn(super)
}

func readSuper(f *os.File) ([]byte, error) {
	super := make([]byte, superSize)
	if _, err := f.ReadAt(super, superAt); err != nil {
		return nil, fmt.Errorf("look at the file system of the disk: %w", err)
	}
	return super, nil
}

func stateIn(super []byte) (State, error) {
	if _, block := sizeIn(super); block == 0 {
		return State{}, errdefs.DataLossf("the superblock of the ext4 file system has unexpected values")
	}
	le := binary.LittleEndian
	flags, journal := le.Uint16(super[state:]), le.Uint32(super[compat:])&compatJournal != 0
	return State{
		Damaged: flags&stateErrors != 0 || le.Uint32(super[errorCount:]) > 0 || flags&stateValid == 0 && !journal,
		Replay:  le.Uint32(super[incompat:])&incompatRecover != 0,
	}, nil
}

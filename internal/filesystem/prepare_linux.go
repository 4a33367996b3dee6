// Package filesystem makes the file system of a disk ready to be mounted. The rules are those of guests, and of the host where it mounts volumes
// for containers, so that a disk moves between them as it is.
//
// It mounts nothing, and does not look for disks.
package filesystem

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	format "cocoonstack.io/cocoon/internal/ext4"
	"cocoonstack.io/cocoon/internal/filesystem/ext4"
	"cocoonstack.io/cocoon/internal/filesystem/signature"
	"cocoonstack.io/cocoon/internal/filesystem/xfs"
)

// Rules say how a disk is used.
type Rules struct {
	ReadOnly bool
	FSType   string // of a new file system: "xfs", or else ext4
	Group    *int64 // of the root folder of a new file system; nil: root's
	Keep     bool   // freed space is not given back to the disk

	MountsXFS func() error                                // nil, or why xfs cannot be mounted
	MakeXFS   func(ctx context.Context, dev string) error // makes an xfs file system on a blank disk
	// Check runs e2fsck. Errors: Unsupported if there is none.
	Check func(ctx context.Context, args ...string) (code int, output string, err error)
}

// Open opens a device, which must be writable unless readOnly.
// Errors: FailedPrecondition if it is not.
func Open(dev string, readOnly bool) (*os.File, error) {
	f, err := os.Open(dev)
	if err != nil || readOnly {
		return f, err
	}
	fixed, err := readOnlyDisk(f)
	if err == nil && fixed {
		err = errdefs.Preconditionf("the disk is read-only; use the volume read-only")
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	return os.OpenFile(dev, os.O_RDWR, 0)
}

// Prepare makes a file system on a blank disk, and checks one that is there. It returns the type and the options to mount it with. It never
// changes a disk with anything else.
// Errors: FailedPrecondition if the disk cannot be mounted as it is, DataLoss if its file system is damaged beyond repair, Unsupported and
// InvalidArgument if the file system cannot be made or mounted here.
func Prepare(ctx context.Context, disk *os.File, r Rules) (kind signature.Kind, options string, err error) {
	if kind, err = contentOf(disk); err != nil {
		return "", "", err
	}
	if kind == signature.Blank || kind == signature.Unfinished {
		if kind, err = r.format(ctx, disk); err != nil {
			return "", "", err
		}
	}
	switch kind {
	case signature.Ext4:
		options, err = r.checkExt4(ctx, disk)
	case signature.XFS:
		err = r.MountsXFS()
	default:
		err = errdefs.Preconditionf(
			"it holds %s instead of an ext4 or xfs file system, and stays unchanged; use the volume as a device, or erase the first and the last MiB of the disk to get a new file system", kind)
	}
	return kind, options, err
}

// MountError returns why a mount of a file system of this kind failed with err.
func MountError(kind signature.Kind, err error) error {
	if kind == signature.XFS && slices.ContainsFunc(damagedXFS, func(e error) bool { return errors.Is(err, e) }) {
		return errdefs.DataLossf("its xfs file system is damaged, or too new for the kernel, and is not mounted; run xfs_repair in a VM that has the volume as a device: %w", err)
	}
	return fmt.Errorf("mount its %s file system: %w", kind, err)
}

// damagedXFS are the errors of a mount of xfs for what the disk holds.
var damagedXFS = []error{unix.EUCLEAN, unix.EINVAL, unix.ENOSYS, unix.EFBIG, unix.EBADMSG}

// Grow extends the mounted file system of root to all of its device dev. It is no error if it has that size already, or cannot be written to.
func Grow(root *os.File, dev string) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(root.Fd()), &fs); err != nil {
		return fmt.Errorf("look at the file system: %w", err)
	}
	if fs.Flags&unix.ST_RDONLY != 0 { // some say of themselves that they can only be read, such as that of a memory dump
		return nil
	}
	if fs.Type == unix.XFS_SUPER_MAGIC {
		return xfs.Grow(root, dev)
	}
	smaller, err := ext4.Smaller(dev)
	if err != nil || !smaller {
		return err
	}
	return ext4.Grow(root)
}

// contentOf tells what a disk holds.
func contentOf(disk *os.File) (signature.Kind, error) {
	size, err := disk.Seek(0, io.SeekEnd)
	if err != nil {
		return "", fmt.Errorf("look at its size: %w", err)
	}
	const usual = 128 << 10 // where the signatures of nearly all disks are
	window := make([]byte, min(size, signature.Window))
	for _, head := range [][]byte{window[:min(len(window), usual)], window} {
		if _, err := disk.ReadAt(head, 0); err != nil {
			return "", fmt.Errorf("look for a file system: %w", err)
		}
		if kind := signature.Identify(head, nil); kind != signature.Blank && kind != signature.Unknown {
			return kind, nil
		}
	}
	if signature.Identify(window, nil) == signature.Unknown {
		return signature.Unknown, nil
	}
	if _, err := disk.ReadAt(window, size-int64(len(window))); err != nil {
		return "", fmt.Errorf("look for a file system: %w", err)
	}
	return signature.Identify(nil, window), nil
}

// format makes a file system on a blank disk.
func (r Rules) format(ctx context.Context, disk *os.File) (signature.Kind, error) {
	if r.ReadOnly {
		return "", errdefs.Preconditionf("the disk is blank, and a read-only volume cannot get a file system; use it in a VM that can write to it first")
	}
	if r.FSType == string(signature.XFS) {
		if err := r.MountsXFS(); err != nil {
			return "", err
		}
		return signature.XFS, r.MakeXFS(ctx, disk.Name())
	}
	size, err := disk.Seek(0, io.SeekEnd)
	if err != nil {
		return "", fmt.Errorf("look at its size: %w", err)
	}
	e := format.Empty{Size: size, Mode: 0o777, Now: time.Now()}
	if r.Group != nil {
		e.Mode, e.GID = 0o777|unix.S_ISGID, uint32(*r.Group)
	}
	_, _ = rand.Read(e.ID[:])
	e.ID[6], e.ID[8] = e.ID[6]&0x0f|0x40, e.ID[8]&0x3f|0x80 // a random UUID, as tools expect it
	return signature.Ext4, format.Format(disk, e)
}

// checkExt4 returns the options to mount a file system with. It repairs one with errors if it can, and fails if it cannot.
func (r Rules) checkExt4(ctx context.Context, disk *os.File) (options string, err error) {
	const common = "errors=remount-ro"
	state, err := ext4.StateOf(disk.Name())
	if err != nil {
		return "", err
	}
	fixed, err := readOnlyDisk(disk)
	if err != nil {
		return "", err
	}
	switch {
	case state.Damaged && fixed:
		return "", errdefs.DataLossf("its ext4 file system has errors, and the disk is read-only; use the volume in a VM that can write to it, which repairs it, or run e2fsck on the disk")
	case state.Damaged:
		return common + r.writable(), r.repair(ctx, disk)
	case fixed && state.Replay:
		return "", errdefs.Preconditionf("its ext4 file system was not unmounted, and its journal cannot be replayed because the disk is read-only; use the volume in a VM that can write to it first")
	case fixed:
		return common + ",noload", nil
	case r.ReadOnly:
		return common, nil
	}
	return common + r.writable(), nil
}

// writable returns options of a file system that is written to. The kernel does not fill the tables of inodes with zeros, which would
// use the disk; checksums tell it which inodes were ever used. The disk gets freed space back.
func (r Rules) writable() string {
	if r.Keep {
		return ",noinit_itable"
	}
	return ",discard,noinit_itable"
}

func readOnlyDisk(disk *os.File) (bool, error) {
	n, err := unix.IoctlGetInt(int(disk.Fd()), unix.BLKROGET)
	if err != nil {
		return false, fmt.Errorf("ask whether it is read-only: %w", err)
	}
	return n != 0, nil
}

// repairLimit limits a repair, which does not end early when its caller goes away.
const repairLimit = 30 * time.Minute

// maxRepaired is the highest exit code of e2fsck that means success: 1 and 2 tell that it has repaired something.
const maxRepaired = 2

// repair runs e2fsck on a file system with errors.
func (r Rules) repair(ctx context.Context, disk *os.File) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), repairLimit)
	defer cancel()
	code, output, err := r.Check(ctx, "-p", disk.Name())
	if err == nil && code > maxRepaired {
		err = errdefs.DataLossf("e2fsck -p cannot repair it (code %d): %s", code, output)
	}
	if err == nil {
		var state ext4.State
		if state, err = ext4.StateOf(disk.Name()); err == nil && state.Damaged {
			err = errdefs.DataLossf("e2fsck -p has left errors: %s", output)
		}
	}
	if err != nil {
		return fmt.Errorf("its ext4 file system has errors and is not mounted; run e2fsck on the disk while no VM uses it: %w", err)
	}
	return nil
}

package volumes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Permissions that a group gets for the files of a volume, as from the kubelet.
const (
	groupReads   = 0o060 | 0o600
	groupEntries = 0o110 | unix.S_ISGID // of folders
	permissions  = 0o7777
)

// regroup gives all files of the file system to a group. With onMismatch it does nothing if the root belongs to the group already.
// It follows no links and stays in the file system.
func regroup(ctx context.Context, root *os.File, gid int, onMismatch bool) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(root.Fd()), &st); err != nil {
		return err
	}
	if onMismatch && grouped(&st, gid) {
		return nil
	}
	if err := regroupIn(ctx, int(root.Fd()), st.Dev, gid); err != nil {
		return fmt.Errorf("give its files to group %d: %w", gid, err)
	}
	// The root is last: it tells the next time whether all files belong to the group.
	return regroupOne(int(root.Fd()), &st, gid)
}

// grouped reports whether a file belongs to the group with all permissions.
func grouped(st *unix.Stat_t, gid int) bool {
	return st.Gid == uint32(gid) && st.Mode&wanted(st) == wanted(st)
}

func wanted(st *unix.Stat_t) uint32 {
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return groupReads | groupEntries
	}
	return groupReads
}

// regroupIn is regroup for what is in the folder fd.
func regroupIn(ctx context.Context, fd int, dev uint64, gid int) error {
	own, err := unix.Openat(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	dir := os.NewFile(uintptr(own), "a folder of the volume")
	defer dir.Close()
	for {
		names, err := dir.Readdirnames(256)
		for _, name := range names {
			if err := regroupName(ctx, own, name, dev, gid); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func regroupName(ctx context.Context, parent int, name string, dev uint64, gid int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	fd, err := unix.Openat(parent, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Dev != dev {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		if err := regroupIn(ctx, fd, dev, gid); err != nil {
			return err
		}
	}
	return regroupOne(fd, &st, gid)
}

// regroupOne gives one file to the group. fd may be a reference only.
func regroupOne(fd int, st *unix.Stat_t, gid int) error {
	link := st.Mode&unix.S_IFMT == unix.S_IFLNK
	if grouped(st, gid) || link && st.Gid == uint32(gid) {
		return nil
	}
	if err := unix.Fchownat(fd, "", -1, gid, unix.AT_EMPTY_PATH); err != nil || link {
		return err
	}
	return unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), st.Mode&permissions|wanted(st)) // after the change of group, which clears bits
}

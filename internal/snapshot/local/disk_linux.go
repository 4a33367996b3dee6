package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filelock"
	"cocoonstack.io/cocoon/internal/sparse"
)

// takeLock takes the lock file until it is closed or the process dies.
func takeLock(ctx context.Context, path string) (*os.File, error) {
	f, err := filelock.Take(ctx, path)
	if errors.Is(err, filelock.ErrTaken) {
		return nil, errdefs.Preconditionf("another process uses it; stop that process first: is cocoond running twice?")
	}
	return f, full(err)
}

// full turns disk-full errors into ResourceExhausted.
func full(err error) error {
	if err == nil || errdefs.ClassOf(err) != errdefs.Internal {
		return err
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG) {
		return errdefs.Exhaustedf("the disk of the snapshot store is full; `cocoon snapshot rm` frees room (%w)", err)
	}
	return err
}

// room returns the free bytes on the disk of the store.
func (s *Store) room() (int64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(s.cfg.Dir, &fs); err != nil {
		return 0, fmt.Errorf("read the free space of the snapshot store: %w", err)
	}
	return int64(fs.Bavail) * fs.Bsize, nil
}

// inode identifies a file that has several names.
type inode struct{ dev, ino uint64 }

func inodeOf(info fs.FileInfo) inode {
	st, _ := info.Sys().(*syscall.Stat_t)
	return inode{st.Dev, st.Ino}
}

// occupied returns the bytes that the files of a folder occupy on disk, each file counted once.
func occupied(dir string) (int64, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	var total int64
	seen := map[inode]bool{}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return 0, err
		}
		if i := inodeOf(info); !seen[i] {
			seen[i] = true
			total += sparse.Occupied(info)
		}
	}
	return total, nil
}

// trusted reports whether only root and this user could have written the file of info.
func trusted(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && (st.Uid == 0 || int(st.Uid) == os.Geteuid()) && info.Mode().Perm()&0o022 == 0
}

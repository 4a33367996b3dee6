package proc

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Add puts a file or a block device into the Root of a process that is root in no namespace, as Root.Files does, at a path that the Root has nothing at.
// user is the one of the process. What an earlier Add put there goes.
// Errors: NotFound if the process has ended, Unsupported if the file system cannot do that.
func (p *Process) Add(f RootFile, user User) error {
	root := &placed{user: user}
	spaces := spaces{}
	defer spaces.close()
	t, err := root.file(f, spaces)
	if err != nil {
		return fmt.Errorf("add %s to the root of process %d: %w", f.File.Name(), p.pid, err)
	}
	if t.fd >= 0 {
		defer func() { _ = unix.Close(t.fd) }()
	}
	if t.mode&unix.S_IFMT == unix.S_IFDIR {
		return errdefs.Invalidf("add %s to the root of process %d: it is a folder", f.File.Name(), p.pid)
	}
	err = p.inMounts(func() error {
		if err := remove(f.At); err != nil {
			return err
		}
		err := changeRoot(f.At, func(dir int, name string) error { return root.make(t, dir, name) })
		if err == nil && t.fd >= 0 {
			err = unix.MoveMount(t.fd, "", unix.AT_FDCWD, f.At, unix.MOVE_MOUNT_F_EMPTY_PATH)
		}
		if err != nil {
			return errors.Join(err, remove(f.At))
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("add %s to the root of process %d: %w", f.File.Name(), p.pid, err)
	}
	return nil
}

// Remove takes away what Add, or Root.Files, put at a path. It is no error if there is nothing. A file that the process has opened stays open.
func (p *Process) Remove(at string) error {
	if !clean(at) {
		return errdefs.Invalidf("%q is no absolute, clean path", at)
	}
	if err := p.inMounts(func() error { return remove(at) }); err != nil {
		return fmt.Errorf("remove %s from the root of process %d: %w", at, p.pid, err)
	}
	return nil
}

// make makes what t is mounted over, or the device that t is.
func (p *placed) make(t part, dir int, name string) error {
	mode := uint32(unix.S_IFREG | 0o444)
	if t.fd < 0 {
		mode = t.mode
	}
	if err := unix.Mknodat(dir, name, mode, t.rdev); err != nil || t.fd >= 0 {
		return err
	}
	if err := unix.Fchownat(dir, name, int(p.user.UID), int(p.user.GID), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	return unix.Fchmodat(dir, name, mode&0o777, 0) // whatever the mask of this process is
}

// remove takes away what is at a path of the Root in which this thread is.
func remove(at string) error {
	if err := unmountAll(at); errors.Is(err, unix.ENOENT) {
		return nil
	} else if err != nil {
		return err
	}
	return changeRoot(at, func(dir int, name string) error {
		if err := unix.Unlinkat(dir, name, 0); !errors.Is(err, unix.ENOENT) {
			return err
		}
		return nil
	})
}

// changeRoot runs f with the folder of a path in the Root in which this thread is. Nobody can write to the Root where it is mounted, so this is done in
// another mount of it, that nobody else sees.
func changeRoot(at string, f func(dir int, name string) error) error {
	root, err := cloneMount(unix.AT_FDCWD, "/", 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(root) }()
	if err := unix.MountSetattr(root, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}); err != nil {
		return fmt.Errorf("open the root for changes: %w", err)
	}
	dir := root
	for name := range strings.SplitSeq(strings.Trim(filepath.Dir(at), "/"), "/") {
		if name == "" {
			break
		}
		if err := unix.Mkdirat(dir, name, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
		next, err := unix.Openat(dir, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(next) }()
		dir = next
	}
	return f(dir, filepath.Base(at))
}

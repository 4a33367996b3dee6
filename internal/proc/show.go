package proc

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Show puts a file at one of the Root.Places, or a folder at one of the Root.Folders, of a process that is root in no namespace, as Root.Files does: the
// process can open a file as its owner can.
// user is the one of the process. What was shown there before is hidden.
// Errors: NotFound if the process has ended, Unsupported if the file system cannot do that.
func (p *Process) Show(f RootFile, user User) error {
	root := &placed{user: user}
	spaces := spaces{}
	defer spaces.close()
	t, err := root.file(f, spaces)
	if err != nil {
		return fmt.Errorf("show %s to process %d: %w", f.File.Name(), p.pid, err)
	}
	if t.fd < 0 {
		return errdefs.Invalidf("show %s to process %d: it is no file", f.File.Name(), p.pid)
	}
	defer func() { _ = unix.Close(t.fd) }()
	err = p.inMounts(func() error { return unix.MoveMount(t.fd, "", unix.AT_FDCWD, t.at, unix.MOVE_MOUNT_F_EMPTY_PATH) })
	if err != nil {
		return fmt.Errorf("show %s to process %d: %w", f.File.Name(), p.pid, err)
	}
	return nil
}

// Hide takes away all that Show put at a place. It is no error if there is nothing. A file that the process has opened stays open.
func (p *Process) Hide(at string) error {
	err := p.inMounts(func() error { return unmountAll(at) })
	if err != nil {
		return fmt.Errorf("hide %s from process %d: %w", at, p.pid, err)
	}
	return nil
}

// maxMounts is more than there are at one path: one that is shown, and those that interrupted calls have left.
const maxMounts = 64

// unmountAll takes away all mounts at a path.
// Errors: Unavailable after maxMounts.
func unmountAll(at string) error {
	for range maxMounts + 1 {
		if err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); errors.Is(err, unix.EINVAL) { // nothing is mounted there
			return nil
		} else if err != nil {
			return err
		}
	}
	return errdefs.Unavailablef("the process mounts something there again and again; stop its VM with --now")
}

// inMounts runs f on a thread that sees the files that the process sees.
func (p *Process) inMounts(f func() error) error {
	root, err := p.root()
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(root) }()
	return OnThread(func() error {
		// A thread that shares its working directory with other threads cannot leave their mount namespace.
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return err
		}
		var serr error
		err := p.control(func(fd int) { serr = unix.Setns(fd, unix.CLONE_NEWNS) })
		if err = errors.Join(err, serr); errors.Is(err, unix.ESRCH) {
			return errdefs.NotFoundf("the process has ended")
		}
		if err != nil {
			return fmt.Errorf("enter its mount namespace: %w", err)
		}
		if err = unix.Fchdir(root); err == nil {
			err = unix.Chroot(".")
		}
		if err != nil {
			return fmt.Errorf("enter its root: %w", err)
		}
		return f()
	})
}

// root opens the root of the process. The caller closes it.
// Errors: NotFound if the process has ended.
func (p *Process) root() (int, error) {
	fd, err := unix.Open("/proc/"+strconv.Itoa(p.pid)+"/root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if gone := p.Signal(0); gone != nil { // its number may be that of another one now
		if err == nil {
			_ = unix.Close(fd)
		}
		return -1, gone
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		return -1, errdefs.NotFoundf("process %d has ended: %w", p.pid, err)
	}
	if err != nil {
		return -1, fmt.Errorf("open its root: %w", err)
	}
	return fd, nil
}

// Folder opens the folder at an absolute path as the process finds it. Nobody else need be able to reach it. No symbolic link is followed.
// Errors: NotFound if the process has ended or has no such folder.
func (p *Process) Folder(at string) (*os.File, error) {
	root, err := p.root()
	if err == nil {
		defer func() { _ = unix.Close(root) }()
		var fd int
		fd, err = unix.Openat2(root, at, &unix.OpenHow{
			Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
		})
		if err == nil {
			return os.NewFile(uintptr(fd), at), nil
		}
	}
	err = fmt.Errorf("open the folder %s of process %d: %w", at, p.pid, err)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) {
		err = errdefs.As(errdefs.NotFound, err)
	}
	return nil, err
}

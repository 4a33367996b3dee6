package proc

import (
	"errors"
	"fmt"

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
	err := p.inMounts(func() error {
		for {
			if err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); errors.Is(err, unix.EINVAL) { // nothing is mounted there
				return nil
			} else if err != nil {
				return err
			}
		}
	})
	if err != nil {
		return fmt.Errorf("hide %s from process %d: %w", at, p.pid, err)
	}
	return nil
}

// inMounts runs f on a thread that sees the files that the process sees.
func (p *Process) inMounts(f func() error) error {
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
		return f()
	})
}

package jail

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// This file has what a hypervisor needs that makes its sockets itself: a folder in the runtime folder that its user owns, and nobody else can use. Whatever is in
// it may have been made by a guest that has taken over its hypervisor. So nothing here follows a symbolic link there.

// Private makes the folder name empty, for the user uid alone, and opens it. The caller closes it.
func (d Dir) Private(name string, uid uint32) (*os.File, error) {
	path := d.short(name)
	err := os.RemoveAll(path)
	if err == nil {
		err = os.Mkdir(path, 0o700)
	}
	if err == nil {
		err = unix.Fchownat(d.fd(), name, int(uid), int(uid), unix.AT_SYMLINK_NOFOLLOW)
	}
	if err != nil {
		return nil, fmt.Errorf("make the folder %s: %w", filepath.Join(d.f.Name(), name), err)
	}
	return openPrivate(d.fd(), name)
}

func openPrivate(at int, name string) (*os.File, error) {
	fd, err := unix.Openat(at, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the folder %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// RemovePrivate removes the folder that Private made in the runtime folder dir, with all that is in it. Idempotent.
func RemovePrivate(dir, name string) error {
	if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
		return fmt.Errorf("remove the folder of a VM: %w", err)
	}
	return nil
}

// DialPrivate connects to the socket name in the folder dir, which Private made for uid. The process that listens must be of that user.
// Errors: Unavailable.
func DialPrivate(ctx context.Context, dir, name string, uid uint32) (net.Conn, error) {
	conn, err := dialPrivate(ctx, dir, name, uid)
	if err != nil {
		return nil, errdefs.Unavailablef("connect to %s: %w", filepath.Join(dir, name), err)
	}
	return conn, nil
}

func dialPrivate(ctx context.Context, dir, name string, uid uint32) (net.Conn, error) {
	folder, err := openPrivate(unix.AT_FDCWD, dir)
	if err != nil {
		return nil, err
	}
	defer folder.Close()
	fd, err := unix.Openat(int(folder.Fd()), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return nil, errors.New("it is no socket")
	}
	conn, err := dialPath(ctx, "/proc/self/fd/"+strconv.Itoa(fd))
	if err != nil {
		return nil, err
	}
	if err := listensAs(conn, uid); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// listensAs checks the user of the process that listens at the other end of conn.
func listensAs(conn net.Conn, uid uint32) error {
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	var cerr error
	err = raw.Control(func(fd uintptr) { cred, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, cerr); err != nil {
		return err
	}
	if cred.Uid != uid {
		return fmt.Errorf("a process of user %d listens there, not of %d", cred.Uid, uid)
	}
	return nil
}

package jail

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
)

// This file has what a hypervisor needs that makes its sockets itself: a folder of its user in the root of its process, small and in memory, which no path of
// the node leads to and which ends with the process. Whatever is in it may have been made by a guest that has taken over its hypervisor. So nothing here
// follows a symbolic link there.

// The limits of a private folder: a few sockets and links.
const privateSize, privateFiles = 64 << 10, 32

// NewPrivate returns a private folder for the process of the user uid, which finds it where a proc.RootFile says. The caller closes it.
func NewPrivate(uid uint32) (*os.File, error) {
	return proc.NewScratch(proc.User{UID: uid, GID: uid}, privateSize, privateFiles)
}

// DialPrivate connects to the socket name in the private folder that p has at the path at. The process that listens must be of the user uid.
// Errors: Unavailable.
func DialPrivate(ctx context.Context, p *proc.Process, at, name string, uid uint32) (net.Conn, error) {
	conn, err := dialPrivate(ctx, p, at, name, uid)
	if err != nil {
		return nil, errdefs.Unavailablef("connect to %s: %w", name, err)
	}
	return conn, nil
}

func dialPrivate(ctx context.Context, p *proc.Process, at, name string, uid uint32) (net.Conn, error) {
	folder, err := p.Folder(at)
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

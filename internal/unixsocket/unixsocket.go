// Package unixsocket listens on unix sockets that only root, and one group at most, may connect to.
//
// It knows no protocol.
package unixsocket

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Listen serves at path, which may exceed the length of a socket address; its folder must exist. The socket is never open to more
// than root and group, not even for a moment. A group that does not exist on this host, or "", leaves it to root. A socket that
// nobody serves any more is replaced.
// Errors: AlreadyExists if another process serves path, FailedPrecondition.
func Listen(ctx context.Context, path, group string) (net.Listener, error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "open the folder of socket %s: %w", path, err)
	}
	defer dir.Close()
	short := path
	if len(path) >= len(syscall.RawSockaddrUnix{}.Path) {
		short = "/proc/self/fd/" + strconv.FormatUint(uint64(dir.Fd()), 10) + "/" + filepath.Base(path)
	}
	if err := removeStale(path, short); err != nil {
		return nil, err
	}
	// The file that bind creates gets the mode of the socket: restrict it before the file exists.
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		called := raw.Control(func(fd uintptr) { err = syscall.Fchmod(int(fd), 0o600) })
		return errors.Join(called, err)
	}}
	l, err := lc.Listen(ctx, "unix", short)
	if err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "listen on %s: %w", path, err)
	}
	ul := l.(*net.UnixListener)
	ul.SetUnlinkOnClose(false) // its name may be the short one, which is valid only in this function
	if err := admit(path, group); err != nil {
		ul.Close()
		os.Remove(path)
		return nil, err
	}
	return &listener{UnixListener: ul, path: path}, nil
}

func removeStale(path, short string) error {
	fi, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return errdefs.New(errdefs.FailedPrecondition, "look at socket %s: %w", path, err)
	case fi.Mode().Type() != fs.ModeSocket:
		return errdefs.Preconditionf("%s is at the path of a socket and is not a socket; remove it", path)
	}
	if conn, err := net.DialTimeout("unix", short, time.Second); err == nil {
		conn.Close()
		return errdefs.Existsf("another process serves %s; stop it or choose another path", path)
	}
	if err := os.Remove(path); err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "remove stale socket %s: %w", path, err)
	}
	return nil
}

// admit opens the socket to the group, if it exists on this host.
func admit(path, group string) error {
	if group == "" {
		return nil
	}
	g, err := user.LookupGroup(group)
	if err != nil {
		return nil //nolint:nilerr // no such group on this host: root alone may connect, as documented
	}
	gid, err := strconv.Atoi(g.Gid)
	if err != nil {
		return fmt.Errorf("group %s: %w", group, err)
	}
	if err := errors.Join(os.Chown(path, -1, gid), os.Chmod(path, 0o660)); err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "give socket %s to group %s: %w", path, group, err)
	}
	return nil
}

type listener struct {
	*net.UnixListener
	path string
	once sync.Once
}

func (l *listener) Close() error {
	err := l.UnixListener.Close()
	l.once.Do(func() { os.Remove(l.path) })
	return err
}

// Limit makes l accept at most n connections at a time; more wait in the kernel's queue.
func Limit(l net.Listener, n int) net.Listener {
	return &limited{Listener: l, slots: make(chan struct{}, n), done: make(chan struct{})}
}

type limited struct {
	net.Listener
	slots chan struct{}
	done  chan struct{}
	once  sync.Once
}

func (l *limited) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	case <-l.done:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	return &limitedConn{Conn: c, release: sync.OnceFunc(func() { <-l.slots })}, nil
}

func (l *limited) Close() error {
	l.once.Do(func() { close(l.done) })
	return l.Listener.Close()
}

type limitedConn struct {
	net.Conn
	release func()
}

func (c *limitedConn) Close() error {
	defer c.release()
	return c.Conn.Close()
}

// Peer returns which process has connected to a socket of Listen.
func Peer(c net.Conn) (*unix.Ucred, error) {
	if l, ok := c.(*limitedConn); ok {
		c = l.Conn
	}
	uc, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errdefs.New(errdefs.Internal, "a connection of a unix socket is a %T", c)
	}
	raw, err := uc.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return nil, err
	}
	return cred, credErr
}

package nodeapi

import (
	"context"
	"crypto/tls"
	"crypto/x509"
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

	"google.golang.org/grpc/credentials"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// TLS names the PEM files for the TCP listener. Whoever holds a certificate of ClientCA has full power over the node.
type TLS struct {
	Cert     string `json:"cert,omitempty"`
	Key      string `json:"key,omitempty"`
	ClientCA string `json:"clientCA,omitempty"`
}

func (t TLS) credentials() (credentials.TransportCredentials, error) {
	if t.Cert == "" || t.Key == "" || t.ClientCA == "" {
		return nil, errdefs.Invalidf("serving the node API on TCP needs a certificate, its key and the CA of the clients (tls.cert, tls.key, tls.clientCA)")
	}
	pair, err := tls.LoadX509KeyPair(t.Cert, t.Key)
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "load the certificate of the node API: %w", err)
	}
	pem, err := os.ReadFile(t.ClientCA)
	if err != nil {
		return nil, errdefs.New(errdefs.InvalidArgument, "load the client CA of the node API: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, errdefs.Invalidf("%s holds no PEM certificate", t.ClientCA)
	}
	return credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair},
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
	}), nil
}

// listenUnix serves at path, which may exceed the length of a socket address. The socket is never open to more than
// root and group, not even for a moment. A socket that nobody serves any more is replaced; a served one is an error.
func listenUnix(ctx context.Context, path, group string) (net.Listener, error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "open the folder of the node API's socket: %w", err)
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
		return errors.Join(raw.Control(func(fd uintptr) { err = syscall.Fchmod(int(fd), 0o600) }), err)
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
	return &unixListener{UnixListener: ul, path: path}, nil
}

func removeStale(path, short string) error {
	fi, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return errdefs.New(errdefs.FailedPrecondition, "look at the node API's socket: %w", err)
	case fi.Mode().Type() != fs.ModeSocket:
		return errdefs.Preconditionf("%s is at the path of the node API's socket and is not a socket; remove it", path)
	}
	if conn, err := net.DialTimeout("unix", short, time.Second); err == nil {
		conn.Close()
		return errdefs.Existsf("another cocoond serves %s; stop it or choose another --run-dir", path)
	}
	if err := os.Remove(path); err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "remove a stale socket: %w", err)
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
		return errdefs.New(errdefs.FailedPrecondition, "give the node API's socket to group %s: %w", group, err)
	}
	return nil
}

type unixListener struct {
	*net.UnixListener
	path string
	once sync.Once
}

func (l *unixListener) Close() error {
	err := l.UnixListener.Close()
	l.once.Do(func() { os.Remove(l.path) })
	return err
}

// limit makes l accept at most n connections at a time; more wait in the kernel's queue.
func limit(l net.Listener, n int) net.Listener {
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

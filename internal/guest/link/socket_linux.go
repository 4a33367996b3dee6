package link

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// OpenVSOCK listens on a port of the machine's virtio socket. NotFound when the machine has none.
func OpenVSOCK(port uint32) (Device, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return nil, errdefs.NotFoundf("the machine has no virtio socket")
	}
	if err != nil {
		return nil, fmt.Errorf("open guest channel: %w", err)
	}
	f := os.NewFile(uintptr(fd), "vsock")
	err = unix.Bind(fd, &unix.SockaddrVM{CID: unix.VMADDR_CID_ANY, Port: port})
	if err == nil {
		err = unix.Listen(fd, 8)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("open guest channel: %w", err)
	}
	return NewSocket(f)
}

// NewSocket returns the guest's end of a pipe whose hosts connect to the listening, non-blocking socket listener, which it owns from now on. There is one host at a
// time: the next one takes the place of the previous one. A guest that resumes elsewhere does not hear that its host has gone.
func NewSocket(listener *os.File) (Device, error) {
	raw, err := listener.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("open guest channel: %w", err)
	}
	s := &socket{listener: listener, raw: raw, attached: make(chan struct{})}
	go s.acceptAll()
	return s, nil
}

type socket struct {
	listener *os.File
	raw      syscall.RawConn

	mu          sync.Mutex
	host        *os.File      // nil: none is attached
	attached    chan struct{} // closed and replaced when host changes, or a deadline, or the device closes
	closed      bool
	failed      error     // no host can come any more
	read, write time.Time // deadlines
}

// moment is what holds at one moment.
type moment struct {
	host        *os.File
	changed     <-chan struct{}
	read, write time.Time
	over        error // no host comes any more
}

func (s *socket) now() moment {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := moment{s.host, s.attached, s.read, s.write, s.failed}
	if s.closed {
		m.over = net.ErrClosed
	}
	return m
}

// change tells those who wait. Preconditions: s.mu is held.
func (s *socket) change() {
	close(s.attached)
	s.attached = make(chan struct{})
}

func (s *socket) Read(p []byte, attached bool) (int, error) {
	for {
		m := s.now()
		switch {
		case errors.Is(m.over, net.ErrClosed), m.over != nil && m.host == nil:
			return 0, m.over
		case m.host == nil && attached:
			return 0, io.EOF
		case m.host == nil:
			if err := until(m.changed, m.read); err != nil {
				return 0, err
			}
			continue
		}
		n, err := m.host.Read(p)
		switch {
		case n > 0:
			return n, nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return 0, err
		}
		s.leave(m.host) // whatever the reason, this host is gone
		if attached {
			return 0, io.EOF
		}
	}
}

// acceptAll gives each host its turn.
func (s *socket) acceptAll() {
	for {
		f, err := s.accept()
		s.mu.Lock()
		switch {
		case err != nil:
			s.failed = err
		case s.closed:
			err = net.ErrClosed
			_ = f.Close()
		case f != nil:
			if s.host != nil {
				_ = s.host.Close()
			}
			_ = errors.Join(f.SetReadDeadline(s.read), f.SetWriteDeadline(s.write))
			s.host = f
		}
		s.change()
		s.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// accept waits for a host; nil: it has gone again, or is a program of the guest.
func (s *socket) accept() (*os.File, error) {
	fd, err := -1, error(nil)
	var from unix.Sockaddr
	werr := s.raw.Read(func(l uintptr) bool {
		fd, err = retry(func() (fd int, err error) {
			fd, from, err = unix.Accept4(int(l), unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
			return fd, err
		})
		return !errors.Is(err, unix.EAGAIN)
	})
	switch {
	case errors.Is(werr, os.ErrClosed):
		return nil, net.ErrClosed
	case werr != nil:
		return nil, werr
	case errors.Is(err, unix.ECONNABORTED):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("accept on guest channel: %w", err)
	}
	f := os.NewFile(uintptr(fd), "host")
	if !isHost(from) {
		return nil, f.Close()
	}
	return f, nil
}

// isHost reports whether from is the host of this machine. Programs of the machine itself, and guests in it, can connect to the port, too.
func isHost(from unix.Sockaddr) bool {
	v, ok := from.(*unix.SockaddrVM)
	return !ok || v.CID == unix.VMADDR_CID_HOST // a socket of another family is one of the tests
}

func (s *socket) leave(host *os.File) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = host.Close()
	if s.host == host {
		s.host = nil
		s.change()
	}
}

// Write writes to the present host. What it has not read when it leaves is lost.
func (s *socket) Write(p []byte) (int, error) {
	for {
		m := s.now()
		switch {
		case errors.Is(m.over, net.ErrClosed), m.over != nil && m.host == nil:
			return 0, m.over
		case m.host == nil:
			if err := until(m.changed, m.write); err != nil {
				return 0, err
			}
			continue
		}
		n, err := m.host.Write(p)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		return len(p), nil
	}
}

// until waits for a change, at most until the deadline.
func until(changed <-chan struct{}, deadline time.Time) error {
	if deadline.IsZero() {
		<-changed
		return nil
	}
	t := time.NewTimer(time.Until(deadline))
	defer t.Stop()
	select {
	case <-changed:
		return nil
	case <-t.C:
		return os.ErrDeadlineExceeded
	}
}

func (s *socket) SetReadDeadline(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.read = t
	s.change()
	if s.host != nil {
		return s.host.SetReadDeadline(t)
	}
	return nil
}

func (s *socket) SetWriteDeadline(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write = t
	s.change()
	if s.host != nil {
		return s.host.SetWriteDeadline(t)
	}
	return nil
}

func (s *socket) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	s.change()
	err := s.listener.Close()
	if s.host != nil {
		err = errors.Join(err, s.host.Close())
	}
	return err
}

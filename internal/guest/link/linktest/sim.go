// Package linktest imitates what QEMU does between a guest's virtio-serial port and a host's socket.
//
// One host at a time, hosts that vanish without the guest noticing, bytes delivered in chunks that stay readable after
// their host has gone. It is for tests and moves no data between machines.
package linktest

import (
	"context"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Sim is one pipe: a link.Device for the guest, and Dial for hosts.
type Sim struct {
	mu            sync.Mutex
	cond          *sync.Cond
	host          net.Conn // QEMU's end of the present host's socket
	chunks        [][]byte
	closed        bool
	read, write   time.Time
	rTimer, wTime *time.Timer
	pumps         sync.WaitGroup
}

// maxChunks limits what waits for a guest that does not read: the size of a virtqueue.
const maxChunks = 64

// New returns a pipe without a host.
func New() *Sim {
	s := &Sim{}
	s.cond = sync.NewCond(&s.mu)
	return s
}

// Dial attaches a host. Like QEMU's socket it takes one at a time: a new one waits until the previous one has closed.
func (s *Sim) Dial(ctx context.Context) (net.Conn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	near, err := fileConn(fds[0])
	if err != nil {
		return nil, err
	}
	far, err := fileConn(fds[1])
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.cond.Broadcast()
	})
	defer stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.host != nil && !s.closed && ctx.Err() == nil {
		s.cond.Wait()
	}
	if s.closed || ctx.Err() != nil {
		near.Close()
		far.Close()
		return nil, net.ErrClosed
	}
	s.host = near
	s.pumps.Add(1)
	go s.pump(near)
	s.cond.Broadcast()
	return far, nil
}

func fileConn(fd int) (net.Conn, error) {
	f := os.NewFile(uintptr(fd), "sim")
	defer f.Close()
	return net.FileConn(f)
}

// pump carries the host's bytes to the guest until the host disconnects.
func (s *Sim) pump(host net.Conn) {
	defer s.pumps.Done()
	buf := make([]byte, 4096)
	for {
		n, err := host.Read(buf)
		s.mu.Lock()
		if n > 0 {
			for len(s.chunks) >= maxChunks && !s.closed {
				s.cond.Wait()
			}
			s.chunks = append(s.chunks, append([]byte(nil), buf[:n]...))
		}
		if err != nil && s.host == host {
			s.host = nil
			host.Close()
		}
		s.cond.Broadcast()
		s.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// Read implements link.Device.
func (s *Sim) Read(p []byte, attached bool) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		switch {
		case s.closed:
			return 0, net.ErrClosed
		case expired(s.read):
			return 0, os.ErrDeadlineExceeded
		case len(s.chunks) > 0:
			n := copy(p, s.chunks[0])
			if s.chunks[0] = s.chunks[0][n:]; len(s.chunks[0]) == 0 {
				s.chunks = s.chunks[1:]
			}
			s.cond.Broadcast()
			return n, nil
		case s.host == nil && attached:
			return 0, io.EOF
		}
		s.cond.Wait()
	}
}

// Write implements link.Device. As with QEMU, bytes to a host that has just disconnected are lost.
func (s *Sim) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		s.mu.Lock()
		for s.host == nil && !s.closed && !expired(s.write) {
			s.cond.Wait()
		}
		host, closed, late := s.host, s.closed, expired(s.write)
		s.mu.Unlock()
		if closed {
			return done, net.ErrClosed
		}
		if late {
			return done, os.ErrDeadlineExceeded
		}
		_ = host.SetWriteDeadline(time.Now().Add(5 * time.Millisecond)) // then our own deadline is checked again
		n, err := host.Write(p[done:])
		done += n
		if err != nil && !os.IsTimeout(err) {
			done = len(p)
		}
	}
	return done, nil
}

func expired(t time.Time) bool { return !t.IsZero() && !time.Now().Before(t) }

// SetReadDeadline implements link.Device.
func (s *Sim) SetReadDeadline(t time.Time) error { return s.deadline(t, &s.read, &s.rTimer) }

// SetWriteDeadline implements link.Device.
func (s *Sim) SetWriteDeadline(t time.Time) error { return s.deadline(t, &s.write, &s.wTime) }

func (s *Sim) deadline(t time.Time, at *time.Time, timer **time.Timer) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	*at = t
	if *timer != nil {
		(*timer).Stop()
	}
	if !t.IsZero() {
		*timer = time.AfterFunc(time.Until(t), func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.cond.Broadcast()
		})
	}
	s.cond.Broadcast()
	return nil
}

// Close ends the pipe, as the exit of QEMU does, and waits for its goroutines.
func (s *Sim) Close() error {
	s.mu.Lock()
	s.closed = true
	if s.host != nil {
		s.host.Close()
	}
	for _, t := range []*time.Timer{s.rTimer, s.wTime} {
		if t != nil {
			t.Stop()
		}
	}
	s.cond.Broadcast()
	s.mu.Unlock()
	s.pumps.Wait()
	return nil
}

package podprovider

import (
	"context"
	"io"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	consoleOpen    = 10 * time.Second // timeout for opening a console
	consoleBacklog = 256              // pieces of output that may wait for one session
	consolePiece   = 32 << 10         // bytes of one piece, at most
)

// consoles shares the serial console of each VM among its sessions, because a hypervisor has room for one reader. Each session
// sees all output from its start on, and the guest gets the input of all sessions. The zero value is ready for use.
type consoles struct {
	mu   sync.Mutex
	open map[vm.ID]*console // those that have sessions
}

type console struct {
	ready    chan struct{} // closed when con or err is set
	con      io.ReadWriteCloser
	err      error
	sessions map[chan []byte]bool // the value is true once the channel is closed; guarded by consoles.mu
	ended    bool                 // guarded by consoles.mu
}

// attach connects s to the console that open opens, until ctx or the console ends. Input that ends leaves the session open.
// Errors: those of open. Unavailable for a session that reads too slowly.
func (c *consoles) attach(ctx context.Context, id vm.ID, open func(context.Context) (io.ReadWriteCloser, error), s guest.Streams) error {
	out := make(chan []byte, consoleBacklog)
	shared, first := c.join(id, out)
	defer c.leave(id, shared, out)
	if first {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), consoleOpen) // other sessions may wait for it
		shared.con, shared.err = open(limited)
		cancel()
		close(shared.ready)
		if shared.err == nil {
			go c.pump(id, shared) // ends when the console is closed, at the latest by the last session
		}
	}
	select {
	case <-shared.ready:
	case <-ctx.Done():
		return ctx.Err()
	}
	if shared.err != nil {
		return shared.err
	}
	if s.Stdin != nil {
		go func() { _, _ = io.Copy(writerOnly{shared.con}, s.Stdin) }() // ends when the caller closes the stream
	}
	for {
		select {
		case piece, more := <-out:
			if !more {
				return c.why(shared)
			}
			if s.Stdout == nil {
				continue
			}
			if _, err := s.Stdout.Write(piece); err != nil {
				return errdefs.Unavailablef("write the output of the console: %w", err)
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// join adds a session. first reports whether the caller must open the console.
func (c *consoles) join(id vm.ID, out chan []byte) (shared *console, first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	shared = c.open[id]
	if shared == nil {
		first = true
		shared = &console{ready: make(chan struct{}), sessions: map[chan []byte]bool{}}
		if c.open == nil {
			c.open = map[vm.ID]*console{}
		}
		c.open[id] = shared
	}
	shared.sessions[out] = false
	return shared, first
}

// leave removes a session. The last one closes the console.
func (c *consoles) leave(id vm.ID, shared *console, out chan []byte) {
	c.mu.Lock()
	delete(shared.sessions, out)
	last := len(shared.sessions) == 0
	if last && c.open[id] == shared {
		delete(c.open, id)
	}
	c.mu.Unlock()
	if !last {
		return
	}
	<-shared.ready // an open that others waited for has a timeout
	if shared.con != nil {
		_ = shared.con.Close()
	}
}

// pump gives the output to all sessions until the console ends. A session that does not keep up is ended, so that it delays no
// other session.
func (c *consoles) pump(id vm.ID, shared *console) {
	for buf := make([]byte, consolePiece); ; {
		n, err := shared.con.Read(buf)
		piece := append([]byte(nil), buf[:n]...)
		c.mu.Lock()
		for out, over := range shared.sessions {
			switch {
			case over:
			case err != nil:
				if n > 0 && len(out) < cap(out) {
					out <- piece
				}
				shared.end(out)
			case len(out) == cap(out):
				shared.end(out)
			default:
				out <- piece
			}
		}
		if err != nil && c.open[id] == shared {
			delete(c.open, id) // the next session opens it again
		}
		shared.ended = err != nil
		c.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (s *console) end(out chan []byte) {
	s.sessions[out] = true
	close(out)
}

// why returns the error of a session whose output has ended: nil if the console has ended.
func (c *consoles) why(shared *console) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if shared.ended {
		return nil
	}
	return errdefs.Unavailablef("this session read the output of the console too slowly and was ended; connect again")
}

// writerOnly hides the other methods, so that io.Copy only writes.
type writerOnly struct{ io.Writer }

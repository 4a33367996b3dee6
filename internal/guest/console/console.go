// Package console shares the serial consoles of guests among the clients that attach to them.
//
// It opens no console itself and knows no client.
package console

import (
	"bytes"
	"context"
	"io"
	"slices"
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

	screenLines = 24       // of earlier output that a session sees first
	screenBytes = 16 << 10 // the same in bytes, at most
)

// What a session sees when another one begins to write, and when it may write again.
const (
	nowReads  = "\r\n[another session writes to this console now; this one only shows its output, until that one ends or you connect again]\r\n"
	nowWrites = "\r\n[this session writes to the console again]\r\n"
)

// Consoles shares the serial console of each VM among its sessions, because a hypervisor has room for one reader. Each session
// sees the last screen of output and then all output from its start on. One session writes at a time: the newest one that has input. The zero value
// is ready for use.
type Consoles struct {
	mu   sync.Mutex
	open map[vm.ID]*console // those that have sessions
}

type console struct {
	ready    chan struct{} // closed when con or err is set
	con      io.ReadWriteCloser
	err      error
	sessions map[chan []byte]bool // the value is true once the channel is closed; guarded by Consoles.mu
	writers  []chan []byte        // the sessions that have input, the newest last; guarded by Consoles.mu
	ended    bool                 // guarded by Consoles.mu
}

// Source opens the serial console of a VM.
type Source struct {
	Open   func(context.Context) (io.ReadWriteCloser, error)
	Screen func(context.Context) []byte // the last output, as far as it is known
}

// Attach connects s to the console of t, until ctx or the console ends. Input that ends leaves the session open.
// Errors: those of t.Open. Unavailable for a session that reads too slowly.
func (c *Consoles) Attach(ctx context.Context, id vm.ID, t Source, s guest.Streams) error {
	out := make(chan []byte, consoleBacklog)
	shared, first := c.join(id, out)
	defer c.leave(id, shared, out)
	if first {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), consoleOpen) // other sessions may wait for it
		shared.con, shared.err = t.Open(limited)
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
		c.takeOver(shared, out)
		go func() { // ends when the caller closes the stream
			_, _ = io.Copy(typist{c, shared, out}, s.Stdin)
			c.handBack(shared, out)
		}()
	}
	show := func(piece []byte) error {
		if s.Stdout == nil || len(piece) == 0 {
			return nil
		}
		if _, err := s.Stdout.Write(piece); err != nil {
			return errdefs.Unavailablef("write the output of the console: %w", err)
		}
		return nil
	}
	last := t.Screen(ctx)
	if err := show(append(last, unseen(last, queued(out))...)); err != nil {
		return err
	}
	for {
		select {
		case piece, more := <-out:
			if !more {
				return c.why(shared)
			}
			if err := show(piece); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// queued takes the output that waits for a session.
func queued(out <-chan []byte) (all []byte) {
	for range len(out) {
		piece, more := <-out
		if !more {
			break
		}
		all = append(all, piece...)
	}
	return all
}

// unseen returns what of the output since the begin of a session is not at the end of the last screen, which was read after that begin.
func unseen(screen, since []byte) []byte {
	for k := min(len(screen), len(since)); k > 0; k-- {
		if bytes.HasSuffix(screen, since[:k]) {
			return since[k:]
		}
	}
	return since
}

// ScreenOf returns the last screen of a VM's serial log.
func ScreenOf(ctx context.Context, guests guest.Access, id vm.ID) []byte {
	var all []byte
	_ = guests.Logs(ctx, string(id), guest.LogOptions{Serial: true, Tail: screenLines}, func(e guest.LogEntry) error {
		all = append(all, e.Data...)
		return nil
	})
	return all[max(0, len(all)-screenBytes):]
}

// join adds a session. first reports whether the caller must open the console.
func (c *Consoles) join(id vm.ID, out chan []byte) (shared *console, first bool) {
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

// takeOver makes a session the one that writes, and tells the one that did.
func (c *Consoles) takeOver(shared *console, out chan []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	shared.tell(shared.writer(), nowReads)
	shared.writers = append(shared.writers, out)
}

// handBack notes that a session has no more input. The session that now writes is told.
func (c *Consoles) handBack(shared *console, out chan []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	wrote := shared.writer() == out
	shared.writers = slices.DeleteFunc(shared.writers, func(w chan []byte) bool { return w == out })
	if wrote {
		shared.tell(shared.writer(), nowWrites)
	}
}

// writer returns the session that writes; nil: none. Precondition: Consoles.mu is held.
func (s *console) writer() chan []byte {
	if len(s.writers) == 0 {
		return nil
	}
	return s.writers[len(s.writers)-1]
}

// tell shows a session something that the guest has not written. It is dropped if the session is slow or over. Precondition: Consoles.mu is held.
func (s *console) tell(out chan []byte, text string) {
	if over, there := s.sessions[out]; there && !over && len(out) < cap(out) {
		out <- []byte(text)
	}
}

// typist writes the input of a session. Input of a session that does not write is dropped.
type typist struct {
	of      *Consoles
	shared  *console
	session chan []byte
}

func (t typist) Write(p []byte) (int, error) {
	t.of.mu.Lock()
	writes := t.shared.writer() == t.session
	t.of.mu.Unlock()
	if !writes {
		return len(p), nil
	}
	return t.shared.con.Write(p)
}

// leave removes a session. The last one closes the console.
func (c *Consoles) leave(id vm.ID, shared *console, out chan []byte) {
	c.handBack(shared, out)
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
func (c *Consoles) pump(id vm.ID, shared *console) {
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
func (c *Consoles) why(shared *console) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if shared.ended {
		return nil
	}
	return errdefs.Unavailablef("this session read the output of the console too slowly and was ended; connect again")
}

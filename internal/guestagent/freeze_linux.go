package guestagent

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	guestv1 "cocoonstack.io/cocoon/api/guest/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// freezeMost is how long file systems stay frozen when nobody thaws them: a dead host must not stop a guest.
const freezeMost = time.Minute

// freezer is the state of a freeze.
type freezer struct {
	frozen atomic.Bool // true from before the first file system is frozen until after the last is thawed

	mu    sync.Mutex // held during a freeze or thaw
	count int
	limit *time.Timer // nil: not frozen
	fresh uint64      // identifies a freeze
}

// Freeze implements guestv1.GuestServer. A second call only restarts the timeout.
func (s *Server) Freeze(ctx context.Context, _ *guestv1.FreezeRequest) (*guestv1.FreezeReply, error) {
	s.setup.Lock() // so that no change of identity is half done
	defer s.setup.Unlock()
	f := &s.freezer
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.limit == nil {
		f.frozen.Store(true)
		n, err := s.machine.Freeze()
		if err == nil && ctx.Err() != nil {
			err = context.Cause(ctx) // nobody would thaw it
			_, _ = s.machine.Thaw()
		}
		if err != nil {
			f.frozen.Store(false)
			return nil, fmt.Errorf("freeze the file systems: %w", err)
		}
		f.count = n
	} else {
		f.limit.Stop()
	}
	f.fresh++
	fresh := f.fresh
	f.limit = time.AfterFunc(freezeMost, func() { _, _ = s.thawOnly(fresh) })
	return &guestv1.FreezeReply{Count: int32(f.count)}, nil
}

// Thaw implements guestv1.GuestServer.
func (s *Server) Thaw(context.Context, *guestv1.ThawRequest) (*guestv1.ThawReply, error) {
	n, err := s.thaw()
	if err != nil {
		return nil, fmt.Errorf("thaw the file systems: %w", err)
	}
	return &guestv1.ThawReply{Count: int32(n)}, nil
}

// thaw ends a freeze, if there is one, and returns how many file systems were frozen.
func (s *Server) thaw() (int, error) { return s.thawOnly(0) }

// thawOnly is thaw for a single freeze; 0 means any.
func (s *Server) thawOnly(fresh uint64) (int, error) {
	f := &s.freezer
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.limit == nil || fresh != 0 && fresh != f.fresh {
		return 0, nil
	}
	n, err := s.machine.Thaw()
	if err != nil {
		return 0, err // the timer still runs, and the caller may try again
	}
	f.limit.Stop()
	f.limit = nil
	f.frozen.Store(false)
	return n, nil
}

// mayWrite rejects calls that would block on a frozen file system.
func (s *Server) mayWrite() error {
	if s.freezer.frozen.Load() {
		return errdefs.Preconditionf("the guest's file systems are frozen while its disks are saved; try again in a moment")
	}
	return nil
}

// thawing is a listener whose sessions end a freeze when they end. A host cannot thaw the guest if it froze it and went
// away, or if it is gone because the guest was saved and resumed elsewhere.
type thawing struct {
	net.Listener
	thaw func() (int, error)
}

func (l thawing) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &thawingConn{Conn: c, thaw: l.thaw}, nil
}

type thawingConn struct {
	net.Conn
	once sync.Once
	thaw func() (int, error)
}

func (c *thawingConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() { _, _ = c.thaw() })
	return err
}

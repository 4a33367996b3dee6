package jail

import (
	"context"
	"io"
	"net"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
)

// How often the guest is asked whether its agent listens, while it boots.
const agentFirst, agentMost = 20 * time.Millisecond, 250 * time.Millisecond

// Channel is the stream to the agent of a guest whose virtio socket is a unix socket of its hypervisor. There is one stream: a new one closes the
// previous one. The zero Channel has none.
type Channel struct {
	mu   sync.Mutex
	conn net.Conn
}

// Dial waits until connect succeeds, which it calls again after Unavailable, until ctx or the process ends.
// Errors: NotFound if the process has ended, those of connect and ctx.
func (c *Channel) Dial(ctx context.Context, p *proc.Process, connect func(context.Context) (net.Conn, error)) (net.Conn, error) {
	c.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-p.Done():
			cancel()
		case <-stop:
		}
	}()
	pauses := &backoff.ExponentialBackOff{InitialInterval: agentFirst, RandomizationFactor: 0.25, Multiplier: 1.5, MaxInterval: agentMost}
	conn, err := backoff.Retry(ctx, func() (net.Conn, error) {
		conn, err := connect(ctx)
		if err != nil && !errdefs.IsUnavailable(err) {
			err = backoff.Permanent(err)
		}
		return conn, err
	}, backoff.WithBackOff(pauses), backoff.WithMaxElapsedTime(0))
	if err != nil {
		select {
		case <-p.Done():
			err = errdefs.NotFoundf("its process has ended")
		default:
		}
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != nil {
		_ = c.conn.Close()
	}
	c.conn = conn
	return conn, nil
}

// Close closes the stream, if there is one.
func (c *Channel) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// Single lets one caller at a time have something, such as a console. The zero Single is free.
type Single struct {
	mu    sync.Mutex
	taken bool
}

// Take opens what there is one of. It is free again when the result is closed.
// Errors: Conflict if it is taken, those of open.
func (s *Single) Take(open func() (io.ReadWriteCloser, error)) (io.ReadWriteCloser, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken {
		return nil, errdefs.Conflictf("it is already open, and has room for one")
	}
	conn, err := open()
	if err != nil {
		return nil, err
	}
	s.taken = true
	return &single{ReadWriteCloser: conn, free: sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.taken = false
	})}, nil
}

type single struct {
	io.ReadWriteCloser
	free func()
}

// Close implements io.Closer.
func (s *single) Close() error {
	defer s.free()
	return s.ReadWriteCloser.Close()
}

// Package qmp implements the QEMU Machine Protocol over one connection: commands, answers and events.
//
// It knows no command but qmp_capabilities, does not reconnect and does not use out-of-band execution.
package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Client is one connection. Its methods are safe for concurrent use.
type Client struct {
	conn    net.Conn
	version Version
	onEvent func(Event)

	wmu sync.Mutex // held while a command is written, so that commands do not interleave

	mu      sync.Mutex
	next    uint64
	pending map[uint64]chan<- answer
	err     error         // why the connection ended
	done    chan struct{} // closed when it has ended
}

// Open takes ownership of conn, waits for the greeting and negotiates. It calls onEvent for every event, in order, from the
// client's own goroutine: onEvent must not block and must not call Execute. On error conn is closed.
func Open(ctx context.Context, conn net.Conn, onEvent func(Event)) (*Client, error) {
	c := &Client{conn: conn, onEvent: onEvent, pending: map[uint64]chan<- answer{}, done: make(chan struct{})}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	r := bufio.NewReader(conn)
	err := c.greet(r)
	if !stop() { // the deadline may hit at any moment, so the connection is useless
		err = ctx.Err()
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("open QMP: %w", err)
	}
	go c.read(r)
	if err := c.Execute(ctx, "qmp_capabilities", nil, nil); err != nil {
		_ = c.Close()
		return nil, fmt.Errorf("open QMP: %w", err)
	}
	return c, nil
}

func (c *Client) greet(r *bufio.Reader) error {
	f, err := readFrame(r)
	if err != nil {
		return lost(err)
	}
	if f.greeting == nil {
		return errdefs.DataLossf("QEMU sent no greeting")
	}
	c.version = *f.greeting
	return nil
}

// Version returns the version from the greeting.
func (c *Client) Version() Version { return c.version }

// Execute runs a command and decodes its result into result (nil drops it). args is nil or marshals to an object. An *Error
// means that QEMU rejected the command; Unavailable means that the connection is lost. If ctx ends, QEMU may still execute the
// command: it cannot be cancelled.
func (c *Client) Execute(ctx context.Context, command string, args, result any) error {
	return c.ExecuteFile(ctx, command, args, result, nil)
}

// ExecuteFile is Execute for a command that takes a descriptor, as getfd and add-fd do. QEMU gets a duplicate. The
// connection must be a unix socket.
func (c *Client) ExecuteFile(ctx context.Context, command string, args, result any, f *os.File) error {
	ans := make(chan answer, 1)
	id, err := c.register(ans)
	if err != nil {
		return fmt.Errorf("QMP %s: %w", command, err)
	}
	defer c.forget(id)
	if err := c.write(command, args, id, f); err != nil {
		return fmt.Errorf("QMP %s: %w", command, err)
	}
	select {
	case <-ctx.Done():
		return fmt.Errorf("QMP %s: %w", command, ctx.Err())
	case <-c.done:
		select {
		case a := <-ans: // the answer came just before the end
			return a.decode(command, result)
		default:
			return fmt.Errorf("QMP %s: %w", command, c.Err())
		}
	case a := <-ans:
		return a.decode(command, result)
	}
}

func (a answer) decode(command string, result any) error {
	if a.err != nil {
		return fmt.Errorf("QMP %s: %w", command, a.err)
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(a.value, result); err != nil {
		return errdefs.DataLossf("QMP %s: answer %.80q: %w", command, a.value, err)
	}
	return nil
}

func (c *Client) register(ans chan<- answer) (uint64, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, c.err
	}
	c.next++
	c.pending[c.next] = ans
	return c.next, nil
}

func (c *Client) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pending, id)
}

// writeLimit bounds one write. QEMU reads its monitor in the main loop; if that loop does not run for so long, the process is
// stuck.
const writeLimit = 30 * time.Second

func (c *Client) write(command string, args any, id uint64, f *os.File) error {
	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        uint64 `json:"id"`
	}{command, args, id})
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	_ = c.conn.SetWriteDeadline(time.Now().Add(writeLimit))
	if err := c.send(append(line, '\n'), f); err != nil {
		_ = c.conn.Close() // part of a command may already be sent
		return errdefs.As(errdefs.Unavailable, err)
	}
	return nil
}

// send writes a line; the descriptor is sent with its first byte.
func (c *Client) send(line []byte, f *os.File) error {
	if f != nil {
		conn, ok := c.conn.(*net.UnixConn)
		if !ok {
			return errors.New("descriptors go over unix sockets only")
		}
		n, _, err := conn.WriteMsgUnix(line, syscall.UnixRights(int(f.Fd())), nil)
		if err != nil {
			return err
		}
		line = line[n:]
	}
	_, err := c.conn.Write(line)
	return err
}

// read is the client's goroutine. It returns when the connection ends.
func (c *Client) read(r *bufio.Reader) {
	var err error
	for err == nil {
		var f frame
		if f, err = readFrame(r); err == nil {
			c.dispatch(f)
		}
	}
	_ = c.conn.Close()
	c.mu.Lock()
	c.err = lost(err)
	c.mu.Unlock()
	close(c.done)
}

// lost classifies the error that ended a connection: invalid data is DataLoss, everything else is Unavailable.
func lost(err error) error {
	switch {
	case errdefs.Is(err, errdefs.DataLoss):
		return err
	case errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed):
		return errdefs.Unavailablef("the connection is closed")
	}
	return errdefs.As(errdefs.Unavailable, err)
}

func (c *Client) dispatch(f frame) {
	switch {
	case f.event != nil:
		if c.onEvent != nil {
			c.onEvent(*f.event)
		}
	case f.answer != nil && f.answer.hasID:
		c.mu.Lock()
		ans := c.pending[f.answer.id]
		delete(c.pending, f.answer.id)
		c.mu.Unlock()
		if ans != nil { // nil: the caller has given up
			ans <- *f.answer
		}
	}
}

// Done is closed when the connection has ended.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err returns why the connection ended; nil if it has not.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the connection and waits until no more events can be delivered.
func (c *Client) Close() error {
	_ = c.conn.Close()
	<-c.done
	return nil
}

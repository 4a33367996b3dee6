package link

import (
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// Device is the guest's end of the pipe. Read and Write may run concurrently; deadlines interrupt both.
type Device interface {
	// Read waits for bytes. When no host is attached it waits for one, or returns io.EOF if attached is asked for.
	Read(p []byte, attached bool) (int, error)
	// Write writes all of p, and waits while no host is attached.
	Write(p []byte) (int, error)
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
	Close() error
}

// readSize is what one read of the device may return: what QEMU hands over at once.
const readSize = 4096

// Port is the listener of the guest's side: each Accept is one handshake, and there is one session at a time. A new
// host ends the session of the one before.
type Port struct {
	dev  Device
	free chan struct{} // holds a token while no session is open
	done chan struct{} // closed by Close

	mu      sync.Mutex
	closed  bool
	session bool // one is open

	pending []byte // read by the last session but meant for the next handshake; owned by the token's holder
}

// NewPort returns a listener on dev, which it owns from now on.
func NewPort(dev Device) *Port {
	p := &Port{dev: dev, free: make(chan struct{}, 1), done: make(chan struct{})}
	p.free <- struct{}{}
	return p
}

// Accept waits for a host and returns the session with it.
func (p *Port) Accept() (net.Conn, error) {
	select {
	case <-p.free:
	case <-p.done:
		return nil, net.ErrClosed
	}
	rest, err := p.handshake()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		err = net.ErrClosed
	}
	if err != nil {
		p.free <- struct{}{}
		return nil, err
	}
	p.session = true
	return &conn{port: p, rest: rest, buf: make([]byte, readSize)}, nil
}

// handshake returns the bytes of the session that came together with its GO.
func (p *Port) handshake() ([]byte, error) {
	var (
		scan  scanner
		nonce uint64
		asked bool
		buf   = make([]byte, readSize)
		data  = p.pending
	)
	p.pending = nil
	for {
		hello := false
		for len(data) > 0 {
			f, rest, ok := scan.next(data)
			data = rest
			switch {
			case ok && f.kind == kindHello:
				nonce, asked, hello = f.nonce, true, true
			case ok && f.kind == kindGo && asked && f.nonce == nonce:
				_, err := p.dev.Write(frame{kindSession, nonce}.bytes())
				return rest, err
			}
		}
		if hello { // once per read, however often a guest that boots was asked
			if _, err := p.dev.Write(frame{kindReady, nonce}.bytes()); err != nil {
				return nil, err
			}
		}
		n, err := p.dev.Read(buf, false)
		if err != nil {
			return nil, err
		}
		data = buf[:n]
	}
}

// Close ends the listener. A session that is open goes on; the device is closed when both have ended.
func (p *Port) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	close(p.done)
	if p.session {
		return nil
	}
	p.interrupt()
	return p.dev.Close()
}

// Addr implements net.Listener.
func (p *Port) Addr() net.Addr { return addr{} }

func (p *Port) interrupt() {
	past := time.Unix(1, 0)
	_ = p.dev.SetReadDeadline(past)
	_ = p.dev.SetWriteDeadline(past)
}

type addr struct{}

func (addr) Network() string { return "virtio" }
func (addr) String() string  { return PortName }

// conn is one session on the port.
type conn struct {
	port *Port
	rest []byte // only for Read
	buf  []byte // only for Read

	mu     sync.Mutex
	closed bool
	busy   sync.WaitGroup // reads and writes under way
}

// begin registers a read or write; false after Close.
func (c *conn) begin() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.busy.Add(1)
	return true
}

func (c *conn) Read(p []byte) (int, error) {
	if !c.begin() {
		return 0, net.ErrClosed
	}
	defer c.busy.Done()
	if len(c.rest) == 0 {
		n, err := c.port.dev.Read(c.buf, true)
		if err != nil {
			return 0, err
		}
		if onlyHello(c.buf[:n]) {
			c.port.pending = append([]byte(nil), c.buf[:n]...)
			return 0, io.EOF
		}
		c.rest = c.buf[:n]
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

func (c *conn) Write(p []byte) (int, error) {
	if !c.begin() {
		return 0, net.ErrClosed
	}
	defer c.busy.Done()
	return c.port.dev.Write(p)
}

// Close ends the session: it waits for reads and writes under way, which it interrupts, and then lets the port go.
func (c *conn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.mu.Unlock()

	c.port.interrupt()
	c.busy.Wait()

	c.port.mu.Lock()
	defer c.port.mu.Unlock()
	c.port.session = false
	if c.port.closed {
		return c.port.dev.Close()
	}
	err := errors.Join(c.port.dev.SetReadDeadline(time.Time{}), c.port.dev.SetWriteDeadline(time.Time{}))
	c.port.free <- struct{}{}
	return err
}

func (c *conn) LocalAddr() net.Addr  { return addr{} }
func (c *conn) RemoteAddr() net.Addr { return addr{} }

func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *conn) SetReadDeadline(t time.Time) error {
	return c.deadline(t, c.port.dev.SetReadDeadline)
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	return c.deadline(t, c.port.dev.SetWriteDeadline)
}

// deadline sets one unless the session is over: its deadlines must not reach the next one.
func (c *conn) deadline(t time.Time, set func(time.Time) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	return set(t)
}

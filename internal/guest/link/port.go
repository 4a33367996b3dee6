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
	// Read waits for bytes. When no host is attached, it waits for one, or returns io.EOF if attached is true.
	Read(p []byte, attached bool) (int, error)
	// Write writes all of p, and waits while no host is attached.
	Write(p []byte) (int, error)
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
	Close() error
}

// readSize is the size of one read of the device: what QEMU delivers at once.
const readSize = 4096

// Port is the listener on the guest's side. Each Accept is one handshake, and there is one session at a time. A new
// host ends the previous session.
type Port struct {
	dev   Device
	free  chan struct{}               // holds a token while no session is open
	done  chan struct{}               // closed by Close
	plain func(message []byte) []byte // see HandlePlain

	mu      sync.Mutex
	closed  bool
	session bool // one is open
	between bool // it is opening the next one

	next []byte // first bytes of the next session, when makeWay has opened it; owned by the holder of the token
}

// NewPort returns a listener on dev, which it owns from now on.
func NewPort(dev Device) *Port {
	p := &Port{dev: dev, free: make(chan struct{}, 1), done: make(chan struct{})}
	p.free <- struct{}{}
	return p
}

// HandlePlain sets the function that answers the plain messages with which a session may begin. Without it, plain
// messages count as bytes of the session's protocol. It must be called before the first Accept.
func (p *Port) HandlePlain(answer func(message []byte) []byte) { p.plain = answer }

// Accept waits for a host and returns the session with it.
func (p *Port) Accept() (net.Conn, error) {
	select {
	case <-p.free:
	case <-p.done:
		return nil, net.ErrClosed
	}
	rest, err := p.next, error(nil)
	p.next = nil
	for rest == nil && err == nil {
		if rest, err = p.handshake(nil, nil); errors.Is(err, io.EOF) { // that host left before it sent anything
			err = nil
		}
	}
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

// handshake opens a session, starting with data, and returns the first protocol bytes of the session. met, if not nil,
// is called when a host has completed the greeting. The error is io.EOF when that host has left again.
func (p *Port) handshake(data []byte, met func()) ([]byte, error) {
	o := opening{port: p, met: met, buf: make([]byte, readSize)}
	for {
		rest, err := o.greet(data)
		if err != nil {
			return nil, err
		}
		spoken, hello, err := o.plain(rest)
		if err != nil || hello == nil {
			return spoken, err
		}
		data = hello
	}
}

// greet returns the session bytes that came in the same read as GO.
func (o *opening) greet(data []byte) ([]byte, error) {
	var (
		scan  scanner
		nonce uint64
		asked bool
		dev   = o.port.dev
	)
	for {
		hello := false
		for len(data) > 0 {
			f, rest, ok := scan.next(data)
			data = rest
			switch {
			case ok && f.kind == kindHello:
				nonce, asked, hello = f.nonce, true, true
			case ok && f.kind == kindGo && asked && f.nonce == nonce:
				if o.met != nil {
					o.met()
				}
				_, err := dev.Write(frame{kindSession, nonce}.bytes())
				return append([]byte(nil), rest...), err
			}
		}
		if hello { // once per read, even if many HELLOs waited for a booting guest
			if _, err := dev.Write(frame{kindReady, nonce}.bytes()); err != nil {
				return nil, err
			}
		}
		n, err := dev.Read(o.buf, false)
		if err != nil {
			return nil, err
		}
		data = o.buf[:n]
	}
}

// Close ends the listener. An open session continues; the device is closed when both have ended.
func (p *Port) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	close(p.done)
	switch {
	case p.session && p.between:
		p.interrupt()
		return nil
	case p.session:
		return nil
	}
	p.interrupt()
	return p.dev.Close()
}

// handOver records whether a session is opening the next one.
func (p *Port) handOver(between bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.between = between
	if p.closed {
		p.interrupt()
	}
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

	mu      sync.Mutex
	closed  bool
	over    bool           // the host has left: writes are discarded
	reading sync.WaitGroup // reads in progress
	writing sync.WaitGroup // writes in progress
}

func (c *conn) Read(p []byte) (int, error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return 0, net.ErrClosed
	}
	if c.over {
		c.mu.Unlock()
		return 0, io.EOF
	}
	c.reading.Add(1)
	c.mu.Unlock()
	defer c.reading.Done()
	if len(c.rest) == 0 {
		n, err := c.port.dev.Read(c.buf, true)
		switch {
		case errors.Is(err, io.EOF):
			c.makeWay(nil)
			return 0, io.EOF
		case err != nil:
			return 0, err
		case onlyHello(c.buf[:n]):
			c.makeWay(c.buf[:n])
			return 0, io.EOF
		}
		c.rest = c.buf[:n]
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// nextHost is how long a session whose host has left waits for the next host.
const nextHost = 2 * time.Second

// makeWay opens the next session before this one ends. Ending a session takes time, and a host that has resumed this
// guest from saved state would have to wait for it. data is the HELLO of the next host, if it has arrived. If makeWay
// fails, the next Accept tries again.
func (c *conn) makeWay(data []byte) {
	limit := func(t time.Time) func() {
		return func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.port.mu.Lock()
			defer c.port.mu.Unlock()
			if !c.closed && !c.port.closed { // Close sets its own deadlines
				_ = c.port.dev.SetReadDeadline(t)
				_ = c.port.dev.SetWriteDeadline(t)
			}
		}
	}
	c.mu.Lock()
	c.over = true
	c.mu.Unlock()
	c.port.handOver(true)
	defer c.port.handOver(false)
	limit(time.Now().Add(nextHost))()
	c.writing.Wait() // writes in progress would go into the next session
	if rest, err := c.port.handshake(data, limit(time.Time{})); err == nil {
		c.port.next = rest
	}
}

func (c *conn) Write(p []byte) (int, error) {
	c.mu.Lock()
	switch {
	case c.closed:
		c.mu.Unlock()
		return 0, net.ErrClosed
	case c.over:
		c.mu.Unlock()
		return len(p), nil
	}
	c.writing.Add(1)
	c.mu.Unlock()
	defer c.writing.Done()
	return c.port.dev.Write(p)
}

// Close ends the session: it interrupts reads and writes in progress, waits for them, and then releases the port.
func (c *conn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.mu.Unlock()

	c.port.interrupt()
	c.reading.Wait()
	c.writing.Wait()

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

// deadline sets a deadline unless the session is over: it must not affect the next session.
func (c *conn) deadline(t time.Time, set func(time.Time) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return net.ErrClosed
	case c.over: // they belong to the next session
		return nil
	}
	return set(t)
}

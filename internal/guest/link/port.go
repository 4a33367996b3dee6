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
	dev   Device
	free  chan struct{}               // holds a token while no session is open
	done  chan struct{}               // closed by Close
	plain func(message []byte) []byte // see HandlePlain

	mu      sync.Mutex
	closed  bool
	session bool // one is open
	between bool // it makes way for the next one

	next []byte // what begins the session that the last one has made way for; owned by the token's holder
}

// NewPort returns a listener on dev, which it owns from now on.
func NewPort(dev Device) *Port {
	p := &Port{dev: dev, free: make(chan struct{}, 1), done: make(chan struct{})}
	p.free <- struct{}{}
	return p
}

// HandlePlain has answer reply to the plain messages with which a session may begin; without it they are taken for what
// is spoken in the session. It is called before the first Accept.
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
		if rest, err = p.handshake(nil, nil); errors.Is(err, io.EOF) { // that host has gone before it said anything
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

// handshake opens a session, beginning with data, and returns the first bytes of what is spoken in it. met, if not nil,
// is called when a host is there. The error is io.EOF when that has gone again.
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

// greet returns the bytes of the session that came together with its GO.
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
		if hello { // once per read, however often a guest that boots was asked
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

// Close ends the listener. A session that is open goes on; the device is closed when both have ended.
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

// handOver notes that a session makes way for the next one, or that it is done.
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
	over    bool           // the host has gone: what is written is for nobody
	reading sync.WaitGroup // reads under way
	writing sync.WaitGroup // writes under way
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

// nextHost is how long a session whose host has gone waits for the next one.
const nextHost = 2 * time.Second

// makeWay opens the next session before this one ends: to end one takes time, which a host that has resumed this guest
// from saved state would have to wait for. data is the HELLO of the next host, if it is there. Without success the next
// Accept tries anew.
func (c *conn) makeWay(data []byte) {
	limit := func(t time.Time) func() {
		return func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.port.mu.Lock()
			defer c.port.mu.Unlock()
			if !c.closed && !c.port.closed { // whose Close has set deadlines of its own
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
	c.writing.Wait() // what is under way would fall into the next session
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

// deadline sets one unless the session is over: its deadlines must not reach the next one.
func (c *conn) deadline(t time.Time, set func(time.Time) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return net.ErrClosed
	case c.over: // they are the next session's
		return nil
	}
	return set(t)
}

package process

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
)

// viewer is who has the screen of a guest.
type viewer struct {
	mu   sync.Mutex
	conn net.Conn // nil: nobody
}

// OpenDisplay connects to the guest's screen. It ends an earlier connection, unless keep is true.
// Errors: those of the driver, Conflict if the earlier one is kept.
func (p *Process) OpenDisplay(ctx context.Context, d hypervisor.Displayer, keep bool) (net.Conn, error) {
	p.viewer.mu.Lock()
	defer p.viewer.mu.Unlock()
	if keep && p.viewer.conn != nil {
		return nil, errdefs.Conflictf("somebody is connected to its screen")
	}
	conn, err := d.OpenDisplay(ctx)
	if err != nil {
		return nil, err
	}
	if p.viewer.conn != nil {
		_ = p.viewer.conn.Close()
	}
	p.viewer.conn = conn
	return &display{Conn: conn, of: &p.viewer}, nil
}

// display is the connection of a viewer. It makes room for another one when it is closed.
type display struct {
	net.Conn
	of *viewer
}

// Read returns io.EOF when the VM has ended, or a later viewer has the screen.
func (d *display) Read(p []byte) (int, error) {
	n, err := d.Conn.Read(p)
	for _, end := range []error{net.ErrClosed, io.ErrClosedPipe, syscall.ECONNRESET} {
		if errors.Is(err, end) {
			err = io.EOF
		}
	}
	return n, err
}

func (d *display) Close() error {
	d.of.mu.Lock()
	defer d.of.mu.Unlock()
	if d.of.conn == d.Conn {
		d.of.conn = nil
	}
	return d.Conn.Close()
}

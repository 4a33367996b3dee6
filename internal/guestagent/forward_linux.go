package guestagent

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// connectPatience is the timeout for one address to accept a forwarded connection.
const connectPatience = 5 * time.Second

// Forward implements guestv1.GuestServer.
func (s *Server) Forward(ss execStream) error {
	start, release, err := admit(ss, s.forwards, "forwarded connections")
	if err != nil {
		return err
	}
	defer release()
	if start.GetPort() < 1 || start.GetPort() > 1<<16-1 {
		return errdefs.Invalidf("invalid TCP port %d", start.GetPort())
	}
	conn, err := connect(ss.Context(), strconv.Itoa(int(start.GetPort())))
	if err != nil {
		return err
	}
	e := &execution{stream: ss, input: newInput()}
	return e.forward(conn)
}

// connect connects to a port of this machine: first as a program inside would, then as one outside would.
func connect(ctx context.Context, port string) (*net.TCPConn, error) {
	var first error
	for _, host := range append([]string{"127.0.0.1", "::1"}, addresses()...) {
		conn, err := (&net.Dialer{Timeout: connectPatience}).DialContext(ctx, "tcp", net.JoinHostPort(host, port))
		if err == nil {
			return conn.(*net.TCPConn), nil
		}
		if first == nil {
			first = err
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errdefs.Unavailablef("no process listens on port %s in the guest: %w", port, first)
}

// addresses are the machine's own addresses that need no zone.
func addresses() (out []string) {
	all, _ := net.InterfaceAddrs()
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
			out = append(out, n.IP.String())
		}
	}
	return out
}

// forward carries data until the connection sends no more.
func (e *execution) forward(conn *net.TCPConn) error {
	ctx, cancel := context.WithCancelCause(e.stream.Context())
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	var feeding sync.WaitGroup
	defer feeding.Wait()
	defer e.input.stop()
	defer conn.Close()
	defer cancel(nil)
	if err := e.send(credit(stdinWindow)); err != nil {
		return err
	}
	go e.receive(cancel)
	feeding.Go(func() { e.write(conn) })
	buf := make([]byte, 32<<10)
	for {
		n, err := conn.Read(buf)
		if n > 0 {
			if err := e.send(stdout(buf[:n])); err != nil {
				return err
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return e.end(0)
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			return errdefs.Unavailablef("the connection was cut: %w", err)
		}
	}
}

// write writes the host's input to conn until there is no more, or conn accepts no more.
func (e *execution) write(conn *net.TCPConn) {
	for {
		p, ok := e.input.take()
		if !ok {
			break
		}
		if _, err := conn.Write(p); err != nil {
			return // the reading side reports the error
		}
		if e.spent(p) != nil {
			return
		}
	}
	if e.input.complete() {
		_ = conn.CloseWrite()
	}
}

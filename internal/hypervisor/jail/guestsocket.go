package jail

import (
	"context"
	"fmt"
	"net"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// maxGreeting limits the answer to CONNECT, in bytes.
const maxGreeting = 64

// ConnectGuest asks the hypervisor at the other end of conn for a stream to a port of its guest's virtio socket, as Cloud Hypervisor and Firecracker have it: the
// host writes "CONNECT port", and gets "OK port" when the guest has accepted. It waits while the guest has no driver yet.
// Errors: Unavailable if nobody listens there, those of ctx.
func ConnectGuest(ctx context.Context, conn net.Conn, port uint32) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	answer, err := greet(conn, port)
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("connect to port %d of the guest: %w", port, context.Cause(ctx))
	case err != nil:
		return errdefs.Unavailablef("connect to port %d of the guest: %w", port, err)
	case !strings.HasPrefix(answer, "OK "):
		return errdefs.Unavailablef("connect to port %d of the guest: the hypervisor answers %q", port, answer)
	case !stop():
		return fmt.Errorf("connect to port %d of the guest: %w", port, context.Cause(ctx))
	}
	return nil
}

// greet returns the line that answers CONNECT. It reads not one byte more.
func greet(conn net.Conn, port uint32) (string, error) {
	if _, err := fmt.Fprintf(conn, "CONNECT %d\n", port); err != nil {
		return "", err
	}
	var line []byte
	for b := make([]byte, 1); len(line) < maxGreeting; {
		if _, err := conn.Read(b); err != nil {
			return "", err
		}
		if b[0] == '\n' {
			break
		}
		line = append(line, b[0])
	}
	return string(line), nil
}

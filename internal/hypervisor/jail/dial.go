package jail

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// A busy hypervisor queues only one connection. Further callers get EAGAIN (unix(7)) and retry, not all at once.
const dialPatience, dialPause = 5 * time.Second, 10 * time.Millisecond

// Dial connects to the socket name in the runtime folder path, to which no process of a VM can write.
// Errors: Unavailable.
func Dial(ctx context.Context, path, name string) (net.Conn, error) {
	dir, err := OpenDir(path)
	if err != nil {
		return nil, errdefs.As(errdefs.Unavailable, err)
	}
	defer dir.Close()
	conn, err := dialPath(ctx, dir.short(name))
	if err != nil {
		return nil, errdefs.Unavailablef("connect to %s: %w", filepath.Join(path, name), err)
	}
	return conn, nil
}

// Listens reports whether a process listens on the socket name in the runtime folder path.
func Listens(ctx context.Context, path, name string) bool {
	conn, err := Dial(ctx, path, name)
	if err != nil {
		return false
	}
	_ = conn.Close()
	return true
}

func dialPath(ctx context.Context, path string) (net.Conn, error) {
	var dialer net.Dialer
	pauses := &backoff.ExponentialBackOff{InitialInterval: dialPause, RandomizationFactor: 0.5, Multiplier: 1, MaxInterval: dialPause}
	return backoff.Retry(ctx, func() (net.Conn, error) {
		conn, err := dialer.DialContext(ctx, "unix", path)
		if !errors.Is(err, syscall.EAGAIN) {
			err = backoff.Permanent(err)
		}
		return conn, err
	}, backoff.WithBackOff(pauses), backoff.WithMaxElapsedTime(dialPatience))
}

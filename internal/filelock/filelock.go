// Package filelock keeps a second process out of a folder.
//
// The kernel ties the lock to an open file, so it ends with the process, however that ends. The lock is advisory: it excludes
// only processes that take it.
package filelock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cenkalti/backoff/v5"
	"golang.org/x/sys/unix"
)

// ErrTaken says that another process has the lock, or that this process has it through another open file.
var ErrTaken = errors.New("another process holds the lock")

// patience is how long Take waits for the lock. A child that is just being started holds its parent's files open for a moment,
// although it will not use them, and a killed process may not be gone yet.
const patience = time.Second

// Take creates path if it does not exist, and locks it until the file is closed. Errors: ErrTaken.
func Take(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	// The kernel announces a free lock only to callers that block without a limit.
	_, err = backoff.Retry(ctx, func() (locked bool, err error) {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.EWOULDBLOCK) {
			err = backoff.Permanent(err)
		}
		return true, err
	}, backoff.WithBackOff(backoff.NewConstantBackOff(5*time.Millisecond)), backoff.WithMaxElapsedTime(patience))
	switch {
	case err == nil:
		return f, nil
	case errors.Is(err, unix.EWOULDBLOCK):
		err = ErrTaken
	}
	return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
}

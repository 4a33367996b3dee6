// Package filelock keeps a second process out of a folder.
//
// The kernel holds the lock for an open file, so that it ends with the process, however that ends. It excludes those who
// ask for it and nobody else.
package filelock

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// ErrTaken says that another process has the lock, or this one under another open file.
var ErrTaken = errors.New("another process has the lock")

// patience is how long a lock is waited for: a process that is just being started has the files of its parent open for a
// moment, although nobody will use them, and one that was killed may not be gone yet.
const (
	patience = time.Second
	pause    = 5 * time.Millisecond
)

// Take makes path, if it is not there, and takes its lock until the file is closed. Errors: ErrTaken.
func Take(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(patience); ; {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return f, nil
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EWOULDBLOCK) && time.Now().Before(end):
			<-time.After(pause) // the kernel tells nobody that a lock is free without having them wait for ever
			continue
		case errors.Is(err, unix.EWOULDBLOCK):
			err = ErrTaken
		}
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
}

package up

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// lockInstance takes the single lock of an instance. The kernel releases it when the process ends for any reason, and
// gives the owner's pid to other processes, so that no stale pid file can name a wrong process.
func lockInstance(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	l := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	err = unix.FcntlFlock(f.Fd(), unix.F_SETLK, &l)
	if err == nil {
		return f, nil
	}
	f.Close()
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EAGAIN) {
		pid, _ := lockHolder(path)
		return nil, errdefs.Existsf("the instance is already up (pid %d); `cocoon down` stops it", pid)
	}
	return nil, fmt.Errorf("lock %s: %w", path, err)
}

// lockHolder returns the pid of the process that holds the lock, 0 if none does.
func lockHolder(path string) (int, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("open lock: %w", err)
	}
	defer f.Close()
	l := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &l); err != nil {
		return 0, fmt.Errorf("read lock of %s: %w", path, err)
	}
	if l.Type == unix.F_UNLCK {
		return 0, nil
	}
	return int(l.Pid), nil
}

package cocoond

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// lockDir makes this process the only cocoond of a state folder, until the file is closed or the process ends.
func lockDir(dir string) (*os.File, error) {
	path := filepath.Join(dir, "cocoond.lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "lock the state folder: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return f, nil
	}
	f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, errdefs.Existsf("another cocoond uses %s; stop it or choose another --state-dir", dir)
	}
	return nil, errdefs.New(errdefs.FailedPrecondition, "lock %s: %w", path, err)
}

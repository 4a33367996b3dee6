package cocoond

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filelock"
)

// lockDir makes this process the only cocoond on a state folder, until the file is closed or the process ends.
func lockDir(ctx context.Context, dir string) (*os.File, error) {
	f, err := filelock.Take(ctx, filepath.Join(dir, "cocoond.lock"))
	switch {
	case errors.Is(err, filelock.ErrTaken):
		return nil, errdefs.Existsf("another cocoond uses %s; stop it or choose another --state-dir", dir)
	case err != nil:
		return nil, errdefs.New(errdefs.FailedPrecondition, "lock the state folder: %w", err)
	}
	return f, nil
}

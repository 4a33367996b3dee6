package folder

import (
	"errors"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func isNotDir(err error) bool {
	return errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ENAMETOOLONG)
}

// full classifies errors of a full disk.
func full(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errdefs.Exhaustedf("the registry's disk is full; free space or delete images and run epoch gc: %w", err)
	}
	return err
}

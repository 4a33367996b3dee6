package machine

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Limits of the wait for killed processes to close their files.
const (
	protectLimit = 2 * time.Second
	protectPause = 5 * time.Millisecond
)

// protect makes the file systems of these folders read-only. One for which that fails, or that is still written to when the time is
// over, is frozen instead: its journal then needs no replay either.
func protect(folders []*os.File) {
	end := time.Now().Add(protectLimit)
	for _, f := range folders {
		if err := awaitReadOnly(f, end); err != nil {
			_ = unix.IoctlSetInt(int(f.Fd()), fiFreeze, 0) // the power goes off all the same
		}
	}
}

// awaitReadOnly is readOnly that waits until nobody writes any more, but not longer than until end.
func awaitReadOnly(f *os.File, end time.Time) error {
	tick := time.NewTicker(protectPause)
	defer tick.Stop()
	for {
		err := readOnly(f)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			return err
		}
		<-tick.C
	}
}

// readOnly makes the file system of a mounted folder read-only, wherever else it is mounted. f must be its root. EBUSY: files are
// open for writing.
func readOnly(f *os.File) error {
	fs, err := unix.Fspick(int(f.Fd()), "", unix.FSPICK_EMPTY_PATH|unix.FSPICK_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetFlag(fs, "ro"); err != nil {
		return err
	}
	return unix.FsconfigReconfigure(fs)
}

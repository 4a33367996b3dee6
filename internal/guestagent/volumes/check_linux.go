package volumes

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Run runs a program to its end, and returns its exit code and what it printed.
type Run func(ctx context.Context, path string, args ...string) (code int, output string, err error)

// maxTool limits the size of the unpacked e2fsck, in bytes.
const maxTool = 16 << 20

// Checker returns Machine.Check for a packed e2fsck, compressed with gzip, that run runs. It unpacks it for each run: few guests ever
// need it. Nil: there is none.
func Checker(packed *os.File, run Run) func(ctx context.Context, args ...string) (code int, output string, err error) {
	return func(ctx context.Context, args ...string) (int, string, error) {
		if packed == nil {
			return 0, "", errdefs.Unsupportedf("the guest has no e2fsck")
		}
		tool, err := unpack(packed)
		if err != nil {
			return 0, "", fmt.Errorf("unpack e2fsck: %w", err)
		}
		defer tool.Close()
		return run(ctx, fmt.Sprintf("/proc/self/fd/%d", tool.Fd()), args...)
	}
}

// unpack returns a program in memory, open for reading only: the kernel runs no file that somebody can write to.
func unpack(packed *os.File) (tool *os.File, err error) {
	fd, err := unix.MemfdCreate("e2fsck", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	out := os.NewFile(uintptr(fd), "e2fsck")
	defer func() { err = errors.Join(err, out.Close()) }()
	z, err := gzip.NewReader(io.NewSectionReader(packed, 0, maxTool))
	if err != nil {
		return nil, err
	}
	if _, err := io.Copy(out, io.LimitReader(z, maxTool)); err != nil {
		return nil, err
	}
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
}

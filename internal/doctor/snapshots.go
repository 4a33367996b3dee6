package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/sparse"
)

// reflink tests with two unnamed files whether the state's file system shares the blocks of copies. Snapshots do not
// need it: they link files that nobody writes to any more.
func (d doctor) reflink(context.Context) finding {
	src, err := nameless(d.cfg.StateDir)
	if errors.Is(err, fs.ErrNotExist) {
		return finding{status: OK, detail: "not examined: " + d.cfg.StateDir + " is not there yet"}
	}
	if err != nil {
		return finding{status: OK, detail: fmt.Sprintf("not examined: %v", err)}
	}
	defer src.Close()
	dst, err := nameless(d.cfg.StateDir)
	if err != nil {
		return finding{status: OK, detail: fmt.Sprintf("not examined: %v", err)}
	}
	defer dst.Close()
	if _, err := src.Write(make([]byte, os.Getpagesize())); err != nil {
		return finding{status: OK, detail: fmt.Sprintf("not examined: %v", err)}
	}
	if err := sparse.Clone(dst, src); err != nil {
		return finding{status: OK, detail: "no: snapshots use hard links, and full copies where links are not possible"}
	}
	return finding{status: OK, detail: "yes: copies share their blocks"}
}

func nameless(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, &fs.PathError{Op: "make a file in", Path: dir, Err: err}
	}
	return os.NewFile(uintptr(fd), dir), nil
}

package guestagent

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// maxToolOutput limits what is kept of the output of a tool, in bytes.
const maxToolOutput = 2048

// RunTool runs a program of the guest to its end, with all rights, and returns its exit code and the end of what it printed.
// When ctx ends, it kills the program.
func (s *Server) RunTool(ctx context.Context, path string, args ...string) (code int, output string, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("run %s: %w", path, err)
		}
	}()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return 0, "", err
	}
	defer null.Close()
	fd, err := unix.MemfdCreate("output", unix.MFD_CLOEXEC)
	if err != nil {
		return 0, "", err
	}
	out := os.NewFile(uintptr(fd), "output")
	defer out.Close()
	p := program{path: path, args: append([]string{path}, args...), env: []string{"PATH=" + defaultPath, "HOME=/", "LC_ALL=C"}, dir: "/"}
	c, err := p.start(s.procs, null, out, out, false)
	if err != nil {
		return 0, "", err
	}
	select {
	case <-c.done:
	case <-ctx.Done():
		c.signal(killSignal)
		<-c.done
		return 0, "", context.Cause(ctx)
	}
	size, err := out.Seek(0, io.SeekEnd)
	if err != nil {
		return 0, "", err
	}
	text := make([]byte, min(size, maxToolOutput))
	if _, err := out.ReadAt(text, size-int64(len(text))); err != nil && err != io.EOF {
		return 0, "", err
	}
	return c.code(), strings.TrimSpace(strings.ToValidUTF8(string(text), "?")), nil
}

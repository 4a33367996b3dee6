package link

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// OpenVirtio opens the virtio-serial port called name. NotFound when the machine has no such port.
func OpenVirtio(name string) (Device, error) {
	entries, err := filepath.Glob("/sys/class/virtio-ports/*/name")
	if err != nil {
		return nil, err
	}
	for _, path := range entries {
		got, err := os.ReadFile(path)
		if err != nil || strings.TrimSpace(string(got)) != name {
			continue
		}
		dev := "/dev/" + filepath.Base(filepath.Dir(path))
		f, err := os.OpenFile(dev, os.O_RDWR|syscall.O_NONBLOCK, 0)
		if err != nil {
			return nil, fmt.Errorf("open guest channel: %w", err)
		}
		raw, err := f.SyscallConn()
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("open guest channel: %w", err)
		}
		return &virtio{f: f, raw: raw}, nil
	}
	return nil, errdefs.NotFoundf("the machine has no virtio-serial port called %s", name)
}

// virtio is a port in Go's edge-triggered poller. A read returns 0 bytes while no host is attached. Waiting in the
// poller, instead of reading again, is what makes an idle guest use no CPU.
type virtio struct {
	f   *os.File
	raw syscall.RawConn
}

func (v *virtio) Read(p []byte, attached bool) (n int, err error) {
	werr := v.raw.Read(func(fd uintptr) bool {
		n, err = retry(func() (int, error) { return syscall.Read(int(fd), p) })
		switch {
		case errors.Is(err, syscall.EAGAIN):
			return false
		case err == nil && n == 0 && !attached:
			return false
		}
		return true
	})
	switch {
	case werr != nil:
		return 0, werr
	case err != nil:
		return 0, fmt.Errorf("read guest channel: %w", err)
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

func (v *virtio) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		var n int
		var err error
		werr := v.raw.Write(func(fd uintptr) bool {
			n, err = retry(func() (int, error) { return syscall.Write(int(fd), p[done:]) })
			return !errors.Is(err, syscall.EAGAIN)
		})
		if werr != nil {
			return done, werr
		}
		if err != nil {
			return done, fmt.Errorf("write guest channel: %w", err)
		}
		done += n
	}
	return done, nil
}

func retry(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); !errors.Is(err, syscall.EINTR) {
			return n, err
		}
	}
}

func (v *virtio) SetReadDeadline(t time.Time) error  { return v.f.SetReadDeadline(t) }
func (v *virtio) SetWriteDeadline(t time.Time) error { return v.f.SetWriteDeadline(t) }
func (v *virtio) Close() error                       { return v.f.Close() }

package jail

import (
	"net"
	"path/filepath"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// A caller that finds the queue of a busy hypervisor full retries.
func TestDialWaitsForItsTurn(t *testing.T) {
	dir := t.TempDir()
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: filepath.Join(dir, "s")}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	first, err := net.Dial("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if c, err := net.Dial("unix", filepath.Join(dir, "s")); err == nil {
		c.Close()
		t.Fatal("there is room for a second one")
	}
	synctest.Test(t, func(t *testing.T) { // so that no time passes but that of the pauses
		time.AfterFunc(dialPatience/2, func() {
			if n, _, err := syscall.Accept(fd); err == nil {
				_ = syscall.Close(n)
			}
		})
		c, err := Dial(t.Context(), dir, "s")
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	})
}

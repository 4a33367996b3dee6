package jail_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/hypervisor/jail"
)

// TestTail: whatever size a process has given its log, and whatever is in its place, little of it is read.
func TestTail(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if text, err := jail.Tail(path, 0); err != nil || len(text) > 0 {
		t.Errorf("no log: %q, %v", text, err)
	}
	if err := os.WriteFile(path, []byte("first\nlast\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if text, err := jail.Tail(path, 6); err != nil || string(text) != "last\n" {
		t.Errorf("after the first line: %q, %v", text, err)
	}
	if err := os.Truncate(path, 1<<43); err != nil {
		t.Fatal(err)
	}
	if text, err := jail.Tail(path, 0); err != nil || len(text) > 64<<10 || strings.Trim(string(text), "\x00") != "" {
		t.Errorf("a log of 8 TiB: %d bytes, %v", len(text), err)
	}
	pipe, link := filepath.Join(t.TempDir(), "pipe"), filepath.Join(t.TempDir(), "link")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/passwd", link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{pipe, link} {
		if text, err := jail.Tail(path, 0); err == nil {
			t.Errorf("%s: %q", filepath.Base(path), text)
		}
	}
}

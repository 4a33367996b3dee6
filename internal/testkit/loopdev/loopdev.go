// Package loopdev makes block devices of files, for tests.
package loopdev

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// Of makes a block device of a file, until the test ends. args are further ones of losetup.
func Of(t testing.TB, file string, args ...string) (dev string) {
	t.Helper()
	need.Root(t)
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		need.Missing(t, "loop devices")
	}
	losetup := need.Tool(t, "losetup")
	out, err := exec.CommandContext(t.Context(), losetup, append(args, "--show", "--find", file)...).Output()
	if err != nil {
		t.Fatalf("losetup: %v", err)
	}
	dev = strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if err := exec.CommandContext(context.WithoutCancel(t.Context()), losetup, "--detach", dev).Run(); err != nil {
			t.Error(err)
		}
	})
	return dev
}

// New makes a block device with size zero bytes.
func New(t testing.TB, size int64) (dev string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "disk")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, size)); err != nil {
		t.Fatal(err)
	}
	return Of(t, file)
}

package proc

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func TestRunTellsHow(t *testing.T) {
	for script, want := range map[string]Exit{"exit 0": {}, "exit 7": {Code: 7}, "kill -15 $$": {Code: Unknown, Signal: 15}} {
		if got, err := Run(t.Context(), sh(script), Limits{}); err != nil || got != want {
			t.Errorf("%s: %v, %s", script, err, diff.Of(want, got))
		}
	}
}

func TestRunLimits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	s := sh("head -c 100000 /dev/zero >&3")
	s.Files = []*os.File{f}
	if _, err := Run(t.Context(), s, Limits{FileSize: 4096}); err != nil {
		t.Fatal(err)
	}
	if fi, err := f.Stat(); err != nil || fi.Size() > 4096 {
		t.Errorf("it wrote %d bytes, %v", fi.Size(), err)
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ctx, cancel := context.WithCancel(t.Context())
	s := sh("echo $$ >&3; exec sleep 600")
	s.Files = []*os.File{w}
	done := make(chan error, 1)
	go func() {
		_, err := Run(ctx, s, Limits{})
		done <- err
	}()
	buf := make([]byte, 32)
	n, err := r.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	w.Close()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("Run: %v", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(buf[:n])))
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the process is still there: %v", err)
	}
}

// TestRunDiesWithItsParent makes another process call Run and then kills that process. Process 1 of a namespace must die too.
func TestRunDiesWithItsParent(t *testing.T) {
	for _, how := range []string{"plain", "isolated"} {
		t.Run(how, func(t *testing.T) {
			if how == "isolated" && os.Geteuid() != 0 {
				t.Skip("needs root to make namespaces")
			}
			diesWithItsParent(t, how)
		})
	}
}

func diesWithItsParent(t *testing.T, how string) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), "PROC_TEST_RUN="+how)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 32)
	n, err := out.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(buf[:n])))
	if err != nil {
		t.Fatal(err)
	}
	start, err := StartTime(pid)
	if err != nil {
		t.Fatal(err)
	}
	p, err := Open(pid, start, "600")
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait()
}

func TestRunOfNothing(t *testing.T) {
	if _, err := Run(t.Context(), Spec{Path: "/nonexistent", Args: []string{"x"}}, Limits{}); err == nil || errdefs.IsNotFound(err) {
		t.Errorf("got %v", err)
	}
}

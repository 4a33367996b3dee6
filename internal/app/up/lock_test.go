package up

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

// lockHelper is the environment variable that turns the test binary into the holder of a lock: locks work between
// processes, so one process cannot test them.
const lockHelper = "COCOON_TEST_HOLD_LOCK"

func TestMain(m *testing.M) {
	if path := os.Getenv(lockHelper); path != "" {
		if _, err := lockInstance(path); err != nil {
			os.Stdout.WriteString("refused: " + err.Error() + "\n")
			os.Exit(1)
		}
		os.Stdout.WriteString("held\n")
		_, _ = os.Stdin.Read(make([]byte, 1)) // until the test closes it
		os.Exit(0)
	}
	os.Exit(netns.Main(m))
}

// holder starts a process that locks path, and returns it once it has reported the result.
func holder(t *testing.T, path string) (cmd *exec.Cmd, said string) {
	t.Helper()
	cmd = exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), lockHelper+"="+path)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	buf := make([]byte, 4096)
	n, err := out.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return cmd, string(buf[:n])
}

func TestLockIsHeldOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "up.lock")
	if pid, err := lockHolder(path); pid != 0 || err != nil {
		t.Fatalf("before anybody: %d, %v", pid, err)
	}
	first, said := holder(t, path)
	if said != "held\n" {
		t.Fatal(said)
	}
	if pid, err := lockHolder(path); pid != first.Process.Pid || err != nil {
		t.Errorf("holder %d, %v; want %d", pid, err, first.Process.Pid)
	}
	if _, err := lockInstance(path); !errdefs.IsAlreadyExists(err) || !strings.Contains(err.Error(), "already up") {
		t.Errorf("second lock: %v", err)
	}
	if _, said := holder(t, path); !strings.HasPrefix(said, "refused: ") {
		t.Errorf("second process: %s", said)
	}
	// After kill -9 the kernel releases the lock at once.
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = first.Wait()
	if pid, err := lockHolder(path); pid != 0 || err != nil {
		t.Errorf("after its end: %d, %v", pid, err)
	}
	f, err := lockInstance(path)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
}

func TestEndProcess(t *testing.T) {
	start := func(script string) *exec.Cmd {
		cmd := exec.Command("sh", "-c", script)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		return cmd
	}
	yes := func() bool { return true }
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c := start("exec sleep 60")
	if err := endProcess(ctx, c.Process.Pid, unix.SIGTERM, yes); err != nil {
		t.Errorf("one that listens: %v", err)
	}
	// The pid may belong to another process now, which is left alone.
	c = start("exec sleep 60")
	if err := endProcess(ctx, c.Process.Pid, unix.SIGTERM, func() bool { return false }); err != nil {
		t.Errorf("one that is not ours: %v", err)
	}
	if err := c.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("one that is not ours was ended: %v", err)
	}
	// A process that has ended needs no signal; one that ignores the signal is reported.
	_ = c.Process.Kill()
	_ = c.Wait()
	if err := endProcess(ctx, c.Process.Pid, unix.SIGTERM, yes); err != nil {
		t.Errorf("one that is gone: %v", err)
	}
	deaf := exec.Command("sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 1; done")
	out, err := deaf.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := deaf.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = deaf.Process.Kill(); _ = deaf.Wait() })
	if _, err := out.Read(make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	short, cancelShort := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancelShort()
	if err := endProcess(short, deaf.Process.Pid, unix.SIGTERM, yes); !errdefs.IsUnavailable(err) {
		t.Errorf("one that does not listen: %v", err)
	}
}

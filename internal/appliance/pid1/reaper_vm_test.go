//go:build vm

package pid1

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

const inside = "COCOON_TEST_PID1"

// Process 1 of a namespace takes the status of each orphan, and never that of a program that it runs.
func TestReaperAsProcessOne(t *testing.T) {
	if os.Getenv(inside) != "" {
		asProcessOne(t)
		return
	}
	need.Root(t)
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^TestReaperAsProcessOne$", "-test.v")
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "every status was right") {
		t.Fatalf("%v\n%s", err, out)
	}
}

func asProcessOne(t *testing.T) {
	if os.Getpid() != 1 {
		t.Fatalf("this is process %d", os.Getpid())
	}
	m := &machine{reaper: newReaper()}
	go m.reaper.run()
	var all sync.WaitGroup
	for worker := range 4 {
		all.Go(func() {
			for i := range 50 {
				// Three orphans, of which one dies before and two after their parent.
				code := (worker + i) % 5
				out, err := m.run(t.Context(), "sh", "-c", fmt.Sprintf("(sh -c 'exit 9' &); (sleep 0.01; exit 7) & (exit 6) & echo %d.%d; exit %d", worker, i, code))
				exit := (*exec.ExitError)(nil)
				if errors.As(err, &exit) != (code != 0) || exit != nil && exit.ExitCode() != code || err != nil && exit == nil {
					t.Errorf("%d.%d: got %v, want status %d", worker, i, err, code)
				}
				if want := fmt.Sprintf("%d.%d\n", worker, i); string(out) != want {
					t.Errorf("got %q, want %q", out, want)
				}
			}
		})
	}
	all.Wait()
	m.reaper.settle(time.Minute)
	if err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil); !errors.Is(err, unix.ECHILD) {
		t.Errorf("processes are left: %v", err)
	}
	if !t.Failed() {
		fmt.Println("every status was right")
	}
}

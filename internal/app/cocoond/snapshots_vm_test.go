//go:build vm

package cocoond_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestVMSleepSurvivesKills hibernates and wakes a VM while cocoond and QEMU are killed at many moments.
func TestVMSleepSurvivesKills(t *testing.T) {
	n := newNode(t)
	first := n.counting("sleeper")
	boot := n.sh("sleeper", "cat /proc/sys/kernel/random/boot_id")
	same := func() {
		t.Helper()
		r := n.ready("sleeper")
		if r.NICs[0].MAC != first.NICs[0].MAC || r.NICs[0].IP != first.NICs[0].IP {
			t.Errorf("it was %v and is %v", first.NICs, r.NICs)
		}
		n.goesOn("sleeper")
		if b := n.sh("sleeper", "cat /proc/sys/kernel/random/boot_id"); b != boot {
			t.Fatal("it has booted: what was in its memory is lost")
		}
	}
	sleep := func() {
		t.Helper()
		n.until("it sleeps", func() bool {
			_, err := n.Hibernate(t.Context(), "sleeper", "")
			return err == nil || n.state() == vm.StateHibernated
		})
	}
	wake := func() {
		t.Helper()
		n.until("it is awake", func() bool { _, err := n.Wake(t.Context(), "sleeper"); return err == nil })
	}
	sleep()
	if got := n.state(); got != vm.StateHibernated {
		t.Fatalf("it is %s", got)
	}
	wake()
	same()

	// begin runs do in parallel, and returns when the moment has come or do has ended.
	begin := func(do func(*nodeclient.Client), moment func() bool) (wait func()) {
		done, client := make(chan struct{}), n.Client
		go func() { defer close(done); do(client) }()
		n.until("the moment has come", func() bool {
			select {
			case <-done:
				return true
			default:
				return moment()
			}
		})
		return func() { <-done }
	}
	hibernate := func(c *nodeclient.Client) { _, _ = c.Hibernate(t.Context(), "sleeper", "") }
	tryWake := func(c *nodeclient.Client) { _, _ = c.Wake(t.Context(), "sleeper") }
	written := func(least int64) func() bool { // bytes of a snapshot in progress
		return func() bool {
			var size int64
			_ = filepath.WalkDir(filepath.Join(n.dir, "state"), func(path string, d os.DirEntry, err error) error {
				if err == nil && (d.Name() == "memory-ranges" || d.Name() == "vmstate") {
					if st, err := os.Stat(path); err == nil {
						size += st.Sys().(*syscall.Stat_t).Blocks * 512
					}
				}
				return nil
			})
			return size >= least
		}
	}
	gone := func() bool { return syscall.Kill(first.PID, 0) != nil }
	for name, moment := range map[string]func() bool{
		"at once": func() bool { return true }, "first bytes": written(1), "half of it": written(16 << 20), "the process has gone": gone,
		"recorded": func() bool { return n.state() == vm.StateHibernated },
	} {
		first.PID = n.ready("sleeper").PID
		wait := begin(hibernate, moment)
		n.crash()
		wait()
		t.Logf("hibernate, cocoond killed when: %s; then it is %s", name, n.state())
		if n.state() == vm.StateHibernated {
			wake()
		}
		same()
	}
	for name, moment := range map[string]func() bool{
		"at once":          func() bool { return true },
		"it runs":          func() bool { return n.state() == vm.StateRunning },
		"it has a process": func() bool { r, err := n.Inspect(t.Context(), "sleeper"); return err == nil && r.PID > 0 },
	} {
		sleep()
		wait := begin(tryWake, moment)
		n.crash()
		wait()
		t.Logf("wake, cocoond killed when: %s; then it is %s", name, n.state())
		if n.state() == vm.StateHibernated {
			wake()
		}
		same()
	}
	// QEMU dies during a wake: the VM either has not resumed, or has ended like any VM whose process dies.
	sleep()
	wait := begin(tryWake, func() bool { r, err := n.Inspect(t.Context(), "sleeper"); return err == nil && r.PID > 0 })
	if r, err := n.Inspect(t.Context(), "sleeper"); err == nil && r.PID > 0 && !r.AgentReady {
		_ = syscall.Kill(r.PID, syscall.SIGKILL)
	}
	wait()
	n.until("it is asleep or awake", func() bool {
		r, err := n.Inspect(t.Context(), "sleeper")
		return err == nil && (r.State == vm.StateHibernated || r.State == vm.StateRunning && r.AgentReady || r.State == vm.StateStopped)
	})
	t.Logf("QEMU killed while it is woken; then it is %s", n.state())
	switch n.state() {
	case vm.StateHibernated:
		wake()
		same()
	case vm.StateStopped:
		if _, err := n.Start(t.Context(), "sleeper"); err != nil {
			t.Error(err)
		}
		n.ready("sleeper")
	default:
		same()
	}
	if err := n.Remove(t.Context(), "sleeper", true); err != nil {
		t.Fatal(err)
	}
	containersGoOn(t, n)
	list, err := n.ListSnapshots(t.Context())
	if err != nil || len(list) > 0 {
		t.Errorf("left: %v, %v", list, err)
	}
}

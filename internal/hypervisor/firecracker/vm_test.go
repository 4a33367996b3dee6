//go:build vm

package firecracker

import (
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/hypervisortest"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/testkit/jailtest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
)

func needGuest(t testing.TB) testguest.Guest {
	t.Helper()
	need.Hypervisor(t, DefaultBinary)
	if problem := jail.ReadKVM().Problem(); problem != "" {
		t.Skip("KVM is needed: " + problem)
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	return testguest.Need(t, map[string][]byte{"echo": self})
}

func testDriver(t testing.TB) *Driver {
	t.Helper()
	d, err := New(Config{Binary: need.Hypervisor(t, DefaultBinary), Cgroup: "cocoon-test-" + strconv.Itoa(os.Getpid())}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestContract(t *testing.T) {
	a := needGuest(t)
	hypervisortest.Run(t, func(t *testing.T) hypervisortest.Fixture {
		return hypervisortest.Fixture{
			New: func(t *testing.T) hypervisor.Driver { return testDriver(t) },
			Plan: func(t *testing.T) hypervisor.Plan {
				p := a.Plan(t)
				t.Cleanup(func() {
					if t.Failed() {
						text, _ := os.ReadFile(filepath.Join(p.Dir, programLog))
						t.Logf("the log of the program:\n%s", text[max(0, len(text)-4000):])
					}
				})
				return p
			},
			Broken: func(t *testing.T) hypervisor.Plan {
				p := a.Plan(t)
				p.Boot.Kernel = filepath.Join(t.TempDir(), "kernel")
				if err := os.WriteFile(p.Boot.Kernel, make([]byte, 4096), 0o600); err != nil {
					t.Fatal(err)
				}
				return p
			},
			Booted:   testguest.Booted(),
			PowerOff: func(t *testing.T, i hypervisor.Instance) { testguest.Say(t, i, "poweroff") },
			Reset:    func(t *testing.T, i hypervisor.Instance) { testguest.Say(t, i, "reset") },
			Crash: func(t *testing.T, pid int) {
				// It is process 1 of its namespace, and only SIGKILL from outside can end it.
				if err := unix.Kill(pid, unix.SIGKILL); err != nil {
					t.Fatal(err)
				}
			},
			Left: func(t *testing.T, p hypervisor.Plan) []string { return jailtest.Left(t, testDriver(t).jail, p) },
		}
	})
}

//go:build vm

package qemu

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/hypervisortest"
	"cocoonstack.io/cocoon/internal/testkit/jailtest"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
	"cocoonstack.io/cocoon/internal/vm"
)

// assets is the guest of these tests.
type assets struct{ testguest.Guest }

func needGuest(t testing.TB) assets { return assets{testguest.Need(t, nil)} }

func (a assets) plan(t testing.TB) hypervisor.Plan { return a.Plan(t) }

func (a assets) firmware(t testing.TB) hypervisor.Plan { return a.Firmware(t) }

func deepDir(t testing.TB) string { return testguest.Dir(t) }

func say(t testing.TB, i hypervisor.Instance, line string) { testguest.Say(t, i, line) }

func await(t testing.TB, what string, ok func() bool) { t.Helper(); testguest.Await(t, what, ok) }

func logged(t testing.TB, i hypervisor.Instance, text string) string {
	t.Helper()
	return testguest.Logged(t, i, text)
}

func line(t testing.TB, i hypervisor.Instance, text string) string {
	t.Helper()
	return testguest.Line(t, i, text)
}

func consoleOf(t testing.TB, i hypervisor.Instance) string {
	t.Helper()
	return testguest.Console(t, i)
}

func testDriver(t testing.TB) *Driver {
	t.Helper()
	d, err := New(Config{Cgroup: "cocoon-test-" + strconv.Itoa(os.Getpid())}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// shell types a line for the shell of a demo disk until the console has the answer: a shell that has just begun may lose what it reads.
func shell(t testing.TB, i hypervisor.Instance, line, what string, answered func(log string) bool) {
	t.Helper()
	console, _ := hypervisor.As[hypervisor.ConsoleOpener](i)
	c, err := console.OpenConsole(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() { _, _ = io.Copy(io.Discard, c) }()
	const patience = 5 * time.Second
	var typed time.Time
	await(t, what, func() bool {
		if time.Since(typed) > patience {
			if _, err := io.WriteString(c, line+"\n"); err != nil {
				t.Fatal(err)
			}
			typed = time.Now()
		}
		return answered(consoleOf(t, i))
	})
}

func TestContract(t *testing.T) {
	a := needGuest(t)
	hypervisortest.Run(t, func(t *testing.T) hypervisortest.Fixture {
		return hypervisortest.Fixture{
			New:  func(t *testing.T) hypervisor.Driver { return testDriver(t) },
			Plan: func(t *testing.T) hypervisor.Plan { return a.plan(t) },
			Broken: func(t *testing.T) hypervisor.Plan {
				p := a.plan(t)
				path := filepath.Join(t.TempDir(), "bad.qcow2")
				if err := os.WriteFile(path, make([]byte, 4096), 0o600); err != nil {
					t.Fatal(err)
				}
				p.Disks = []vm.Disk{{Path: path, Format: vm.DiskQCOW2}}
				return p
			},
			Reads:    testguest.Reads,
			Booted:   testguest.Booted(),
			Firmware: func(t *testing.T) hypervisor.Plan { return a.firmware(t) },
			PowerOff: func(t *testing.T, i hypervisor.Instance) { say(t, i, "poweroff") },
			Reset:    func(t *testing.T, i hypervisor.Instance) { say(t, i, "reset") },
			Crash: func(t *testing.T, pid int) {
				// It is process 1 of its namespace, and only SIGKILL from outside can end it.
				if err := unix.Kill(pid, unix.SIGKILL); err != nil {
					t.Fatal(err)
				}
			},
			Plugged: func(t *testing.T, i hypervisor.Instance, serials ...string) {
				want := "PLUGGED"
				for _, serial := range slices.Sorted(slices.Values(serials)) {
					want += " " + serial + " 1" // read-only
				}
				var last string
				await(t, "the guest says "+want, func() bool {
					before := strings.Count(consoleOf(t, i), "PLUGGED")
					say(t, i, "plugged")
					await(t, "the guest answers", func() bool {
						answers := strings.Split(consoleOf(t, i), "PLUGGED")
						last, _, _ = strings.Cut(answers[len(answers)-1], ".")
						return len(answers) > before+1 && strings.Contains(answers[len(answers)-1], ".")
					})
					return "PLUGGED"+last == want
				})
			},
			NICs: func(t *testing.T, n int) (nics []vm.NIC) {
				ns := testguest.Bridged(t, n)
				for i := range n {
					nics = append(nics, vm.NIC{Tap: fmt.Sprintf("tap%d", i), NetNS: "/run/netns/" + ns, MAC: fmt.Sprintf("02:00:00:00:00:%02x", 0x40+i), MTU: 1400})
				}
				return nics
			},
			Connected: func(t *testing.T, i hypervisor.Instance, macs ...string) {
				want := "MACS " + strings.Join(slices.Sorted(slices.Values(macs)), " ") + " ."
				await(t, "the guest says "+want, func() bool {
					before := strings.Count(consoleOf(t, i), "HEARD sh")
					say(t, i, "sh echo MACS $(cat /sys/class/net/eth*/address | sort)")
					await(t, "the guest answers", func() bool {
						answers := strings.Split(consoleOf(t, i), "HEARD sh")
						return len(answers) > before+1 && strings.Contains(answers[len(answers)-1], " .")
					})
					text := consoleOf(t, i)
					return strings.Contains(text[strings.LastIndex(text, "HEARD sh"):], want)
				})
			},
			Carriers: carriers,
			Sized: func(t *testing.T, i hypervisor.Instance, serial string, size int64) {
				want := fmt.Sprintf("SIZE %s %d.", serial, size/512)
				await(t, "the guest says "+want, func() bool {
					before := strings.Count(consoleOf(t, i), "HEARD size")
					say(t, i, "size "+serial)
					await(t, "the guest answers", func() bool { return strings.Count(consoleOf(t, i), "HEARD size") > before })
					return strings.Contains(consoleOf(t, i), want)
				})
			},
			Has: func(t *testing.T, i hypervisor.Instance, size vm.Size) {
				const kept = 120 << 20 // by the kernel, at most: more with each of its releases
				await(t, fmt.Sprintf("the guest has %+v", size), func() bool {
					before := strings.Count(consoleOf(t, i), "\nHAS ")
					say(t, i, "has")
					await(t, "the guest answers", func() bool { return strings.Count(consoleOf(t, i), "\nHAS ") > before })
					text := consoleOf(t, i)
					var cpus int
					var kib int64
					if _, err := fmt.Sscanf(text[strings.LastIndex(text, "\nHAS ")+1:], "HAS %d %d.", &cpus, &kib); err != nil {
						return false
					}
					return cpus == size.CPUs && kib<<10 > size.Memory-kept && kib<<10 < size.Memory
				})
			},
			Left: left,
		}
	})
}

// left searches for traces.
func left(t *testing.T, p hypervisor.Plan) []string { return jailtest.Left(t, testDriver(t).jail, p) }

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

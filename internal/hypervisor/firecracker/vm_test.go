//go:build vm

package firecracker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ext4"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/hypervisortest"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/jailtest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
	"cocoonstack.io/cocoon/internal/vm"
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
			Reads:    testguest.Reads,
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

// TestDisks gives a guest disks that only root may open, and grows one. It has no serials of its own to find them by: the arguments of its kernel tell them.
func TestDisks(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.Plan(t)
	for n, name := range []string{"cow", "layer", "data"} {
		path := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(path, append([]byte(name+"\n"), make([]byte, (n+1)<<20-1-len(name))...), 0o600); err != nil {
			t.Fatal(err)
		}
		p.Disks = append(p.Disks, vm.Disk{Path: path, Format: vm.DiskRaw, ReadOnly: name == "layer", Serial: name})
	}
	i := start(t, d, p)
	testguest.Logged(t, i, "GUEST-READY")
	answers := func(script, want string) {
		t.Helper()
		testguest.Say(t, i, "sh "+script)
		testguest.Logged(t, i, want)
	}
	answers("cat /sys/block/vd?/ro /sys/block/vd?/size", "0 1 0 2048 4096 6144 .")
	answers("for d in a b c; do head -n 1 /dev/vd$d; done", "cow layer data .")
	answers("grep -o 'cocoon.disks=[^ ]*' /proc/cmdline", "cocoon.disks=cow,layer,data .")
	testguest.Say(t, i, "write changed")
	testguest.Logged(t, i, "WRITTEN")
	if text, err := os.ReadFile(p.Disks[0].Path); err != nil || string(text[:8]) != "changed\n" {
		t.Errorf("the disk has %q, %v", text[:8], err)
	}
	grower, _ := hypervisor.As[hypervisor.DiskGrower](i)
	for serial, size := range map[string]int64{"none": 8 << 20, "": 8 << 20, "layer": 8 << 20, "data": 1 << 20} {
		if err := grower.GrowDisk(t.Context(), serial, size); !errdefs.IsInvalid(err) {
			t.Errorf("grow %q to %d: %v", serial, size, err)
		}
	}
	if err := os.Truncate(p.Disks[2].Path, 8<<20); err != nil {
		t.Fatal(err)
	}
	if err := grower.GrowDisk(t.Context(), "data", 8<<20); err != nil {
		t.Fatal(err)
	}
	answers("while [ $(cat /sys/block/vdc/size) != 16384 ]; do sleep 0.1; done; echo GROWN", "GROWN .")

	// A clone has disks of its own, of which one has grown.
	s := saved(t)
	s.Hold = true
	doSave(t, i, s)
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	q := from(t, a, p, s)
	if err := os.Truncate(q.Disks[2].Path, 16<<20); err != nil {
		t.Fatal(err)
	}
	q.Incoming.Grown = []string{"data"}
	i = start(t, d, q)
	answers("while [ $(cat /sys/block/vdc/size) != 32768 ]; do sleep 0.1; done; echo GROWN MORE", "GROWN MORE .")
	testguest.Say(t, i, "poweroff")
	if e, err := i.Wait(t.Context()); err != nil || !e.GuestShutdown {
		t.Errorf("%+v, %v", e, err)
	}
}

// TestPanic: a kernel that panics resets its machine, which ends it.
func TestPanic(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	i := start(t, d, a.Plan(t))
	testguest.Logged(t, i, "GUEST-READY")
	testguest.Say(t, i, "panic")
	if e, err := i.Wait(t.Context()); err != nil || !e.GuestReset || e.GuestShutdown {
		t.Errorf("%+v, %v", e, err)
	}
}

// TestHalted: a program that powers the guest off past its init only halts it, which is noticed.
func TestHalted(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.Plan(t)
	i := start(t, d, p)
	testguest.Logged(t, i, "GUEST-READY")
	testguest.Say(t, i, "sh poweroff -f")
	_ = i.Close() // another daemon notices it
	i, err := testDriver(t).Adopt(t.Context(), i.Handle())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = i.Close() })
	if e, err := i.Wait(t.Context()); err != nil || !e.GuestShutdown || e.GuestReset || e.Signal != 0 {
		t.Errorf("%+v, %v", e, err)
	}
	if left := jailtest.Left(t, d.jail, p); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func start(t *testing.T, d *Driver, p hypervisor.Plan) hypervisor.Instance {
	t.Helper()
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := jail.Tail(filepath.Join(p.Dir, programLog), 0)
			t.Logf("the log of the program:\n%s", text)
			text, _ = jail.Tail(filepath.Join(p.Dir, jail.ConsoleLog), 0)
			t.Logf("the console:\n%s", text)
		}
		_ = i.Kill(context.Background())
	})
	return i
}

func saved(t *testing.T) hypervisor.SavePlan {
	dir := t.TempDir()
	return hypervisor.SavePlan{State: filepath.Join(dir, "vmstate"), Memory: filepath.Join(dir, "memory-ranges")}
}

func doSave(t *testing.T, i hypervisor.Instance, p hypervisor.SavePlan) hypervisor.Saved {
	t.Helper()
	snapshotter, _ := hypervisor.As[hypervisor.Snapshotter](i)
	s, err := snapshotter.Save(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// from returns the plan of another VM that resumes from what one of p has saved, with the same disks.
func from(t *testing.T, a testguest.Guest, p hypervisor.Plan, s hypervisor.SavePlan) hypervisor.Plan {
	t.Helper()
	q := a.Plan(t)
	q.Disks, q.NICs = p.Disks, slices.Clone(p.NICs)
	q.Incoming = &hypervisor.Incoming{State: s.State, Memory: s.Memory}
	return q
}

// TestAgent boots our own initramfs: the agent finds its disk, answers on the virtio socket, obeys Ctrl+Alt+Del, and cuts the power of a machine that has no switch.
func TestAgent(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.Plan(t)
	p.Boot = vm.Boot{Kernel: a.Kernel, Initrd: os.Getenv("COCOON_TEST_INITRD")}
	for _, serial := range []string{"data", "cocoon-cow"} {
		f, err := os.Create(filepath.Join(t.TempDir(), serial))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		const size = 64 << 20
		if err := errors.Join(f.Truncate(size), ext4.Format(f, ext4.Empty{Size: size, ID: [16]byte{1}, Mode: 0o755, Now: time.Now()})); err != nil {
			t.Fatal(err)
		}
		p.Disks = append(p.Disks, vm.Disk{Path: f.Name(), Format: vm.DiskRaw, Serial: serial})
	}
	i := start(t, d, p)
	guest, _ := hypervisor.As[hypervisor.GuestDialer](i)
	conn, err := guest.DialGuest(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ended := make(chan hypervisor.Exit, 1)
	go func() {
		e, _ := i.Wait(t.Context())
		ended <- e
	}()
	press := time.NewTicker(time.Second) // the agent may not know its button yet
	defer press.Stop()
	for {
		if err := i.Shutdown(t.Context()); err != nil && !errdefs.IsNotFound(err) {
			t.Fatal(err)
		}
		select {
		case <-press.C:
			continue
		case e := <-ended:
			if !e.GuestShutdown {
				t.Errorf("%+v", e)
			}
		}
		break
	}
	for n, used := range []bool{false, true} {
		text, err := os.ReadFile(p.Disks[n].Path)
		if err != nil || bytes.Contains(text, []byte("upper")) != used {
			t.Errorf("the agent uses disk %s: %v; %v", p.Disks[n].Serial, !used, err)
		}
	}
}

// TestConfined looks at the process from outside.
func TestConfined(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.Plan(t)
	i := start(t, d, p)
	if uid, err := proc.UID(i.PID()); err != nil || !d.jail.Users.Owns(uid) {
		t.Errorf("it runs as user %d, %v", uid, err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", i.PID()))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"NoNewPrivs:\t1", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000"} {
		if !strings.Contains(string(status), want) {
			t.Errorf("its status has no %q", want)
		}
	}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", i.PID()))
	if err != nil || len(threads) < 3 {
		t.Errorf("threads: %v, %v", threads, err)
	}
	for _, path := range threads {
		if text, err := os.ReadFile(path); err != nil || !strings.Contains(string(text), "Seccomp:\t2") {
			t.Errorf("a thread without a filter of system calls: %.40q, %v", text, err)
		}
	}
	for _, ns := range []string{"net", "mnt", "pid", "ipc", "uts"} {
		ours, _ := os.Readlink("/proc/self/ns/" + ns)
		if its, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", i.PID(), ns)); err != nil || its == ours {
			t.Errorf("its namespace %s is ours, %v", ns, err)
		}
	}
	var all []string
	root := fmt.Sprintf("/proc/%d/root", i.PID())
	err = filepath.WalkDir(root+"/", func(path string, e os.DirEntry, err error) error {
		if rel := strings.TrimPrefix(path, root); rel == "/proc" {
			return filepath.SkipDir
		} else if err == nil && !e.IsDir() {
			all = append(all, rel)
		}
		return err
	})
	want := []string{"/boot/initrd", "/boot/kernel", "/dev/kvm", "/dev/null", "/dev/urandom", "/log", "/run/agent.sock", "/run/api.sock", "/save/memory", "/save/state", d.cfg.Binary}
	slices.Sort(all)
	slices.Sort(want)
	if err != nil || !slices.Equal(all, want) {
		t.Errorf("it sees %q, %v; want %q", all, err, want)
	}
}

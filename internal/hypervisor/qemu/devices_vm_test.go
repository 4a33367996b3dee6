//go:build vm

package qemu

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/jailtest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func start(t *testing.T, d *Driver, p hypervisor.Plan) hypervisor.Instance {
	t.Helper()
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Reap(context.Background(), p.ID, p.Dir); err != nil {
			t.Error(err)
		}
		_ = i.Close()
	})
	return i
}

// secretDir is a folder that only root may enter, for disks.
func secretDir(t *testing.T) string {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestDisks runs two VMs on one shared read-only layer, each with a private overlay. No other user may read the files.
func TestDisks(t *testing.T) {
	a, d, dir := needGuest(t), testDriver(t), secretDir(t)
	layer := filepath.Join(dir, "layer.raw")
	base := filepath.Join(dir, "base.qcow2")
	run(t, "qemu-img", "create", "-q", "-f", "raw", layer, "8M")
	run(t, "qemu-img", "create", "-q", "-f", "qcow2", base, "16M")
	for _, f := range []string{layer, base} {
		if err := os.Chmod(f, 0o400); err != nil {
			t.Fatal(err)
		}
	}
	baseDisk := vm.Disk{Path: base, Format: vm.DiskQCOW2, ReadOnly: true}
	var plans []hypervisor.Plan
	for n := range 2 {
		overlay := filepath.Join(dir, fmt.Sprintf("overlay%d.qcow2", n))
		// The header names no backing file: only the plan defines it.
		run(t, "qemu-img", "create", "-q", "-f", "qcow2", overlay, "16M")
		p := a.plan(t)
		p.Disks = []vm.Disk{
			{Path: overlay, Format: vm.DiskQCOW2, Serial: "cow", Role: vm.RoleCOW, Backing: &baseDisk},
			{Path: layer, Format: vm.DiskRaw, ReadOnly: true, Serial: "layer0", Role: vm.RoleLayer},
		}
		plans = append(plans, p)
	}
	first, second := start(t, d, plans[0]), start(t, d, plans[1])
	for _, i := range []hypervisor.Instance{first, second} {
		if log := line(t, i, "GUEST-READY"); !strings.Contains(log, "disks: cow 0 layer0 1") {
			t.Errorf("the guest sees %s", log)
		}
	}
	before, err := os.ReadFile(base)
	if err != nil {
		t.Fatal(err)
	}
	say(t, first, "write Hello")
	logged(t, first, "WRITTEN")
	if after, err := os.ReadFile(base); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the shared base has changed, %v", err)
	}

	thief := a.plan(t)
	thief.Disks = plans[0].Disks
	if i, err := d.Launch(t.Context(), thief); err == nil {
		_ = i.Kill(t.Context())
		t.Error("two VMs write one disk")
	} else if !strings.Contains(err.Error(), "lock") {
		t.Errorf("the error does not say why: %v", err)
	}
	if left := left(t, thief); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if err := first.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	out := run(t, "qemu-img", "check", plans[0].Disks[0].Path)
	if !strings.Contains(out, "No errors") {
		t.Errorf("overlay: %s", out)
	}
}

// TestNIC puts a tap into its own namespace and exchanges packets with the guest through it.
func TestNIC(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	ns := fmt.Sprintf("cocoon-test-%d", os.Getpid())
	run(t, "ip", "netns", "add", ns)
	t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", ns).Run() })
	run(t, "ip", "-n", ns, "tuntap", "add", "tap0", "mode", "tap", "vnet_hdr")
	run(t, "ip", "-n", ns, "addr", "add", "10.9.8.1/24", "dev", "tap0")
	run(t, "ip", "-n", ns, "link", "set", "tap0", "up")
	p := a.plan(t)
	p.NICs = []vm.NIC{{Tap: "tap0", NetNS: "/run/netns/" + ns, MAC: "02:00:00:00:00:42"}}
	i := start(t, d, p)
	if log := line(t, i, "GUEST-READY"); !strings.Contains(log, "macs: 02:00:00:00:00:42") {
		t.Errorf("the guest sees %s", log)
	}
	say(t, i, "up 10.9.8.2/24")
	logged(t, i, "UP")
	run(t, "ip", "netns", "exec", ns, "ping", "-c", "2", "-W", "5", "10.9.8.2")

	missing := a.plan(t)
	missing.NICs = []vm.NIC{{Tap: "tap9", NetNS: "/run/netns/" + ns, MAC: "02:00:00:00:00:43"}}
	if _, err := d.Launch(t.Context(), missing); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a tap that is not there: %v", err)
	}
	taken := a.plan(t)
	taken.NICs = p.NICs
	if _, err := d.Launch(t.Context(), taken); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("a tap in use: %v", err)
	}
	if links := run(t, "ip", "-n", ns, "-br", "link"); strings.Count(links, "tap") != 1 {
		t.Errorf("links: %s", links)
	}
}

// TestConfined inspects the process from outside.
func TestConfined(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.plan(t)
	i := start(t, d, p)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", i.PID()))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for sc := bufio.NewScanner(bytes.NewReader(status)); sc.Scan(); {
		k, v, _ := strings.Cut(sc.Text(), ":")
		got[k] = strings.TrimSpace(v)
	}
	for k, want := range map[string]string{"NoNewPrivs": "1", "CapEff": "0000000000000000", "CapBnd": "0000000000000000", "Seccomp": "2", "Groups": ""} {
		if got[k] != want {
			t.Errorf("%s is %q, want %q", k, got[k], want)
		}
	}
	if uid, err := proc.UID(i.PID()); err != nil || !d.jail.Users.Owns(uid) {
		t.Errorf("user %d, %v", uid, err)
	}
	for _, ns := range []string{"net", "ipc", "uts", "pid", "mnt"} {
		ours, _ := os.Readlink("/proc/self/ns/" + ns)
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", i.PID(), ns))
		if err != nil || ours == theirs {
			t.Errorf("%s namespace %s is ours, %v", ns, theirs, err)
		}
	}
	if inside := strings.Fields(got["NSpid"]); len(inside) < 2 || inside[len(inside)-1] != "1" {
		t.Errorf("process ids, from outside to inside: %s", got["NSpid"])
	}
	// What a program started by the hypervisor sees: only itself and the hypervisor.
	user, _, _ := strings.Cut(got["Uid"], "\t")
	seen := run(t, "nsenter", "-t", fmt.Sprint(i.PID()), "-m", "--", "setpriv", "--reuid="+user, "--regid="+user,
		"--clear-groups", "--bounding-set=-all", "ls", "/proc")
	var pids []string
	for _, name := range strings.Fields(seen) {
		if _, err := strconv.Atoi(name); err == nil {
			pids = append(pids, name)
		}
	}
	if !slices.Contains(pids, fmt.Sprint(i.PID())) || len(pids) != 2 {
		t.Errorf("of the host's processes it sees %v", pids)
	}
	if g := d.jail.Cgroups; g.Usable() {
		dirs, err := g.Folders(p.ID, p.Dir, nil)
		if err != nil {
			t.Fatal(err)
		}
		procs, err := os.ReadFile(filepath.Join(dirs[0], "cgroup.procs"))
		if err != nil || strings.TrimSpace(string(procs)) != fmt.Sprint(i.PID()) {
			t.Errorf("cgroup holds %q, %v", procs, err)
		}
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", i.PID()))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		target, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", i.PID(), fd.Name()))
		if st, err := os.Stat(target); err == nil && st.IsDir() {
			t.Errorf("the process holds the folder %s", target)
		}
	}
}

// TestConsoleLogBound makes the guest flood its console.
func TestConsoleLogBound(t *testing.T) {
	a := needGuest(t)
	const limit = 64 << 10
	d, err := New(Config{Cgroup: testDriver(t).cfg.Cgroup, LogLimit: limit}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	i := start(t, d, a.plan(t))
	logged(t, i, "GUEST-READY")
	say(t, i, "flood")
	console, _ := hypervisor.As[hypervisor.ConsoleOpener](i)
	var largest, last int64
	cuts := 0
	await(t, "the log was cut three times", func() bool {
		st, err := os.Stat(console.ConsoleLog())
		if err != nil {
			t.Fatal(err)
		}
		if st.Size() < last {
			cuts++
		}
		last = st.Size()
		largest = max(largest, last)
		return cuts == 3
	})
	t.Logf("the log grew to %d bytes with a limit of %d", largest, limit)
	if largest > limit+(4<<20) {
		t.Errorf("the log grew to %d bytes", largest)
	}
}

// TestFirmware boots an empty disk: the firmware reports the attempt on the console.
func TestFirmware(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	for firmware, says := range map[vm.Firmware]string{vm.FirmwareBIOS: "Booting from Hard Disk", vm.FirmwareUEFI: "BdsDxe"} {
		t.Run(string(firmware), func(t *testing.T) {
			disk := filepath.Join(secretDir(t), "disk.raw")
			run(t, "qemu-img", "create", "-q", "-f", "raw", disk, "1M")
			p := a.plan(t)
			p.Boot = vm.Boot{Firmware: firmware}
			p.Disks = []vm.Disk{{Path: disk, Format: vm.DiskRaw, Serial: "root"}}
			i := start(t, d, p)
			logged(t, i, says)
			if _, err := os.Stat(filepath.Join(p.Dir, varsFile)); (err == nil) != (firmware == vm.FirmwareUEFI) {
				t.Errorf("EFI variables: %v", err)
			}
		})
	}
}

func TestRefused(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	closed := filepath.Join(secretDir(t), "vmlinux")
	if err := os.WriteFile(closed, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fifo := filepath.Join(secretDir(t), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name  string
		spoil func(*hypervisor.Plan)
		class errdefs.Class
	}{
		{"no kernel", func(p *hypervisor.Plan) { p.Boot.Kernel = "/nonexistent" }, errdefs.FailedPrecondition},
		{"closed kernel", func(p *hypervisor.Plan) { p.Boot.Kernel = closed }, errdefs.FailedPrecondition},
		{"no disk", func(p *hypervisor.Plan) { p.Disks = []vm.Disk{{Path: "/nonexistent", Format: vm.DiskRaw}} }, errdefs.FailedPrecondition},
		{"fifo", func(p *hypervisor.Plan) { p.Disks = []vm.Disk{{Path: fifo, Format: vm.DiskRaw}} }, errdefs.FailedPrecondition},
		{"no folder", func(p *hypervisor.Plan) { p.Dir = "/nonexistent" }, errdefs.FailedPrecondition},
		{"no namespace", func(p *hypervisor.Plan) { p.NICs = []vm.NIC{{Tap: "t", NetNS: "/nonexistent"}} }, errdefs.FailedPrecondition},
	}
	if jail.ReadKVM().Problem() != "" {
		tests = append(tests, struct {
			name  string
			spoil func(*hypervisor.Plan)
			class errdefs.Class
		}{"kvm where there is none", func(p *hypervisor.Plan) { p.Accel = vm.AccelKVM }, errdefs.Unsupported})
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := a.plan(t)
			dir := p.Dir
			tt.spoil(&p)
			if _, err := d.Launch(t.Context(), p); !errdefs.Is(err, tt.class) {
				t.Errorf("Launch: %v, want %v", err, tt.class)
			}
			p.Dir = dir
			if left := left(t, p); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}

// TestKilledWhileLaunching kills the launching process with SIGKILL at many moments, and then calls Reap.
func TestKilledWhileLaunching(t *testing.T) {
	if spec := os.Getenv("QEMU_TEST_LAUNCH"); spec != "" {
		var p hypervisor.Plan
		if err := json.Unmarshal([]byte(spec), &p); err != nil {
			t.Fatal(err)
		}
		d, err := New(Config{Cgroup: os.Getenv("QEMU_TEST_CGROUP")}, testDriver(t).log)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Println("LAUNCHING")
		_, _ = d.Launch(t.Context(), p)
		fmt.Println("LAUNCHED")
		_, _ = io.Copy(io.Discard, os.Stdin) // until killed
		runtime.Goexit()
	}
	a, d := needGuest(t), testDriver(t)
	parent, _ := jailtest.PodCgroup(t, d.jail.Cgroups, d.cfg.Cgroup)
	for delay := time.Duration(0); delay < 80*time.Millisecond; delay += 4 * time.Millisecond {
		p := a.plan(t)
		if delay%(8*time.Millisecond) == 0 {
			p.CgroupParent = parent
		}
		spec, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=TestKilledWhileLaunching")
		cmd.Env = append(os.Environ(), "QEMU_TEST_LAUNCH="+string(spec), "QEMU_TEST_CGROUP="+d.cfg.Cgroup)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		sc := bufio.NewScanner(out)
		for sc.Scan() && sc.Text() != "LAUNCHING" {
		}
		<-time.After(delay)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = in.Close()
		_ = cmd.Wait()
		if err := d.Reap(t.Context(), p.ID, p.Dir); err != nil {
			t.Fatalf("after %v: %v", delay, err)
		}
		if left := left(t, p); len(left) > 0 {
			t.Fatalf("killed after %v, the host still holds %v", delay, left)
		}
	}
}

// TestReapUnborn reaps a process that was started for the VM but has not yet become QEMU when its daemon is gone: only the
// cgroup shows which VM it belongs to.
func TestReapUnborn(t *testing.T) {
	d := testDriver(t)
	p := hypervisor.Plan{ID: vm.NewID(), CPUs: 1, Memory: 128 << 20, Dir: t.TempDir()}
	group, err := d.jail.Cgroups.Make(p.ID, p.Dir, "", bounds(p, 0))
	if err != nil {
		t.Fatal(err)
	}
	if group.Dir == nil {
		need.Missing(t, "a writable cgroup v2 tree is needed: without one there is nothing to find the process by")
	}
	defer group.Close()
	child, err := proc.Start(proc.Spec{Path: "/bin/sleep", Args: []string{"sleep", "600"}, CgroupDir: group.Dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = child.Kill(context.Background())
		_ = child.Close()
		_ = d.Reap(context.Background(), p.ID, p.Dir)
	})
	if err := d.Reap(t.Context(), p.ID, p.Dir); err != nil {
		t.Fatal(err)
	}
	if left := left(t, p); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// TestReconnect loses the QMP connection to another client and connects again.
func TestReconnect(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	i := start(t, d, a.plan(t)).(*instance)
	c, err := i.connected(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	await(t, "the driver is connected again", func() bool {
		again, err := i.connected(t.Context())
		return err == nil && again != c
	})
	if s, err := i.State(t.Context()); err != nil || s != hypervisor.Running {
		t.Errorf("State = %q, %v", s, err)
	}
}

// TestSocketsAreOurs checks that no other user can connect.
func TestSocketsAreOurs(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.plan(t)
	start(t, d, p)
	for _, name := range sockets {
		st, err := os.Lstat(filepath.Join(p.Dir, name))
		if name == shareSocket { // it is there only while a server is being connected, and this VM has none
			if !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %+v, %v", name, st, err)
		}
	}
	if _, err := net.Dial("unix", filepath.Join(p.Dir, qmpSocket)); err == nil {
		t.Error("the path was meant to be too long to dial")
	}
}

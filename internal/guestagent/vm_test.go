//go:build vm

package guestagent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/guest/agent"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
	"cocoonstack.io/cocoon/internal/vm"
)

const testMAC = "52:54:00:12:34:56"

// qemu is a bare guest, without a driver of ours between it and the test.
type qemu struct {
	cmd     *exec.Cmd
	dir     string
	started time.Time
	ended   chan struct{}
}

// bootGuest starts a guest with the given disks (serial to file) and kills it when the test ends.
func bootGuest(t *testing.T, disks map[string]string) *qemu { return startGuest(t, disks) }

// startGuest is bootGuest with additional QEMU arguments.
func startGuest(t *testing.T, disks map[string]string, more ...string) *qemu {
	t.Helper()
	kernel, initramfs := need.GuestKernel(t)
	q := &qemu{dir: t.TempDir(), ended: make(chan struct{})}
	args := []string{
		"-M", "q35", "-bios", "qboot.rom", "-accel", "tcg,tb-size=128", "-cpu", "max", "-m", "256", "-smp", "1",
		"-nodefaults", "-display", "none", "-no-reboot",
		"-kernel", kernel, "-initrd", initramfs,
		"-append", "console=ttyS0 quiet panic=-1" + testguest.ClockArgs() + " no_timer_check noreplace-smp cryptomgr.notests",
		"-serial", "file:" + q.dir + "/console", "-qmp", "unix:" + q.dir + "/qmp,server=on,wait=off",
		"-device", "virtio-serial-pci", "-chardev", "socket,id=rpc,path=" + q.dir + "/rpc,server=on,wait=off",
		"-device", "virtserialport,chardev=rpc,name=cocoon.agent",
		"-device", "virtio-rng-pci", "-device", "virtio-balloon-pci",
		"-netdev", "user,id=n0,restrict=on", "-device", "virtio-net-pci,netdev=n0,romfile=,mac=" + testMAC,
	}
	for _, serial := range slices.Sorted(maps.Keys(disks)) { // in a fixed order, for guests that resume from the state of another
		file, ro := disks[serial], "off"
		if strings.HasPrefix(serial, "cocoon-l") {
			ro = "on"
		}
		args = append(args, "-drive", "if=none,format=raw,file="+file+",id="+serial+",read-only="+ro,
			"-device", "virtio-blk-pci,drive="+serial+",serial="+serial)
	}
	q.cmd = exec.Command(need.QEMU(t), append(args, more...)...)
	var stderr bytes.Buffer
	q.cmd.Stderr = &stderr
	q.started = time.Now()
	if err := q.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(q.ended)
		_ = q.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = q.cmd.Process.Kill()
		<-q.ended
		if t.Failed() {
			t.Logf("qemu: %s\nconsole: %s", stderr.String(), q.console())
		}
	})
	return q
}

func (q *qemu) console() string {
	text, _ := os.ReadFile(q.dir + "/console")
	return string(text)
}

func (q *qemu) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	for {
		c, err := d.DialContext(ctx, "unix", q.dir+"/rpc")
		if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, os.ErrNotExist) {
			return c, err
		}
		select { // QEMU has not opened its sockets yet
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func (q *qemu) connect(t *testing.T) guest.Agent {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	a, err := agent.Connector{}.Connect(ctx, q.dial)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// work is the CPU time of all threads of the guest, with a finer resolution than cpu.
func (q *qemu) work() time.Duration {
	var sum int
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", q.cmd.Process.Pid))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		ns, _, _ := strings.Cut(string(b), " ")
		n, _ := strconv.Atoi(ns)
		sum += n
	}
	return time.Duration(sum)
}

func (q *qemu) waitEnd(t *testing.T) {
	t.Helper()
	select {
	case <-q.ended:
	case <-time.After(4 * time.Minute):
		t.Fatal("the guest did not power off")
	}
}

// cpu is the CPU time that the guest has used.
func (q *qemu) cpu(t *testing.T) time.Duration {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", q.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+2:]))
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	return time.Duration(user+system) * 10 * time.Millisecond
}

// busyboxDisks makes an image of busybox and an empty writable disk.
func busyboxDisks(t *testing.T) map[string]string {
	t.Helper()
	need.Tool(t, "mke2fs")
	dir := t.TempDir()
	tree := filepath.Join(dir, "tree")
	for _, d := range []string{"bin", "etc", "proc"} { // the agent makes the others
		if err := os.MkdirAll(filepath.Join(tree, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	box, err := os.ReadFile(need.Built(t, "bin/guest/busybox", "make guest"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tree, "bin/busybox"), box, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"sh", "cat", "echo", "ip", "ls", "mount", "sleep", "hostname", "id", "ps", "stty", "grep", "touch", "dd", "tail", "mkdir", "ln"} {
		if err := os.Symlink("busybox", filepath.Join(tree, "bin", name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../run/gone/resolv.conf", filepath.Join(tree, "etc/resolv.conf")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tree, "etc/passwd"), []byte("root:x:0:0::/root:/bin/sh\nweb:x:33:33::/home/web:/bin/sh\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	disks := map[string]string{"cocoon-l000": filepath.Join(dir, "root"), "cocoon-cow": filepath.Join(dir, "cow")}
	run(t, "mke2fs", "-q", "-t", "ext4", "-d", tree, disks["cocoon-l000"], "16m")
	run(t, "mke2fs", "-q", "-t", "ext4", disks["cocoon-cow"], "32m")
	return disks
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", name, err, out)
	}
}

func TestVMLifeOfAGuest(t *testing.T) {
	disks := busyboxDisks(t)
	q := bootGuest(t, disks)
	a := q.connect(t)
	ready := time.Since(q.started)
	begin := time.Now()
	if _, err := a.Info(t.Context()); err != nil {
		t.Fatal(err)
	}
	first := time.Since(begin)
	begin = time.Now()
	info, err := a.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("agent ready %v after exec, first call %v, second %v, guest uptime %d ms", ready, first, time.Since(begin), info.UptimeMS)

	err = a.Setup(t.Context(), guest.Setup{
		Hostname: "web-0",
		NICs:     []vm.NIC{{MAC: testMAC, IP: "10.9.0.2", Prefix: 24, Gateway: "10.9.0.1", DNS: []string{"10.9.0.1"}, MTU: 1400}},
		Hosts:    []string{"10.9.0.9 db"},
		Process: &vm.Process{
			Entrypoint: []string{"sh", "-c"}, Args: []string{"trap 'exit 6' TERM; echo $GREETING; while :; do sleep 0.1; done"},
			Env: []vm.EnvVar{{Name: "GREETING", Value: "good day"}}, WorkDir: "/srv/made", User: "web",
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Logs(t.Context(), 0, func(e guest.LogEntry) error {
		return errors.New(string(e.Data))
	}); err == nil || err.Error() != "good day\n" {
		t.Fatalf("first line of the log: %v", err)
	}
	for _, c := range []struct{ script, want string }{
		{"hostname; id -u; pwd", "web-0\n33\n/srv/made\n"},
		{"ip -o addr show eth0 | grep -o 'inet [0-9./]*'; ip route; ip link show eth0 | grep -o 'mtu [0-9]*'", "inet 10.9.0.2/24\ndefault via 10.9.0.1 dev eth0 \n10.9.0.0/24 dev eth0 scope link  src 10.9.0.2 \nmtu 1400\n"},
		{"cat /etc/resolv.conf; grep -c . /etc/hosts; grep web-0 /etc/hosts", "nameserver 10.9.0.1\n4\n10.9.0.2\tweb-0\n"},
		{"ip addr show lo | grep -o 'inet [0-9./]*'", "inet 127.0.0.1/8\n"},
		{"mount | grep -o '^[a-z0-9]* on / '; ls -d /tmp /dev/shm /dev/pts /run /sys/fs/cgroup/cgroup.procs; ls -d /modules /init /lost+found 2>/dev/null; echo > /dev/null", "overlay on / \n/dev/pts\n/dev/shm\n/run\n/sys/fs/cgroup/cgroup.procs\n/tmp\n"},
	} {
		if got := output(t, a, sh(c.script)); got != c.want {
			t.Errorf("%s:\n got %q\nwant %q", c.script, got, c.want)
		}
	}
	tty := sh("stty size; exit 0")
	tty.TTY, tty.Rows, tty.Cols = true, 30, 100
	if got := output(t, a, tty); got != "30 100\r\n" {
		t.Errorf("terminal of %q", got)
	}
	root := sh("touch /kept && echo ok")
	root.User = "root"
	if got := output(t, a, root); got != "ok\n" {
		t.Errorf("write to the root file system: %q", got)
	}
	var wg sync.WaitGroup
	for range 10 { // orphans are reaped, and no exit code is lost
		wg.Go(func() {
			if code, err := a.Exec(t.Context(), sh("(sleep 0.01 &) ; exit 3"), guest.Streams{}); code != 3 || err != nil {
				t.Errorf("code %d, %v", code, err)
			}
		})
	}
	wg.Wait()
	waitFor(t, func() bool { return !strings.Contains(output(t, a, sh("ps -o stat,comm")), "Z") })
	stats, err := a.Stats(t.Context())
	if err != nil || stats.DiskTotal < 16<<20 || stats.MemoryTotal < 128<<20 {
		t.Errorf("stats %+v, %v", stats, err)
	}

	waited := make(chan guest.Exit, 1)
	go func() {
		exit, err := a.Wait(t.Context())
		if err != nil {
			t.Errorf("wait: %v", err)
		}
		if err := a.AckExit(t.Context()); err != nil && !errdefs.IsUnavailable(err) { // a guest that powers off may not wait for it
			t.Errorf("acknowledge: %v", err)
		}
		waited <- exit
	}()
	if err := a.Poweroff(t.Context(), time.Minute); err != nil {
		t.Fatal(err)
	}
	if exit := <-waited; exit.Code != 6 {
		t.Errorf("exit %+v", exit)
	}
	begin = time.Now()
	q.waitEnd(t)
	t.Logf("powered off in %v; console: %q", time.Since(begin), q.console())
	<-a.Done()
	a.Close()
	run(t, "e2fsck", "-fn", disks["cocoon-cow"])

	q = bootGuest(t, disks) // written data is still there
	a = q.connect(t)
	defer a.Close()
	if got := output(t, a, sh("ls /kept")); got != "/kept\n" {
		t.Errorf("after a restart: %q", got)
	}
}

func TestVMTwoHundredAbruptReconnects(t *testing.T) {
	q := bootGuest(t, busyboxDisks(t))
	var took []time.Duration
	for range 200 {
		begin := time.Now()
		a := q.connect(t)
		if _, err := a.Info(t.Context()); err != nil {
			t.Fatal(err)
		}
		took = append(took, time.Since(begin))
		ctx, cancel := context.WithCancel(t.Context())
		left := make(chan struct{})
		go func() { // disconnect with bytes in transit in both directions
			defer close(left)
			_, _ = a.Exec(ctx, sh("echo; exec cat /dev/zero"), guest.Streams{Stdin: endless{}, Stdout: &bytes.Buffer{}})
		}()
		a.Close()
		cancel()
		<-left
	}
	slices.Sort(took[1:])
	t.Logf("reconnect with one call: p50 %v, p99 %v", took[100], took[198])
	a := q.connect(t)
	defer a.Close()
	waitFor(t, func() bool { return !strings.Contains(output(t, a, sh("ps -o args")), "/dev/zero") })
}

// TestVMIdleCostsNothing measures the CPU time of an idle guest with a connected agent. ENVIRONMENT: 0.3 % of a core,
// mostly for the kernel's own timers.
func TestVMIdleCostsNothing(t *testing.T) {
	for _, attached := range []bool{true, false} {
		t.Run(fmt.Sprintf("host attached %v", attached), func(t *testing.T) {
			t.Parallel() // it mostly waits
			q := bootGuest(t, busyboxDisks(t))
			a := q.connect(t)
			defer a.Close()
			if err := a.Setup(t.Context(), guest.Setup{Hostname: "idle", Process: &vm.Process{Entrypoint: []string{"sleep", "1000"}}}); err != nil {
				t.Fatal(err)
			}
			if !attached {
				a.Close()
			}
			const span = 5 * time.Second
			<-time.After(span) // the guest's own boot work settles
			least := 1.0
			for range 12 { // the guest's kernel has short work of its own now and then; polling would not end
				before := q.cpu(t)
				<-time.After(span)
				least = min(least, float64(q.cpu(t)-before)/float64(span))
				if least <= 0.02 {
					break
				}
			}
			t.Logf("idle: %.2f %% of a core", 100*least)
			if least > 0.02 {
				t.Errorf("an idle guest takes %.1f %% of a core", 100*least)
			}
		})
	}
}

func TestVMPowerButton(t *testing.T) {
	q := bootGuest(t, nil) // no disk: the agent serves from the initramfs
	a := q.connect(t)
	defer a.Close()
	if info, err := a.Info(t.Context()); err != nil || info.SetUp {
		t.Fatalf("info %+v, %v", info, err)
	}
	qmp, err := net.Dial("unix", q.dir+"/qmp") // the guest has answered, so the socket exists
	if err != nil {
		t.Fatal(err)
	}
	defer qmp.Close()
	fmt.Fprint(qmp, `{"execute":"qmp_capabilities"}`)
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for range 1000 { // the button's driver is loaded after the agent answers
		fmt.Fprint(qmp, `{"execute":"system_powerdown"}`)
		select {
		case <-q.ended:
			return
		case <-tick.C:
		}
	}
	t.Error("the guest did not react to its power button")
}

func TestVMBootErrorIsOneLineAndPowerOff(t *testing.T) {
	junk := filepath.Join(t.TempDir(), "junk")
	if err := os.WriteFile(junk, bytes.Repeat([]byte("junk"), 1<<18), 0o644); err != nil {
		t.Fatal(err)
	}
	q := bootGuest(t, map[string]string{"cocoon-l000": junk})
	q.waitEnd(t)
	if want := "\ncocoon-guest: layer 0 of the image: /dev/vda has no supported file system (ext4, erofs, squashfs); powering off\r\n"; !strings.Contains(q.console(), want) {
		t.Errorf("console %q", q.console())
	}
}

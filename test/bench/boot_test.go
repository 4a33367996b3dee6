//go:build bench

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/guest/agent"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	bootRounds = 7
	execRounds = 50
	bareTap    = "bench-bare"
)

// boot compares `cocoon vm run --wait=false` with the plain QEMU command of the same machine: the same kernel,
// devices and disks, but no descriptors, user, namespaces, cgroup and sandbox, and with an existing tap and disk.
// Both are observed in the same way: through the file to which QEMU writes the serial console.
func boot(t *testing.T, results *table) {
	d := start(t, "")
	ready := watchReady(t, d.Client)
	machine := newBare(t, d, spec, false)
	var ours, plain boots
	for n := range bootRounds + 1 {
		var a, b booted
		if n%2 == 0 { // alternate, so that neither always finds the caches warm
			a = oursOnce(t, d, ready, fmt.Sprintf("ours-%d", n))
		}
		b = machine.once(t, n)
		if n%2 == 1 {
			a = oursOnce(t, d, ready, fmt.Sprintf("ours-%d", n))
		}
		if n > 0 { // the first round only warms up
			ours, plain = ours.with(a), plain.with(b)
		}
	}
	compare := func(what, goal string, a, b samples) {
		ratio := float64(a.median()) / float64(b.median())
		results.add(row{what: what, a: ms(a.median()), b: ms(b.median()), figure: fmt.Sprintf("%.3f x", ratio), goal: goal, n: bootRounds, missed: goal != "" && ratio > 1.05})
	}
	compare("guest init: vm run (A), bare QEMU (B)", "<= 1.05 x", ours.init, plain.init)
	compare("CPU time until init: vm run, cocoond and QEMU (A), bare QEMU (B)", "", ours.cpu, plain.cpu)
	compare("agent set up: vm run (A), bare QEMU (B)", "", ours.set, plain.set)
	results.add(row{what: "vm run --wait=false returns (A)", a: ms(ours.back.median()), n: bootRounds})
	results.note("guest init, vm run:    %s", spread(ours.init))
	results.note("guest init, bare QEMU: %s", spread(plain.init))
	results.note("CPU time until init: of vm run's, cocoon %s, cocoond %s; the rest is QEMU's", ms(ours.cli.median()), ms(ours.daemon.median()))
	execTrips(t, d, ready, results)
}

// booted holds the times of one boot, from the start of the command.
type booted struct {
	init time.Duration // to the first line of init on the serial console
	set  time.Duration // until the guest is set up
	cpu  time.Duration // CPU time of all processes concerned, until init
	back time.Duration // until `vm run` returns

	cli, daemon time.Duration // CPU time of the two programs that bare QEMU does not need
}

type boots struct{ init, set, cpu, back, cli, daemon samples }

func (s boots) with(b booted) boots {
	return boots{append(s.init, b.init), append(s.set, b.set), append(s.cpu, b.cpu), append(s.back, b.back), append(s.cli, b.cli), append(s.daemon, b.daemon)}
}

// cpuOf is the CPU time of a process, to the precision of the kernel's clock tick.
func cpuOf(t *testing.T, pid int) time.Duration {
	t.Helper()
	text := string(must(os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)))(t))
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	const perTick = time.Second / 100 // USER_HZ
	user, system := must(strconv.Atoi(fields[11]))(t), must(strconv.Atoi(fields[12]))(t)
	return time.Duration(user+system) * perTick
}

func spread(s samples) string {
	return fmt.Sprintf("min %s, quartiles %s %s %s, max %s", ms(s.quantile(0)), ms(s.quantile(0.25)), ms(s.median()), ms(s.quantile(0.75)), ms(s.quantile(1)))
}

func oursOnce(t *testing.T, d *daemon, ready *readiness, name string) (b booted) {
	t.Helper()
	daemonCPU := cpuOf(t, d.pid)
	cmd := exec.CommandContext(t.Context(), bin("cocoon"), "--socket", d.socket, "vm", "run", "--wait=false", "-o", "json", "--name", name,
		"--cpu", fmt.Sprint(guestCPUs), "--memory", fmt.Sprint(guestMemory), "--storage", fmt.Sprint(guestStorage), image)
	began := time.Now()
	out := must(cmd.Output())(t)
	b.back = time.Since(began)
	var made struct {
		ID  string `json:"id"`
		PID int    `json:"pid"`
	}
	if err := json.Unmarshal(out, &made); err != nil {
		t.Fatalf("vm run printed %s: %v", out, err)
	}
	logs := must(filepath.Glob(filepath.Join(d.dir, "run", "*", made.ID, "console.log")))(t)
	if len(logs) != 1 {
		t.Fatalf("console logs of %s: %v", made.ID, logs)
	}
	b.init = initLine(t, logs[0]).Sub(began)
	b.cli = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	b.daemon = cpuOf(t, d.pid) - daemonCPU
	b.cpu = b.cli + b.daemon + cpuOf(t, made.PID)
	at, _ := ready.wait(t, name)
	b.set = at.Sub(began)
	if err := d.Remove(t.Context(), name, true); err != nil {
		t.Fatal(err)
	}
	return b
}

// initLine waits for the first line of our init on the serial console.
func initLine(t *testing.T, console string) time.Time {
	t.Helper()
	return until(t, time.Minute, "init speaks in "+console, func() bool {
		text, err := os.ReadFile(console)
		return err == nil && bytes.Contains(text, []byte("cocoon-guest "))
	})
}

// bare is the plain QEMU command of one of our VMs.
type bare struct {
	dir   string
	args  []string // with %s for the folder of a run
	disks []string // templates of the writable disks; each run has copies in its folder
	setup guest.Setup
}

// newBare uses the command of one of our running VMs, and the disks of a VM that never ran. spec is that of a VM with a name. Without
// confined the command has no sandbox.
func newBare(t *testing.T, d *daemon, spec func(name string) vm.Spec, confined bool) *bare {
	t.Helper()
	model := must(d.Launch(t.Context(), spec("model")))(t)
	cmdline := must(os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", model.PID)))(t)
	fresh := must(d.Create(t.Context(), spec("fresh")))(t)
	b := &bare{dir: scratch(t), setup: guest.Setup{
		Hostname: model.Spec.Hostname, Process: &model.Process, Volumes: model.Spec.Volumes, Mounts: model.Spec.Mounts, VolumeSerials: map[string]string{},
	}}
	for _, a := range model.Attached {
		b.setup.VolumeSerials[a.Volume] = a.Serial
	}
	for _, n := range model.NICs {
		n.Tap, n.NetNS = "", ""
		b.setup.NICs = append(b.setup.NICs, n)
	}
	files := b.files(fresh.Disks)
	b.args = plain(t, strings.Split(strings.TrimSuffix(string(cmdline), "\x00"), "\x00"), model.Boot, files, confined)
	for i, disk := range b.disks {
		run(t, "cp", "--sparse=always", "--reflink=auto", disk, filepath.Join(b.dir, fmt.Sprintf("template%d", i)))
		b.disks[i] = filepath.Join(b.dir, fmt.Sprintf("template%d", i))
	}
	for _, name := range []string{"model", "fresh"} {
		if err := d.Remove(t.Context(), name, true); err != nil {
			t.Fatal(err)
		}
	}
	bareTapFor(t)
	return b
}

// bareTapFor creates the tap of the bare machines. It is removed at the end of the test.
func bareTapFor(t *testing.T) {
	t.Helper()
	tap := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: bareTap}, Mode: netlink.TUNTAP_MODE_TAP, Flags: netlink.TUNTAP_DEFAULTS | netlink.TUNTAP_VNET_HDR}
	if err := netlink.LinkAdd(tap); err != nil {
		t.Fatal("make a tap:", err)
	}
	for _, f := range tap.Fds {
		f.Close()
	}
	t.Cleanup(func() { _ = netlink.LinkDel(tap) })
	if err := netlink.LinkSetUp(tap); err != nil {
		t.Fatal(err)
	}
}

// files maps each block node of a file to its path. Writable files become templates.
func (b *bare) files(disks []vm.Disk) map[string]string {
	files := map[string]string{}
	for i, d := range disks {
		node := fmt.Sprintf("disk%d", i)
		for at := &d; at != nil; at, node = at.Backing, node+"b" {
			files[node+"-file"] = at.Path
			if at == &d && !d.ReadOnly {
				files[node+"-file"] = fmt.Sprintf("%%s/disk%d", len(b.disks))
				b.disks = append(b.disks, at.Path)
			}
		}
	}
	return files
}

var (
	descriptor = regexp.MustCompile(`\bfd=\d+`)
	logfile    = regexp.MustCompile(`/dev/fdset/\d+`)
	chardev    = regexp.MustCompile(`^socket,id=(\w+),`)
)

// plain replaces descriptors by paths, and removes the sandbox unless confined.
func plain(t *testing.T, argv []string, boot vm.Boot, files map[string]string, confined bool) []string {
	t.Helper()
	out := []string{argv[0]}
	for n := 1; n < len(argv); n++ {
		option := argv[n]
		if n+1 == len(argv) || strings.HasPrefix(argv[n+1], "-") { // an option without a value
			out = append(out, option)
			continue
		}
		n++
		value := argv[n]
		switch option {
		case "-add-fd":
			continue
		case "-sandbox":
			if !confined {
				continue
			}
		case "-kernel":
			value = boot.Kernel
		case "-initrd":
			value = boot.Initrd
		case "-chardev":
			name := chardev.FindStringSubmatch(value)
			value = descriptor.ReplaceAllString(value, "path=%s/"+name[1]+".sock")
			value = logfile.ReplaceAllString(value, "%s/console.log")
		case "-netdev":
			value = descriptor.ReplaceAllString(value, "ifname="+bareTap+",script=no,downscript=no")
		case "-blockdev":
			var node map[string]any
			if err := json.Unmarshal([]byte(value), &node); err != nil {
				t.Fatal(value, err)
			}
			if node["driver"] == "file" {
				path, ok := files[fmt.Sprint(node["node-name"])]
				if !ok {
					t.Fatalf("no file is known for %s in %v", value, files)
				}
				node["filename"] = path
				value = string(must(json.Marshal(node))(t))
			}
		}
		out = append(out, option, value)
	}
	for _, a := range out {
		if strings.Contains(a, "/fd/") || strings.Contains(a, "fdset") || descriptor.MatchString(a) {
			t.Fatalf("a descriptor is left in %q", a)
		}
	}
	return out
}

// bareRun is one process of a bare machine.
type bareRun struct {
	dir   string
	pid   int
	began time.Time
	stop  func()
}

// run starts the commands with fresh copies of the disks. The time for the copies is not measured.
func (b *bare) run(t *testing.T, n int) bareRun {
	t.Helper()
	dir := filepath.Join(b.dir, fmt.Sprint(n))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for i, template := range b.disks {
		run(t, "cp", "--sparse=always", "--reflink=auto", template, filepath.Join(dir, fmt.Sprintf("disk%d", i)))
	}
	var args []string
	for _, a := range b.args[1:] {
		args = append(args, strings.ReplaceAll(a, "%s", dir))
	}
	var errs bytes.Buffer
	cmd := exec.Command(b.args[0], args...)
	cmd.Stderr = &errs
	// Its own session, as our VMs have: the kernel's autogroups divide the CPU by session.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	began := time.Now()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return bareRun{dir: dir, pid: cmd.Process.Pid, began: began, stop: func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the bare QEMU said: %s", errs.Bytes())
		}
		_ = os.RemoveAll(dir)
	}}
}

func (b *bare) once(t *testing.T, n int) (took booted) {
	t.Helper()
	r := b.run(t, n)
	defer r.stop()
	dir, began := r.dir, r.began
	answered := make(chan error, 1)
	var at time.Time
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	until(t, 10*time.Second, "the bare QEMU listens", func() bool { _, err := os.Stat(filepath.Join(dir, "agent.sock")); return err == nil })
	go func() {
		a, err := b.greet(ctx, filepath.Join(dir, "agent.sock"))
		at = time.Now()
		if err == nil {
			err = a.Close()
		}
		answered <- err
	}()
	took.init = initLine(t, filepath.Join(dir, "console.log")).Sub(began)
	took.cpu = cpuOf(t, r.pid)
	if err := <-answered; err != nil {
		t.Fatal("the agent of the bare QEMU:", err)
	}
	took.set = at.Sub(began)
	return took
}

// greet sets up the guest, as the engine does, and returns its agent.
func (b *bare) greet(ctx context.Context, socket string) (guest.Agent, error) {
	a, err := agent.Connector{}.Connect(ctx, func(ctx context.Context) (net.Conn, error) {
		for {
			c, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
			if !errors.Is(err, syscall.ECONNREFUSED) {
				return c, err
			}
			select { // QEMU has bound the socket, but does not listen yet
			case <-ctx.Done():
				return nil, err
			case <-time.After(time.Millisecond):
			}
		}
	})
	if err != nil {
		return nil, err
	}
	if err := a.Setup(ctx, b.setup); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return a, nil
}

// execTrips measures a command in a guest, from the call of the node API to the exit code.
func execTrips(t *testing.T, d *daemon, ready *readiness, results *table) {
	must(d.Launch(t.Context(), spec("exec")))(t)
	ready.wait(t, "exec")
	var trips samples
	for n := range execRounds + 5 {
		began := time.Now()
		code, err := d.Exec(t.Context(), "exec", guest.Exec{Command: []string{"true"}}, guest.Streams{})
		if err != nil || code != 0 {
			t.Fatalf("exec true: %d, %v", code, err)
		}
		if n >= 5 {
			trips = append(trips, time.Since(began))
		}
	}
	results.add(row{what: "exec `true` in a guest: p50 (A), p99 (B)", a: millis(trips.median()), b: millis(trips.quantile(0.99)), n: execRounds})
	if err := d.Remove(t.Context(), "exec", true); err != nil {
		t.Fatal(err)
	}
}

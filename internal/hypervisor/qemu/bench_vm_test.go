//go:build vm

package qemu

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/vm"
)

// BenchmarkLaunch compares two ways to start a machine. It measures the time until QEMU answers query-status with its CPUs
// running: with the driver's Launch, and with the plainest possible start of the same machine (paths instead of descriptors,
// QMP on stdio, no user, cgroup, namespace or sandbox).
func BenchmarkLaunch(b *testing.B) {
	a := needGuest(b)
	d := testDriver(b)
	var ours, bare []time.Duration
	for b.Loop() {
		ours = append(ours, launchTime(b, d, a.plan(b)))
		bare = append(bare, bareTime(b, a.plan(b)))
	}
	slices.Sort(ours)
	slices.Sort(bare)
	o, r := ours[len(ours)/2], bare[len(bare)/2]
	b.ReportMetric(float64(o.Microseconds())/1000, "launch-ms")
	b.ReportMetric(float64(r.Microseconds())/1000, "bare-ms")
	b.ReportMetric(float64(o)/float64(r), "ratio")
}

func launchTime(b *testing.B, d *Driver, p hypervisor.Plan) time.Duration {
	start := time.Now()
	i, err := d.Launch(b.Context(), p)
	took := time.Since(start)
	if err != nil {
		b.Fatal(err)
	}
	if err := i.Kill(b.Context()); err != nil {
		b.Fatal(err)
	}
	return took
}

func bareTime(b *testing.B, p hypervisor.Plan) time.Duration {
	d := testDriver(b)
	bin, err := d.binary()
	if err != nil {
		b.Fatal(err)
	}
	c, err := build(p, facts{binary: bin, machine: "q35", uuid: jail.UUID(p.ID), accel: vm.AccelTCG, tbSize: DefaultTBSize, spare: DefaultSparePorts, qboot: d.firmware("qboot.rom")})
	if err != nil {
		b.Fatal(err)
	}
	var args []string
	for n := 1; n < len(c.args); n++ {
		switch a := c.args[n]; {
		case a == "-sandbox" || a == "-add-fd" || a == "-mon":
			n++
		case a == "-chardev" && strings.Contains(c.args[n+1], "id=qmp"):
			args, n = append(args, "-qmp", "stdio"), n+1
		case a == "-chardev":
			id, _, _ := strings.Cut(strings.TrimPrefix(c.args[n+1], "socket,id="), ",")
			args, n = append(args, "-chardev", "null,id="+id), n+1
		case strings.HasPrefix(a, "/proc/self/fd/3"):
			args = append(args, p.Boot.Kernel)
		case strings.HasPrefix(a, "/proc/self/fd/4"):
			args = append(args, p.Boot.Initrd)
		default:
			args = append(args, a)
		}
	}
	cmd := exec.CommandContext(b.Context(), bin, args...)
	cmd.Stderr = os.Stderr
	in, _ := cmd.StdinPipe()
	out, _ := cmd.StdoutPipe()
	start := time.Now()
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	if _, err := io.WriteString(in, `{"execute":"qmp_capabilities"}{"execute":"query-status"}`+"\n"); err != nil {
		b.Fatal(err)
	}
	for sc := bufio.NewScanner(out); sc.Scan(); {
		if strings.Contains(sc.Text(), `"running": true`) {
			return time.Since(start)
		}
	}
	b.Fatal("the bare QEMU does not run")
	return 0
}

// BenchmarkGoOn measures the time until the guest's CPUs run again: with the driver's Launch from saved state (the first one,
// which loads the memory; the following ones; one that has the memory alone), with the plainest possible start of the same
// machine on a memory file in a tmpfs, and with a boot of the guest up to its first output.
func BenchmarkGoOn(b *testing.B) {
	a := needGuest(b)
	d := testDriver(b)
	p := a.plan(b)
	begin := time.Now()
	i, err := d.Launch(b.Context(), p)
	if err != nil {
		b.Fatal(err)
	}
	logged(b, i, "GUEST-READY")
	boot := time.Since(begin)
	s := saved(b)
	s.Hold = true
	got := doSave(b, i, s)
	if err := i.Kill(b.Context()); err != nil {
		b.Fatal(err)
	}
	shm, err := os.MkdirTemp("/dev/shm", "cocoon-test-")
	if err != nil {
		b.Fatal(err)
	}
	defer os.RemoveAll(shm)
	ram := filepath.Join(shm, "ram")
	run(b, "cp", "--sparse=always", s.Memory, ram)
	first := launchTime(b, d, from(b, p, s))
	var ours, alone, bare []time.Duration
	for b.Loop() {
		ours = append(ours, launchTime(b, d, from(b, p, s)))
		bare = append(bare, bareGoOn(b, from(b, p, s), ram))
		q := from(b, p, s)
		q.Incoming.Alone = true
		alone = append(alone, launchTime(b, d, q))
	}
	ms := func(name string, d time.Duration) { b.ReportMetric(float64(d.Microseconds())/1000, name+"-ms") }
	median := func(all []time.Duration) time.Duration { slices.Sort(all); return all[len(all)/2] }
	ms("boot", boot)
	ms("pause", got.Pause)
	ms("first", first)
	ms("clone", median(ours))
	ms("alone", median(alone))
	ms("bare", median(bare))
	b.ReportMetric(float64(median(ours))/float64(median(bare)), "ratio")
}

// bareGoOn starts a plan with saved state, with QMP on stdio and without any isolation of the VM.
func bareGoOn(b *testing.B, p hypervisor.Plan, ram string) time.Duration {
	d := testDriver(b)
	bin, err := d.binary()
	if err != nil {
		b.Fatal(err)
	}
	c, err := build(p, facts{binary: bin, machine: "q35", uuid: jail.UUID(p.ID), accel: vm.AccelTCG, tbSize: DefaultTBSize, spare: DefaultSparePorts, qboot: d.firmware("qboot.rom")})
	if err != nil {
		b.Fatal(err)
	}
	var args []string
	for n := 1; n < len(c.args); n++ {
		switch a := c.args[n]; {
		case a == "-sandbox" || a == "-add-fd" || a == "-mon":
			n++
		case a == "-chardev" && strings.Contains(c.args[n+1], "id=qmp"):
			args, n = append(args, "-qmp", "stdio"), n+1
		case a == "-chardev":
			id, _, _ := strings.Cut(strings.TrimPrefix(c.args[n+1], "socket,id="), ",")
			args, n = append(args, "-chardev", "null,id="+id), n+1
		case strings.HasPrefix(a, "memory-backend-file"):
			head, _, _ := strings.Cut(a, "mem-path=")
			args = append(args, head+"mem-path="+ram)
		default:
			args = append(args, a)
		}
	}
	state, err := os.Open(p.Incoming.State)
	if err != nil {
		b.Fatal(err)
	}
	defer state.Close()
	cmd := exec.CommandContext(b.Context(), bin, args...)
	cmd.Stderr, cmd.ExtraFiles = os.Stderr, []*os.File{state}
	in, _ := cmd.StdinPipe()
	out, _ := cmd.StdoutPipe()
	begin := time.Now()
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	say := func(s string) {
		if _, err := io.WriteString(in, s+"\n"); err != nil {
			b.Fatal(err)
		}
	}
	say(`{"execute":"qmp_capabilities"}{"execute":"migrate-set-capabilities","arguments":{"capabilities":[{"capability":"events","state":true}]}}` +
		`{"execute":"migrate-incoming","arguments":{"uri":"fd:3"}}`)
	for sc := bufio.NewScanner(out); sc.Scan(); {
		switch {
		case strings.Contains(sc.Text(), `"completed"`):
			say(`{"execute":"cont"}`)
		case strings.Contains(sc.Text(), `"RESUME"`):
			return time.Since(begin)
		}
	}
	b.Fatal("the bare QEMU does not go on")
	return 0
}

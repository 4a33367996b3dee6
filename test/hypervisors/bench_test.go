//go:build kvm

package hypervisors

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/cloudhypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/firecracker"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/testguest"
)

const (
	rounds = 3
	clones = 5
	ready  = "GUEST-READY"
)

// contender is one hypervisor: our driver of it, and its own command line for the same guest.
type contender struct {
	name   string
	driver hypervisor.Driver
	bare   func(t *testing.T, p hypervisor.Plan) *exec.Cmd
}

// TestNumbers measures the hypervisors side by side in one run, and prints a table. Guests have one CPU and 128 MiB.
func TestNumbers(t *testing.T) {
	if problem := jail.ReadKVM().Problem(); problem != "" {
		t.Skip("KVM is needed: " + problem)
	}
	guest := testguest.Need(t, nil)
	log := slog.New(slog.DiscardHandler)
	group := "cocoon-bench-" + strconv.Itoa(os.Getpid())
	all := []contender{
		{"QEMU q35", must(qemu.New(qemu.Config{Binary: need.QEMU(t), Cgroup: group}, log)), func(t *testing.T, p hypervisor.Plan) *exec.Cmd {
			t.Helper()
			return exec.Command(need.QEMU(t), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-machine", "q35", "-accel", "kvm", "-cpu", "host", "-bios", "qboot.rom",
				"-m", mib(p), "-kernel", p.Boot.Kernel, "-initrd", p.Boot.Initrd, "-append", arguments(p), "-serial", "stdio")
		}},
		{"QEMU microvm", nil, func(t *testing.T, p hypervisor.Plan) *exec.Cmd {
			t.Helper()
			return exec.Command(need.QEMU(t), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-machine", "microvm,acpi=off,x-option-roms=off", "-accel", "kvm", "-cpu", "host",
				"-m", mib(p), "-kernel", p.Boot.Kernel, "-initrd", p.Boot.Initrd, "-append", arguments(p), "-serial", "stdio")
		}},
		{"Cloud Hypervisor", must(cloudhypervisor.New(cloudhypervisor.Config{Binary: need.Hypervisor(t, cloudhypervisor.DefaultBinary), Cgroup: group}, log)), func(t *testing.T, p hypervisor.Plan) *exec.Cmd {
			t.Helper()
			return exec.Command(need.Hypervisor(t, cloudhypervisor.DefaultBinary), "--cpus", "boot=1", "--memory", "size="+mib(p)+"M", "--kernel", p.Boot.Kernel, "--initramfs", p.Boot.Initrd,
				"--cmdline", arguments(p), "--console", "off", "--serial", "tty")
		}},
		{"Firecracker", must(firecracker.New(firecracker.Config{Binary: need.Hypervisor(t, firecracker.DefaultBinary), Cgroup: group}, log)), func(t *testing.T, p hypervisor.Plan) *exec.Cmd {
			t.Helper()
			file := filepath.Join(t.TempDir(), "config.json")
			size, _ := strconv.Atoi(mib(p))
			text, err := json.Marshal(map[string]any{
				"boot-source":    map[string]any{"kernel_image_path": p.Boot.Kernel, "initrd_path": p.Boot.Initrd, "boot_args": arguments(p) + " reboot=k"},
				"machine-config": map[string]any{"vcpu_count": 1, "mem_size_mib": size}, "drives": []any{},
			})
			if err := errors.Join(err, os.WriteFile(file, text, 0o600)); err != nil {
				t.Fatal(err)
			}
			return exec.Command(need.Hypervisor(t, firecracker.DefaultBinary), "--no-api", "--config-file", file)
		}},
	}
	boots, bares, saves, resumes := map[string][]float64{}, map[string][]float64{}, map[string][]float64{}, map[string][]float64{}
	resident, shares, methods := map[string]float64{}, map[string]float64{}, map[string]string{}
	for round := range rounds {
		for _, c := range all {
			bares[c.name] = append(bares[c.name], bare(t, c.bare(t, guest.Plan(t))))
			if c.driver == nil {
				continue
			}
			p := guest.Plan(t)
			begin := time.Now()
			i := launch(t, c.driver, p)
			testguest.Logged(t, i, ready)
			boots[c.name] = append(boots[c.name], time.Since(begin).Seconds())
			if round < rounds-1 {
				kill(t, i)
				continue
			}
			resident[c.name] = proportional(t, i.PID())
			saver, ok := hypervisor.As[hypervisor.Snapshotter](i)
			if !ok {
				kill(t, i)
				continue
			}
			dir := t.TempDir()
			begin = time.Now()
			saved, err := saver.Save(t.Context(), hypervisor.SavePlan{State: filepath.Join(dir, "state"), Memory: filepath.Join(dir, "memory")})
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			saves[c.name], methods[c.name] = []float64{time.Since(begin).Seconds()}, saved.Method
			kill(t, i)
			var together []hypervisor.Instance
			for range clones {
				q := guest.Plan(t)
				q.Incoming = &hypervisor.Incoming{State: filepath.Join(dir, "state"), Memory: filepath.Join(dir, "memory")}
				begin := time.Now()
				clone := launch(t, c.driver, q)
				testguest.Say(t, clone, "hello")
				resumes[c.name] = append(resumes[c.name], time.Since(begin).Seconds())
				together = append(together, clone)
			}
			for _, clone := range together {
				shares[c.name] += proportional(t, clone.PID()) / clones
			}
			for _, clone := range together {
				kill(t, clone)
			}
		}
	}
	var out bytes.Buffer
	fmt.Fprintln(&out, "| | boot | its own command line | ratio | process, booted (PSS) | save | clone until its console answers | of a boot | PSS of each of 5 clones |\n|---|---|---|---|---|---|---|---|---|")
	for _, c := range all {
		own := median(bares[c.name])
		if c.driver == nil {
			fmt.Fprintf(&out, "| %s | | %.2f s | | | | | | |\n", c.name, own)
			continue
		}
		boot := median(boots[c.name])
		fmt.Fprintf(&out, "| %s | %.2f s | %.2f s | %.2f × | %.0f MiB |", c.name, boot, own, boot/own, resident[c.name])
		if len(resumes[c.name]) > 0 {
			clone := median(resumes[c.name])
			fmt.Fprintf(&out, " %.2f s, %s | %.2f s | %.2f × | %.0f MiB |\n", median(saves[c.name]), methods[c.name], clone, clone/boot, shares[c.name])
		} else {
			fmt.Fprintln(&out, " | | | |")
		}
	}
	t.Logf("medians of %d rounds in turns\n\n%s", rounds, out.String())
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func mib(p hypervisor.Plan) string { return strconv.FormatInt(p.Memory>>20, 10) }

func arguments(p hypervisor.Plan) string {
	return "console=ttyS0 quiet panic=-1 oops=panic no_timer_check noreplace-smp swiotlb=noforce cryptomgr.notests " + p.Boot.Cmdline
}

// bare runs a command until the guest is ready, and returns how long that took, in seconds.
func bare(t *testing.T, cmd *exec.Cmd) float64 {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	cmd.Stdout, cmd.Stderr = w, w
	begin := time.Now()
	err = cmd.Start()
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	var said []byte
	for buf := make([]byte, 4096); !bytes.Contains(said, []byte(ready)); {
		n, err := r.Read(buf)
		if said = append(said, buf[:n]...); err != nil {
			t.Fatalf("%s ended: %v\n%s", cmd.Path, err, said)
		}
	}
	return time.Since(begin).Seconds()
}

func launch(t *testing.T, d hypervisor.Driver, p hypervisor.Plan) hypervisor.Instance {
	t.Helper()
	i, err := d.Launch(t.Context(), p)
	if err != nil {
		t.Fatalf("%s: %v", d.Name(), err)
	}
	return i
}

func kill(t *testing.T, i hypervisor.Instance) {
	t.Helper()
	if err := errors.Join(i.Kill(t.Context()), i.Close()); err != nil {
		t.Error(err)
	}
}

// proportional is the proportional set size of a process in MiB.
func proportional(t *testing.T, pid int) float64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
			kib, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(rest), " kB"))
			if err != nil {
				t.Fatal(err)
			}
			return float64(kib) / 1024
		}
	}
	t.Fatalf("no PSS of process %d", pid)
	return 0
}

func median(all []float64) float64 {
	all = slices.Sorted(slices.Values(all))
	return all[len(all)/2]
}

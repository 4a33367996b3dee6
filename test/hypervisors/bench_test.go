//go:build kvm

package hypervisors

import (
	"bytes"
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

// contender is one hypervisor: our driver of it, and the program alone with the same guest.
type contender struct {
	name   string
	driver hypervisor.Driver // nil: we have none
	bare   program
}

// figures are what was measured of one program, or of our driver of it: seconds, and MiB of proportional set size.
type figures struct {
	boots, saves, clones, booted, alone, cloned []float64
	method                                      string
}

// sees notes what the process of a guest that has booted needs.
func (f *figures) sees(t *testing.T, pid int) {
	t.Helper()
	all, own := proportional(t, pid)
	f.booted, f.alone = append(f.booted, all), append(f.alone, own)
}

// seesClone notes what the process of a clone needs.
func (f *figures) seesClone(t *testing.T, pid int) {
	t.Helper()
	all, _ := proportional(t, pid)
	f.cloned = append(f.cloned, all)
}

// TestNumbers measures the hypervisors side by side in one run, and prints tables. Guests have one CPU and 128 MiB.
func TestNumbers(t *testing.T) {
	if problem := jail.ReadKVM().Problem(); problem != "" {
		t.Skip("KVM is needed: " + problem)
	}
	guest := testguest.Need(t, nil)
	log := slog.New(slog.DiscardHandler)
	group := "cocoon-bench-" + strconv.Itoa(os.Getpid())
	all := []contender{
		{"QEMU q35", must(qemu.New(qemu.Config{Binary: need.QEMU(t), Cgroup: group}, log)), qemuProgram("-machine", "q35", "-bios", "qboot.rom")},
		{"QEMU microvm", nil, qemuProgram("-machine", "microvm,acpi=off,x-option-roms=off")},
		{"Cloud Hypervisor", must(cloudhypervisor.New(cloudhypervisor.Config{Binary: need.Hypervisor(t, cloudhypervisor.DefaultBinary), Cgroup: group}, log)), cloudHypervisorProgram()},
		{"Firecracker", must(firecracker.New(firecracker.Config{Binary: need.Hypervisor(t, firecracker.DefaultBinary), Cgroup: group}, log)), firecrackerProgram()},
	}
	ours, bares := map[string]*figures{}, map[string]*figures{}
	for _, c := range all {
		ours[c.name], bares[c.name] = &figures{}, &figures{}
	}
	for round := range rounds {
		for _, c := range all {
			t.Logf("round %d of %d: %s", round+1, rounds, c.name)
			c.bare.measure(t, bares[c.name], guest)
			if c.driver != nil {
				measure(t, ours[c.name], c.driver, guest)
			}
		}
	}
	var out bytes.Buffer
	fmt.Fprintln(&out, "| | boot | × bare | PSS after boot | × bare | of that the program | × bare | save | clone answers | × bare | × its boot | PSS of each of 5 clones | × bare |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|")
	for _, c := range all {
		f, own := ours[c.name], bares[c.name]
		boot, clone := median(own.boots), median(own.clones)
		fmt.Fprintf(&out, "| %s, bare | %.2f s | | %.0f MiB | | %.1f MiB | | %.2f s | %.2f s | | %.2f | %.0f MiB | |\n", c.name, boot, median(own.booted), median(own.alone), median(own.saves), clone, clone/boot, median(own.cloned))
		if c.driver != nil {
			fmt.Fprintf(&out, "| %s | %.2f s | %.2f | %.0f MiB | %.2f | %.1f MiB | %.2f | %.2f s, %s | %.2f s | %.2f | %.2f | %.0f MiB | %.2f |\n", c.name, median(f.boots), median(f.boots)/boot, median(f.booted), median(f.booted)/median(own.booted), median(f.alone), median(f.alone)/median(own.alone),
				median(f.saves), f.method, median(f.clones), median(f.clones)/clone, median(f.clones)/median(f.boots), median(f.cloned), median(f.cloned)/median(own.cloned))
		}
	}
	t.Logf("medians of %d rounds in turns, of %d clones\n\n%s", rounds, clones, out.String())
}

// measure boots a guest by our driver, saves it, and resumes several from that.
func measure(t *testing.T, f *figures, d hypervisor.Driver, guest testguest.Guest) {
	t.Helper()
	began := time.Now()
	i := launch(t, d, guest.Plan(t))
	testguest.Logged(t, i, ready)
	f.boots = append(f.boots, time.Since(began).Seconds())
	f.sees(t, i.PID())
	dir := brief(t)
	defer os.RemoveAll(dir)
	saver, _ := hypervisor.As[hypervisor.Snapshotter](i)
	began = time.Now()
	saved, err := saver.Save(t.Context(), hypervisor.SavePlan{State: filepath.Join(dir, "state"), Memory: filepath.Join(dir, "memory")})
	if err != nil {
		t.Fatalf("%s: %v", d.Name(), err)
	}
	f.saves, f.method = append(f.saves, time.Since(began).Seconds()), saved.Method
	kill(t, i)
	var together []hypervisor.Instance
	for range clones {
		p := guest.Plan(t)
		p.Incoming = &hypervisor.Incoming{State: filepath.Join(dir, "state"), Memory: filepath.Join(dir, "memory")}
		began := time.Now()
		clone := launch(t, d, p)
		testguest.Say(t, clone, "hello")
		f.clones = append(f.clones, time.Since(began).Seconds())
		together = append(together, clone)
	}
	for _, clone := range together {
		f.seesClone(t, clone.PID())
	}
	for _, clone := range together {
		kill(t, clone)
	}
}

// measure is the same for the program alone.
func (c program) measure(t *testing.T, f *figures, guest testguest.Guest) {
	t.Helper()
	dir, p := brief(t), guest.Plan(t)
	defer os.RemoveAll(dir)
	sock := filepath.Join(dir, "sock")
	began := time.Now()
	r := begin(t, c.boot(t, p, sock))
	defer r.end()
	r.hears(t, ready)
	f.boots = append(f.boots, time.Since(began).Seconds())
	f.sees(t, r.cmd.Process.Pid)
	began = time.Now()
	c.save(t, sock, dir)
	f.saves = append(f.saves, time.Since(began).Seconds())
	r.end()
	var together []*running
	for n := range clones {
		sock := filepath.Join(dir, "clone"+strconv.Itoa(n))
		began := time.Now()
		clone := begin(t, c.clone(t, p, sock, dir))
		defer clone.end()
		if c.load != nil {
			c.load(t, sock, dir)
		}
		clone.say(t, "hello")
		f.clones = append(f.clones, time.Since(began).Seconds())
		together = append(together, clone)
	}
	for _, clone := range together {
		f.seesClone(t, clone.cmd.Process.Pid)
	}
}

// brief makes a folder for the memory of guests. The caller removes it soon: on a small machine, files are in memory.
func brief(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
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

// guestMapping is the least size of a mapping that is counted as memory of the guest, in KiB. The guests have 128 MiB. The programs use no mapping of this size for themselves.
const guestMapping = 16 << 10

// proportional is the proportional set size of a process in MiB: of all of it, and without its guest's memory.
func proportional(t *testing.T, pid int) (all, own float64) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", pid))
	if err != nil {
		t.Fatal(err)
	}
	size := 0
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) != 3 || f[0] != "Size:" && f[0] != "Pss:" {
			continue
		}
		kib, err := strconv.Atoi(f[1])
		if err != nil {
			t.Fatal(err)
		}
		if f[0] == "Size:" {
			size = kib
			continue
		}
		all += float64(kib) / 1024
		if size < guestMapping {
			own += float64(kib) / 1024
		}
	}
	if all == 0 {
		t.Fatalf("no PSS of process %d", pid)
	}
	return all, own
}

func median(all []float64) float64 {
	all = slices.Sorted(slices.Values(all))
	return all[len(all)/2]
}

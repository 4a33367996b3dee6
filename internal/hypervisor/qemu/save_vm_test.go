//go:build vm

package qemu

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// saved returns where a test saves to.
func saved(t testing.TB) hypervisor.SavePlan {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return hypervisor.SavePlan{State: filepath.Join(dir, "vmstate"), Memory: filepath.Join(dir, "memory-ranges")}
}

func doSave(t testing.TB, i hypervisor.Instance, p hypervisor.SavePlan) hypervisor.Saved {
	t.Helper()
	s, ok := hypervisor.As[hypervisor.Snapshotter](i)
	if !ok {
		t.Fatal("an instance cannot be saved")
	}
	got, err := s.Save(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("saved: %+v", got)
	return got
}

// from returns a plan of another VM that resumes from the saved state of p.
func from(t testing.TB, p hypervisor.Plan, s hypervisor.SavePlan) hypervisor.Plan {
	p.ID, p.Dir = vm.NewID(), deepDir(t)
	p.Boot.Kernel = "/nonexistent" // a resumed guest needs no kernel
	p.Incoming = &hypervisor.Incoming{State: s.State, Memory: s.Memory}
	return p
}

var countRE = regexp.MustCompile(`COUNT (\d+)\r?\n`)

// counts returns the numbers in console logs.
func counts(t testing.TB, logs ...string) (all []int) {
	t.Helper()
	var text string
	for _, l := range logs {
		text += l
	}
	for _, m := range countRE.FindAllStringSubmatch(text, -1) {
		n, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, n)
	}
	return all
}

func consecutive(t testing.TB, all []int) {
	t.Helper()
	for n := 1; n < len(all); n++ {
		if all[n] != all[n-1]+1 {
			t.Fatalf("the count goes %d, %d", all[n-1], all[n])
		}
	}
}

func sum(t testing.TB, path string) [32]byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return [32]byte(h.Sum(nil))
}

// TestHoldAndGoOn saves a counting guest, ends it, and resumes it in another process: no number is lost or printed twice.
func TestHoldAndGoOn(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.plan(t)
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	say(t, i, "count")
	logged(t, i, "COUNT 20\r\n")
	s := saved(t)
	s.Hold = true
	got := doSave(t, i, s)
	if got.Method != methodStopped || got.Memory <= 0 || got.Pause <= 0 {
		t.Errorf("saved: %+v", got)
	}
	if st, err := i.State(t.Context()); err != nil || st != hypervisor.Paused {
		t.Errorf("State = %q, %v", st, err)
	}
	before := consoleOf(t, i)
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	again := from(t, p, s)
	again.Incoming.Alone = true
	j := start(t, d, again)
	all := counts(t, before)
	logged(t, j, "COUNT "+strconv.Itoa(all[len(all)-1]+10)+"\r\n")
	consecutive(t, counts(t, before, consoleOf(t, j)))
}

// TestLiveSave saves a counting guest while it runs. The guest continues by itself. Two others resume from the same memory, and
// neither changes it.
func TestLiveSave(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.plan(t)
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	say(t, i, "count")
	logged(t, i, "COUNT 20\r\n")
	s := saved(t)
	taken := 0
	s.Taken = func() { taken++ }
	got := doSave(t, i, s)
	if taken != 1 || got.Pause <= 0 {
		t.Errorf("taken %d times; saved: %+v", taken, got)
	}
	host, err := d.Machine(t.Context(), vm.AccelAuto)
	if err != nil {
		t.Fatal(err)
	}
	if err := got.Machine.Resumes(host); err != nil {
		t.Error(err)
	}
	want := sum(t, s.Memory)
	one, two := start(t, d, from(t, p, s)), start(t, d, from(t, p, s))
	for _, j := range []hypervisor.Instance{one, two} {
		await(t, "the clone has counted", func() bool { return len(counts(t, consoleOf(t, j))) > 20 })
		consecutive(t, counts(t, consoleOf(t, j)))
	}
	await(t, "the source has counted", func() bool { return len(counts(t, consoleOf(t, i))) > 60 })
	consecutive(t, counts(t, consoleOf(t, i)))
	if sum(t, s.Memory) != want {
		t.Error("the saved memory has changed")
	}
}

// overlayOn creates an empty overlay in dir.
func overlayOn(t testing.TB, below vm.Disk, dir, name string) vm.Disk {
	t.Helper()
	path := filepath.Join(dir, name)
	run(t, "qemu-img", "create", "-q", "-f", "qcow2", path, "16M")
	if err := os.Chmod(path, 0o600); err != nil {
		t.Fatal(err)
	}
	return vm.Disk{Path: path, Format: vm.DiskQCOW2, Serial: below.Serial, Role: below.Role, Backing: &below}
}

// blankDisk creates a disk of 16 MiB in dir for the guest to write to.
func blankDisk(t testing.TB, dir string) vm.Disk {
	t.Helper()
	d := vm.Disk{Path: filepath.Join(dir, "base.raw"), Format: vm.DiskRaw, Serial: "cow", Role: vm.RoleCOW}
	run(t, "qemu-img", "create", "-q", "-f", "raw", d.Path, "16M")
	return d
}

// TestSaveWithDisk repeatedly saves a guest that writes a number to its disk and then prints it. A saved disk must hold the
// number that the guest is about to print or has just printed, because disk and memory are of one instant. Meanwhile the source
// keeps writing, and its clone runs on the same frozen layers.
func TestSaveWithDisk(t *testing.T) {
	a, d, dir := needGuest(t), testDriver(t), secretDir(t)
	top := blankDisk(t, dir)
	p := a.plan(t)
	p.Disks = []vm.Disk{top}
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	say(t, i, "both")
	logged(t, i, "COUNT 10\r\n")
	for round := range 3 {
		s := saved(t)
		s.Overlays = []hypervisor.DiskOverlay{{Serial: "cow", Disk: overlayOn(t, top, dir, fmt.Sprintf("over%d.qcow2", round))}}
		said := counts(t, consoleOf(t, i))
		doSave(t, i, s)
		frozen := top
		frozen.ReadOnly = true
		want := sum(t, frozen.Path)
		p2 := from(t, p, s)
		p2.Disks = []vm.Disk{overlayOn(t, frozen, dir, fmt.Sprintf("clone%d.qcow2", round))}
		j := start(t, d, p2)
		all := counts(t, line(t, j, "COUNT"))
		await(t, "the clone has counted", func() bool { all = counts(t, consoleOf(t, j)); return len(all) > 3 })
		consecutive(t, all)
		if all[0] < said[len(said)-1] {
			t.Errorf("the clone goes on at %d, the source had said %d", all[0], said[len(said)-1])
		}
		if err := j.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		// Only the frozen layers, as they were at the instant.
		out := filepath.Join(dir, "flat.raw")
		flat(t, frozen, out)
		data, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.Atoi(strings.TrimRight(string(data[:512]), "\x00\n"))
		if err != nil {
			t.Fatalf("the frozen disk holds %.20q", data)
		}
		// The first complete line of the clone may be the second that it prints.
		if n < all[0]-2 || n > all[0] {
			t.Errorf("the disk is of number %d, the memory of about %d", n, all[0])
		}
		before := len(counts(t, consoleOf(t, i)))
		await(t, "the source has counted on", func() bool { return len(counts(t, consoleOf(t, i))) > before+5 })
		if sum(t, frozen.Path) != want {
			t.Errorf("round %d: the frozen layer has changed", round)
		}
		top = s.Overlays[0].Disk
	}
	consecutive(t, counts(t, consoleOf(t, i)))
	// An overlay that was attached while the guest ran is refused, and so is an unknown serial, without harm.
	for _, o := range []hypervisor.DiskOverlay{{Serial: "cow", Disk: top}, {Serial: "none", Disk: top}} {
		s := saved(t)
		s.Overlays = []hypervisor.DiskOverlay{o}
		snapshotter, _ := hypervisor.As[hypervisor.Snapshotter](i)
		if _, err := snapshotter.Save(t.Context(), s); !errdefs.IsFailedPrecondition(err) && !errdefs.IsInvalid(err) {
			t.Errorf("overlay of %s: %v", o.Serial, err)
		}
	}
}

// flat writes the combined content of a disk's layers, without taking the locks of a running QEMU.
func flat(t testing.TB, d vm.Disk, out string) {
	t.Helper()
	var spec func(vm.Disk) string
	spec = func(d vm.Disk) string {
		s := fmt.Sprintf(`"driver":%q,"file":{"driver":"file","filename":%q}`, d.Format, d.Path)
		switch {
		case d.Backing != nil:
			s += `,"backing":{` + spec(*d.Backing) + `}`
		case d.Format == vm.DiskQCOW2:
			s += `,"backing":null`
		}
		return s
	}
	run(t, "qemu-img", "convert", "-U", "-O", "raw", "json:{"+spec(d)+"}", out)
}

// TestHoldAndLetGo makes another driver resume a held guest, as after a later failure, and saves the guest again.
func TestHoldAndLetGo(t *testing.T) {
	a, d, dir := needGuest(t), testDriver(t), secretDir(t)
	top := blankDisk(t, dir)
	p := a.plan(t)
	p.Disks = []vm.Disk{top}
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	say(t, i, "count")
	logged(t, i, "COUNT 10\r\n")
	s := saved(t)
	s.Hold, s.Overlays = true, []hypervisor.DiskOverlay{{Serial: "cow", Disk: overlayOn(t, top, dir, "over.qcow2")}}
	doSave(t, i, s)
	if err := i.Close(); err != nil {
		t.Fatal(err)
	}
	j, err := testDriver(t).Adopt(t.Context(), i.Handle())
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	snapshotter, _ := hypervisor.As[hypervisor.Snapshotter](j)
	if _, err := snapshotter.Save(t.Context(), s); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Save of a guest that is held: %v", err)
	}
	pauser, _ := hypervisor.As[hypervisor.Pauser](j)
	for range 2 {
		if err := pauser.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	before := len(counts(t, consoleOf(t, j)))
	await(t, "the guest counts on", func() bool { return len(counts(t, consoleOf(t, j))) > before+5 })
	consecutive(t, counts(t, consoleOf(t, j)))
	say(t, j, "write Hello")
	logged(t, j, "WRITTEN")
	live := saved(t)
	live.Overlays = []hypervisor.DiskOverlay{{Serial: "cow", Disk: overlayOn(t, s.Overlays[0].Disk, dir, "over2.qcow2")}}
	doSave(t, j, live)
	if err := j.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// TestDirtySave saves a guest that changes its memory endlessly, paused and running. The clone of an emulated guest that was saved running is not
// asked what it remembers: QEMU does not record all its changes, which is why we pause such guests (see save.tracked).
func TestDirtySave(t *testing.T) {
	t.Run("standing or tracked", func(t *testing.T) { dirtySave(t, testDriver(t)) })
	t.Run("running", func(t *testing.T) {
		d := testDriver(t)
		d.trustEmulator = true
		if got := dirtySave(t, d); got.Method != methodPrecopy {
			t.Errorf("saved %+v", got)
		}
	})
}

func dirtySave(t *testing.T, d *Driver) hypervisor.Saved {
	t.Helper()
	a := needGuest(t)
	p := a.plan(t)
	p.Memory = 256 << 20
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	say(t, i, "dirty")
	logged(t, i, "DIRTYING")
	say(t, i, "count")
	logged(t, i, "COUNT 10\r\n")
	s := saved(t)
	got := doSave(t, i, s)
	tracked := got.Machine.Accel == vm.AccelKVM
	if live := tracked || d.trustEmulator; live != (got.Method == methodPrecopy) {
		t.Errorf("saved %+v", got)
	}
	before := len(counts(t, consoleOf(t, i)))
	await(t, "the guest counts on", func() bool { return len(counts(t, consoleOf(t, i))) > before+5 })
	consecutive(t, counts(t, consoleOf(t, i)))
	j := start(t, d, from(t, p, s))
	if got.Method == methodPrecopy && !tracked {
		if st, err := j.State(t.Context()); err != nil || st != hypervisor.Running {
			t.Errorf("State = %q, %v", st, err)
		}
		return got
	}
	await(t, "the clone has counted", func() bool { return len(counts(t, consoleOf(t, j))) > 20 })
	consecutive(t, counts(t, consoleOf(t, j)))
	return got
}

// TestFirmwareGoesOn saves guests that are still in their firmware and resumes them, including the UEFI variables.
func TestFirmwareGoesOn(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	for firmware, says := range map[vm.Firmware]string{vm.FirmwareBIOS: "Booting from Hard Disk", vm.FirmwareUEFI: "BdsDxe"} {
		t.Run(string(firmware), func(t *testing.T) {
			dir := secretDir(t)
			disk := vm.Disk{Path: filepath.Join(dir, "disk.raw"), Format: vm.DiskRaw, Serial: "root", Role: vm.RoleCOW}
			run(t, "qemu-img", "create", "-q", "-f", "raw", disk.Path, "16M")
			p := a.plan(t)
			p.Boot, p.Disks = vm.Boot{Firmware: firmware}, []vm.Disk{disk}
			i := start(t, d, p)
			logged(t, i, says)
			s := saved(t)
			s.Overlays = []hypervisor.DiskOverlay{{Serial: "root", Disk: overlayOn(t, disk, dir, "over.qcow2")}}
			doSave(t, i, s)
			disk.ReadOnly = true
			q := from(t, p, s)
			q.Boot = p.Boot
			q.Disks = []vm.Disk{overlayOn(t, disk, dir, "clone.qcow2")}
			j := start(t, d, q)
			if st, err := j.State(t.Context()); err != nil || st != hypervisor.Running {
				t.Errorf("State = %q, %v", st, err)
			}
		})
	}
}

// TestFlatten shortens the chain of a disk while the guest writes to it, and starts another guest from the result.
func TestFlatten(t *testing.T) {
	a, d, dir := needGuest(t), testDriver(t), secretDir(t)
	base := blankDisk(t, dir)
	top := overlayOn(t, base, dir, "first.qcow2")
	p := a.plan(t)
	p.Disks = []vm.Disk{top}
	i := start(t, d, p)
	logged(t, i, "GUEST-READY")
	say(t, i, "both")
	flattener, _ := hypervisor.As[hypervisor.DiskFlattener](i)
	for round, onto := range []*vm.Disk{&base, nil} {
		for n := range 3 {
			s := saved(t)
			s.Overlays = []hypervisor.DiskOverlay{{Serial: "cow", Disk: overlayOn(t, top, dir, fmt.Sprintf("over%d-%d.qcow2", round, n))}}
			doSave(t, i, s)
			top = s.Overlays[0].Disk
		}
		if err := flattener.FlattenDisk(t.Context(), "cow", onto); err != nil {
			t.Fatal(err)
		}
		top.Backing = onto
		header := make([]byte, 20)
		f, err := os.Open(top.Path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(f, header); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		names := map[bool]int{true: len(base.Path), false: 0}[onto != nil]
		if n := binary.BigEndian.Uint32(header[16:]); int(n) != names {
			t.Errorf("the header names what it stands on in %d bytes, want %d", n, names)
		}
	}
	before := len(counts(t, consoleOf(t, i)))
	await(t, "the guest counts on", func() bool { return len(counts(t, consoleOf(t, i))) > before+5 })
	said := counts(t, consoleOf(t, i))
	consecutive(t, said)
	for name, o := range map[string]struct {
		serial string
		base   *vm.Disk
	}{"serial": {"none", nil}, "layer": {"cow", &vm.Disk{Path: base.Path + "x", Format: vm.DiskRaw}}} {
		if err := flattener.FlattenDisk(t.Context(), o.serial, o.base); !errdefs.IsInvalid(err) && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s that is not there: %v", name, err)
		}
	}
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	q := a.plan(t)
	q.Disks = []vm.Disk{top}
	j := start(t, d, q)
	logged(t, j, "GUEST-READY")
	say(t, j, "read")
	last := counts(t, consoleOf(t, i))
	if n, err := strconv.Atoi(strings.TrimSpace(line(t, j, "DISK "))); err != nil || n < last[len(last)-1] {
		t.Errorf("the disk holds %d, the guest had said %d; %v", n, last[len(last)-1], err)
	}
}

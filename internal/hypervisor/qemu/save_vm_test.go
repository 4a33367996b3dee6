//go:build vm

package qemu

import (
	"crypto/sha256"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// saved is where a test saves to.
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

// from is a plan of another VM that goes on from what p was saved as.
func from(t testing.TB, p hypervisor.Plan, s hypervisor.SavePlan) hypervisor.Plan {
	p.ID, p.Dir = vm.NewID(), deepDir(t)
	p.Boot.Kernel = "/nonexistent" // a guest that goes on needs none
	p.Incoming = &hypervisor.Incoming{State: s.State, Memory: s.Memory}
	return p
}

var countRE = regexp.MustCompile(`COUNT (\d+)\r?\n`)

// counts are the numbers in console logs.
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

func consoleOf(t testing.TB, i hypervisor.Instance) string {
	t.Helper()
	c, _ := hypervisor.As[hypervisor.ConsoleOpener](i)
	b, err := os.ReadFile(c.ConsoleLog())
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
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

// TestHoldAndGoOn saves a counting guest, ends it, and has it go on in another process: no number is lost or said twice.
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

// TestLiveSave saves a counting guest while it runs. It goes on by itself, and so do two others from the same memory,
// which neither of them changes.
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
		first := counts(t, line(t, j, "COUNT")) // may be cut
		_ = first
		await(t, "the clone has counted", func() bool { return len(counts(t, consoleOf(t, j))) > 20 })
		consecutive(t, counts(t, consoleOf(t, j)))
	}
	await(t, "the source has counted", func() bool { return len(counts(t, consoleOf(t, i))) > 60 })
	consecutive(t, counts(t, consoleOf(t, i)))
	if sum(t, s.Memory) != want {
		t.Error("the saved memory has changed")
	}
}

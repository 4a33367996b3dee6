//go:build vm

package cocoond_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestVMDamagedMemory writes 2 MiB of garbage into the memory of a hibernated VM. The VM does not wake, and nothing of
// it is removed; with the original memory it resumes.
func TestVMDamagedMemory(t *testing.T) {
	n := newNode(t)
	n.counting("sleeper")
	boot := n.sh("sleeper", "cat /proc/sys/kernel/random/boot_id")
	r, err := n.Hibernate(t.Context(), "sleeper", "night")
	if err != nil {
		t.Fatal(err)
	}
	x, err := n.GetSnapshot(t.Context(), "night")
	if err != nil {
		t.Fatalf("%+v, %v", x, err)
	}
	for _, file := range []string{snapshot.FileMemory, snapshot.FileState} {
		heal := garbage(t, filepath.Join(n.dir, "state/snapshots", x.ID, file))
		if _, err := n.Wake(t.Context(), "sleeper"); !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), file+" is damaged at byte") {
			t.Errorf("%s is damaged: woken with %v", file, err)
		} else {
			t.Log(err)
		}
		if _, err := n.Clone(t.Context(), vm.CloneSpec{Snapshot: "night", Name: "clone"}); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s is damaged: cloned with %v", file, err)
		}
		now, err := n.Inspect(t.Context(), "sleeper")
		if err != nil || now.State != vm.StateHibernated || now.Reason != vm.ReasonDataLoss || now.Snapshot != r.Snapshot {
			t.Fatalf("it is %s (%s: %s), %v", now.State, now.Reason, now.Message, err)
		}
		if _, err := n.GetSnapshot(t.Context(), "night"); err != nil {
			t.Fatalf("its snapshot: %v", err)
		}
		heal()
	}
	if _, err := n.Wake(t.Context(), "sleeper"); err != nil {
		t.Fatal(err)
	}
	n.goesOn("sleeper")
	if b := n.sh("sleeper", "cat /proc/sys/kernel/random/boot_id"); b != boot {
		t.Error("it has booted")
	}
}

// garbage overwrites 2 MiB in the middle of a file, and returns the function that restores them.
func garbage(t *testing.T, path string) (heal func()) {
	t.Helper()
	was, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	at := len(was) / 2
	end := min(len(was), at+2<<20)
	write := func(p []byte) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.WriteAt(p, int64(at)); err != nil {
			t.Fatal(err)
		}
	}
	write(bytes.Repeat([]byte("garbage!"), (end-at)/8+1)[:end-at])
	return func() { write(was[at:end]) }
}

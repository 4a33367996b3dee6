//go:build vm

package cocoond_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// A VM that is saved and hibernated repeatedly does not collect ever more layers, and each snapshot holds only the
// changed part of its memory; no data is lost.
func TestVMLayersAreMerged(t *testing.T) {
	n := newNode(t)
	n.counting("web")
	const saves = 12
	for i := range saves {
		n.sh("web", fmt.Sprintf("echo %d >/file-%d; sync", i, i))
		name, began := fmt.Sprintf("s%d", i), time.Now()
		x, err := n.SaveSnapshot(t.Context(), "web", vm.SaveSpec{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s took %s, its guest stood for %s", name, time.Since(began).Round(time.Millisecond), x.Pause)
		if i%2 == 0 {
			if err := n.RemoveSnapshot(t.Context(), name); err != nil {
				t.Fatal(err)
			}
		}
	}
	if most := deepest(n.ready("web")); most >= saves {
		t.Errorf("after %d saves a disk stands on %d layers", saves, most)
	}
	if _, err := os.Stat(filepath.Join(n.dir, "state/vms", string(n.ready("web").ID), "cow.qcow2")); err == nil {
		t.Error("the first layer is still in the VM's folder, although it was merged")
	}
	n.goesOn("web")
	all := func() {
		t.Helper()
		for i := range saves {
			if got := n.sh("web", fmt.Sprintf("cat /file-%d", i)); got != fmt.Sprint(i) {
				t.Errorf("file %d holds %q", i, got)
			}
		}
	}
	all()
	if _, err := n.Hibernate(t.Context(), "web", ""); err != nil {
		t.Fatal(err)
	}
	n.crash()
	if _, err := n.Wake(t.Context(), "web"); err != nil {
		t.Fatal(err)
	}
	n.ready("web")
	all()
	if _, err := n.Restart(t.Context(), "web", 0); err != nil { // only what is on disk, without the guest's caches
		t.Fatal(err)
	}
	n.ready("web")
	all()
	n.clonesOfDelta("s11")
	clone, err := n.Clone(t.Context(), vm.CloneSpec{Snapshot: "s11", Name: "copy", Cold: true})
	if err != nil {
		t.Fatal(err)
	}
	n.ready(clone.Spec.Name)
	if got := n.sh("copy", "cat /file-0 /file-11"); got != "0\n11" {
		t.Errorf("a clone's files hold %q", got)
	}
	for _, name := range []string{"web", "copy"} {
		if err := n.Remove(t.Context(), name, true); err != nil {
			t.Fatal(err)
		}
	}
}

// clonesOfDelta clones a snapshot whose memory builds on a removed snapshot, and the copy of it that export and import
// make.
func (n *node) clonesOfDelta(name string) {
	t := n.t
	t.Helper()
	x, err := n.GetSnapshot(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(n.dir, "state/snapshots", x.ID)
	own, base := occupied(t, filepath.Join(dir, "memory-ranges")), occupied(t, filepath.Join(dir, "memory-base"))
	t.Logf("%d KiB of %d KiB of memory were written", own>>10, base>>10)
	if own*10 > base*3 {
		t.Errorf("a snapshot has %d bytes of memory of its own beside %d of an earlier one", own, base)
	}
	var stream bytes.Buffer
	if err := n.ExportSnapshot(t.Context(), name, &stream); err != nil {
		t.Fatal(err)
	}
	moved, err := n.ImportSnapshot(t.Context(), "moved", "", &stream, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(n.dir, "state/snapshots", moved.ID, "memory-base")); err == nil {
		t.Error("what was imported is not whole")
	}
	for _, from := range []string{name, "moved"} {
		if _, err := n.Clone(t.Context(), vm.CloneSpec{Snapshot: from, Name: "of-" + from}); err != nil {
			t.Fatal(err)
		}
		n.ready("of-" + from)
		n.goesOn("of-" + from)
		if got := n.sh("of-"+from, "cat /file-11; sha256sum /bin/busybox /usr/bin/server"); !strings.HasPrefix(got, "11\n") || got[3:] != n.sh("web", "sha256sum /bin/busybox /usr/bin/server") {
			t.Errorf("a clone of %s: %q", from, got)
		}
		if err := n.Remove(t.Context(), "of-"+from, true); err != nil {
			t.Fatal(err)
		}
	}
}

func occupied(t *testing.T, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return sparse.Occupied(info)
}

// deepest is the number of files in the longest chain of r's disks.
func deepest(r vm.Record) (most int) {
	for _, d := range r.Disks {
		count := 0
		for at := &d; at != nil; at = at.Backing {
			count++
		}
		most = max(most, count)
	}
	return most
}

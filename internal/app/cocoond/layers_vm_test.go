//go:build vm

package cocoond_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/vm"
)

// A VM that is saved and put to sleep again and again does not stand on ever more layers, and loses nothing by that.
func TestVMLayersAreMerged(t *testing.T) {
	n := newNode(t)
	n.counting("web")
	const saves = 12
	for i := range saves {
		n.sh("web", fmt.Sprintf("echo %d >/file-%d; sync", i, i))
		name := fmt.Sprintf("s%d", i)
		if _, err := n.SaveSnapshot(t.Context(), "web", vm.SaveSpec{Name: name}); err != nil {
			t.Fatal(err)
		}
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
	if _, err := n.Restart(t.Context(), "web", 0); err != nil { // what is on disk, without the guest's caches
		t.Fatal(err)
	}
	n.ready("web")
	all()
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

// deepest is how many files the largest chain of r's disks has.
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

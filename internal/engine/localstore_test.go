package engine_test

import (
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/hypervisor/fake"
	"cocoonstack.io/cocoon/internal/snapshot/local"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestRealStore uses the snapshot store of a real node: the store makes the overlays, links and records.
func TestRealStore(t *testing.T) {
	host, err := fake.NewHost("")
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(r *rig) {
		r.vmm = fake.New(fake.Config{}, host)
		r.snapshots, err = local.New(local.Config{Dir: filepath.Join(r.dir, "state", "snapshots")})
		if err != nil {
			t.Fatal(err)
		}
	})
	ctx := t.Context()
	web := r.must(r.Create(ctx, spec("web")))
	if err := os.Truncate(web.Disks[0].Path, 16<<20); err != nil { // the image of the test world has an empty disk
		t.Fatal(err)
	}
	r.must(r.Start(ctx, "web"))
	remember := func(id vm.ID, text string) {
		t.Helper()
		if err := host.Remember(id, text); err != nil {
			t.Fatal(err)
		}
	}
	remembers := func(what string, id vm.ID, want string) {
		t.Helper()
		if got, _ := host.Memory(id); got != want {
			t.Errorf("%s: it remembers %q, want %q", what, got, want)
		}
	}
	// whole checks that the VM's disks exist, each with its backing files, and that no other files of the engine do.
	whole := func(what string, ref string) {
		t.Helper()
		rec, depth := r.must(r.Inspect(ctx, ref)), 0
		for _, d := range rec.Disks {
			for at := &d; at != nil; at = at.Backing {
				if _, err := os.Stat(at.Path); err != nil {
					t.Errorf("%s: %v", what, err)
				}
				depth++
			}
		}
		if depth == 0 || rec.Disks[0].ReadOnly {
			t.Errorf("%s: disks %+v", what, rec.Disks)
		}
	}
	remember(web.ID, "one")
	x := r.saved("gold")
	if x.Size == 0 || len(x.Disks) != 1 || x.Disks[0].Size != 16<<20 || x.Memory != web.Spec.Memory {
		t.Errorf("saved %+v", x)
	}
	whole("saved", "web")
	remember(web.ID, "two")
	a := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "a", Storage: 20 << 30}))
	remembers("cloned", a.ID, "one")
	whole("cloned", "a")
	if _, down := host.Memory(a.ID); !down[0] {
		t.Error("the clone has a carrier before it is itself")
	}
	if y := r.saved("second"); x.MemoryBase != "" || y.MemoryBase != x.ID {
		t.Errorf("saved twice, their memory stands on %q and %q", x.MemoryBase, y.MemoryBase)
	}
	whole("saved again", "web")

	slept := r.must(r.Hibernate(ctx, "web", ""))
	whole("hibernated", "web")
	if got := r.overlays(web.ID); len(got) != 2 { // from the two saves
		t.Errorf("hibernated it has %v", got)
	}
	r.must(r.Wake(ctx, "web"))
	remembers("woken", web.ID, "two")
	whole("woken", "web")
	if _, err := r.snapshots.Get(ctx, slept.Snapshot); err == nil {
		t.Error("its snapshot is there still")
	}
	r.must(r.Hibernate(ctx, "web", ""))
	r.must(r.Restore(ctx, "web", "gold"))
	remembers("restored", web.ID, "one")
	whole("restored", "web")
	if got := r.overlays(web.ID); len(got) != 1 {
		t.Errorf("restored it has %v", got)
	}
	r.must(r.Restore(ctx, "web", "gold")) // again, to the same snapshot
	whole("restored again", "web")

	r.must(r.Stop(ctx, "a", 0))
	if _, err := r.SaveSnapshot(ctx, "a", vm.SaveSpec{Name: "cold"}); err != nil {
		t.Fatal(err)
	}
	c := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "cold", Name: "c"}))
	remembers("booted", c.ID, "")
	whole("booted", "c")
	r.clearAll("gold", "second", "cold")
	if all, err := r.snapshots.List(ctx); err != nil || len(all) != 0 {
		t.Errorf("snapshots are left: %+v, %v", all, err)
	}
}

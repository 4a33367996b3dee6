package qemu

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestShareIDs(t *testing.T) {
	for _, c := range []struct{ base, count, uid, want uint32 }{
		{0x70000000, 0x0fffffff, 0x70000005, 0x70000000},
		{0x70000000, 0x0fffffff, 0x70012345, 0x70010000},
		{0x70000000, 0x0fffffff, 0x7ffffffe, 0x70000000}, // the last block is not whole
		{100_000, idBlock, 100_000 + idBlock - 1, 100_000},
	} {
		d := &Driver{cfg: Config{UIDBase: c.base, UIDCount: c.count}}
		if ids, err := d.shareIDs(c.uid); err != nil || ids.Base != c.want || ids.Count != idBlock || !d.ownUID(ids.Base) || !d.ownUID(ids.Base+ids.Count-1) {
			t.Errorf("%+v: %+v, %v", c, ids, err)
		}
	}
	if _, err := (&Driver{cfg: Config{UIDBase: 100_000, UIDCount: 1000}}).shareIDs(100_001); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a small range: %v", err)
	}
}

// shareOnly is a launch that has come as far as its servers.
func shareOnly(t *testing.T) *launch {
	t.Helper()
	need.Root(t)
	d := shareDriver(t)
	if _, err := d.virtiofsd(); err != nil {
		need.Missing(t, err.Error())
	}
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l := &launch{d: d, plan: hypervisor.Plan{ID: vm.NewID(), Dir: t.TempDir(), Memory: 1 << 27, CPUs: 1, Shares: []hypervisor.Share{
		{Tag: "a", Root: root, Path: root}, {Tag: "b", Root: root, Path: root + "/made", Create: true},
	}}}
	dir, err := os.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	tree, err := proc.MappedTree(dir, proc.IDs{Base: DefaultUIDBase, Count: idBlock}, proc.Tree{})
	if errdefs.Is(err, errdefs.Unsupported) {
		need.Missing(t, "a folder for temporary files on a file system that maps users, such as ext4")
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = tree.Close()
	if l.dir, err = openDir(l.plan.Dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.release)
	if l.uid, err = d.takeUID(l.plan.ID); err != nil {
		t.Fatal(err)
	}
	if err := l.makeCgroup(t.Context()); err != nil {
		t.Fatal(err)
	}
	return l
}

func serving(t *testing.T, l *launch) (n int) {
	t.Helper()
	found, err := proc.Find(func(_ int, args []string) bool { return slices.Contains(args, marker(uuidOf(l.plan.ID))) })
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range found {
		_ = p.Close()
	}
	return len(found)
}

// TestReapServers ends servers whose VM never got a process, as after a kill between the two.
func TestReapServers(t *testing.T) {
	for _, cgroup := range []bool{true, false} {
		l := shareOnly(t)
		if !cgroup { // as on a host without a usable tree
			if l.cgroup != nil {
				_ = l.cgroup.Close()
				l.cgroup = nil
			}
			if err := l.d.cgroups().remove(l.plan.ID); err != nil {
				t.Fatal(err)
			}
		}
		if err := l.share(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := serving(t, l); n < 2 {
			t.Errorf("%d servers run", n)
		}
		found, err := l.d.Seek(t.Context(), []vm.ID{l.plan.ID})
		if err != nil || len(found[l.plan.ID]) < 2 {
			t.Errorf("Seek: %v, %v", found, err)
		}
		l.shares.close()
		if err := l.d.Reap(t.Context(), l.plan.ID, l.plan.Dir); err != nil {
			t.Fatal(err)
		}
		if n := serving(t, l); n != 0 {
			t.Errorf("%d servers are left", n)
		}
		if names, _ := filepath.Glob(l.plan.Dir + "/*.sock"); len(names) > 0 {
			t.Errorf("left: %v", names)
		}
	}
}

// TestShareFails undoes what was done before the failure.
func TestShareFails(t *testing.T) {
	l := shareOnly(t)
	l.plan.Shares[1].Create = false
	err := l.share(t.Context())
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "does not exist on the node") {
		t.Errorf("%v", err)
	}
	if err := l.undo.Run(t.Context()); err != nil {
		t.Error(err)
	}
	if n := serving(t, l); n != 0 {
		t.Errorf("%d servers are left", n)
	}
	l.d.cfg.Virtiofsd = []string{"/nowhere"}
	if err := l.share(t.Context()); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "apt-get install") {
		t.Errorf("without the program: %v", err)
	}
}

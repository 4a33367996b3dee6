package qemu

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/jail"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

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
	l := &launch{d: d, Launch: jail.Launch{Jail: d.jail, Plan: hypervisor.Plan{ID: vm.NewID(), Dir: t.TempDir(), Memory: 1 << 27, CPUs: 1, Shares: []hypervisor.Share{
		{Tag: "a", Root: root, Path: root}, {Tag: "b", Root: root, Path: root + "/made", Create: true},
	}}}}
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
	if l.Dir, err = jail.OpenDir(l.Plan.Dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.release)
	if l.UID, err = d.jail.Users.Take(l.Plan.ID); err != nil {
		t.Fatal(err)
	}
	if err := l.makeCgroup(t.Context()); err != nil {
		t.Fatal(err)
	}
	return l
}

func serving(t *testing.T, l *launch) (n int) {
	t.Helper()
	found, err := proc.Find(t.Context(), nil, func(_ int, args []string) bool { return slices.Contains(args, marker(jail.UUID(l.Plan.ID))) })
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
			l.Cgroup.Close()
			l.Cgroup = jail.Cgroup{}
			if err := l.d.jail.Cgroups.Remove(l.Plan.ID, l.Plan.Dir, nil); err != nil {
				t.Fatal(err)
			}
		}
		if err := l.share(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := serving(t, l); n < 2 {
			t.Errorf("%d servers run", n)
		}
		found, err := l.d.Seek(t.Context(), []vm.ID{l.Plan.ID})
		if err != nil || len(found[l.Plan.ID]) < 2 {
			t.Errorf("Seek: %v, %v", found, err)
		}
		l.shares.close()
		if err := l.d.Reap(t.Context(), l.Plan.ID, l.Plan.Dir); err != nil {
			t.Fatal(err)
		}
		if n := serving(t, l); n != 0 {
			t.Errorf("%d servers are left", n)
		}
		if names, _ := filepath.Glob(l.Plan.Dir + "/*.sock"); len(names) > 0 {
			t.Errorf("left: %v", names)
		}
	}
}

// TestShareFails undoes what was done before the failure.
func TestShareFails(t *testing.T) {
	l := shareOnly(t)
	l.Plan.Shares[1].Create = false
	err := l.share(t.Context())
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "does not exist on the node") {
		t.Errorf("%v", err)
	}
	if err := l.Undo.Run(t.Context()); err != nil {
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

// shareDriver is a driver whose cgroups belong to this test alone.
func shareDriver(t *testing.T) *Driver {
	t.Helper()
	d, err := New(Config{Cgroup: "cocoon-share-" + strconv.Itoa(os.Getpid())}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

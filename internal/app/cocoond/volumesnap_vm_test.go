//go:build vm

package cocoond_test

import (
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/loopdev"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// xfs mounts an xfs file system for the test and returns its folder. Files share their content there.
func xfs(t *testing.T) string {
	t.Helper()
	mkfs := need.Tool(t, "mkfs.xfs")
	dev, dir := loopdev.New(t, 2<<30), t.TempDir()
	if out, err := exec.CommandContext(t.Context(), mkfs, "-q", "-m", "reflink=1", dev).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	switch err := unix.Mount(dev, dir, "xfs", 0, ""); {
	case errors.Is(err, unix.ENODEV):
		t.Skip("the kernel of this machine has no xfs")
	case err != nil:
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// TestVMSnapshotWithVolumes: the snapshot of a VM that runs has its volumes as they were at that instant, one that it was created with and
// one that was plugged in. A clone goes on with copies of its own. It never writes to its source's volumes.
func TestVMSnapshotWithVolumes(t *testing.T) {
	n := newNodeIn(t, xfs(t))
	for _, name := range []string{"fixed", "plugged"} {
		if _, err := n.CreateVolume(t.Context(), volume.Spec{Name: name, Size: 32 << 20}); err != nil {
			t.Fatal(err)
		}
	}
	_, err := n.Launch(t.Context(), vm.Spec{
		Name: "web", Image: demo, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20, NICs: []vm.NICSpec{{}},
		Volumes: []vm.Volume{{Name: "fixed", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "fixed"}}}, Mounts: []vm.Mount{{Volume: "fixed", Path: "/fixed"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	n.ready("web")
	if _, err := n.AttachVolume(t.Context(), "web", vm.VolumeUse{Ref: "plugged"}, "/plugged"); err != nil {
		t.Fatal(err)
	}
	both := func(vm, do string) string {
		t.Helper()
		return n.sh(vm, "set -e; for d in /fixed /plugged; do cd $d; "+do+"; done")
	}
	const fresh = "sync; echo 3 >/proc/sys/vm/drop_caches; "
	both("web", "echo one >synced; sync; echo one >cached") // the second is still in the guest's memory
	x, err := n.SaveSnapshot(t.Context(), "web", vm.SaveSpec{Name: "gold"})
	if err != nil {
		t.Fatal(err)
	}
	if len(x.Volumes) != 2 {
		t.Fatalf("the snapshot has the volumes %+v", x.Volumes)
	}
	both("web", "echo two >synced; echo two >cached; rm -f gone; sync")

	a, err := n.Clone(t.Context(), vm.CloneSpec{Snapshot: "gold", Name: "a"})
	if err != nil {
		t.Fatal(err)
	}
	n.ready("a")
	if got := both("a", fresh+"cat synced cached"); got != "one\none\none\none" {
		t.Errorf("the clone reads %q", got)
	}
	both("a", "echo three >synced; sync")
	if got := both("web", fresh+"cat synced cached"); got != "two\ntwo\ntwo\ntwo" {
		t.Errorf("the source reads %q", got)
	}
	cold, err := n.Clone(t.Context(), vm.CloneSpec{Snapshot: "gold", Name: "cold", Cold: true})
	if err != nil {
		t.Fatal(err)
	}
	n.ready("cold")
	if got := both("cold", "cat synced"); got != "one\none" {
		t.Errorf("the clone that booted reads %q", got)
	}
	n.crash()
	n.ready("a")
	if _, err := n.Restart(t.Context(), "a", 0); err != nil {
		t.Fatal(err)
	}
	n.ready("a")
	if got := both("a", "cat synced cached"); got != "three\none\nthree\none" {
		t.Errorf("started again, the clone reads %q", got)
	}
	for _, name := range []string{"web", "a", "cold"} {
		if got := n.sh(name, "dmesg | grep -c 'EXT4-fs error' || true"); got != "0" {
			t.Errorf("the guest %s reports %s errors of its file systems", name, got)
		}
	}
	if _, err := n.DetachVolume(t.Context(), "a", string(a.Attached[1].ID)); err != nil {
		t.Errorf("detach the copy of a plugged volume: %v", err)
	}
	if err := n.ExportSnapshotDir(t.Context(), "gold", filepath.Join(n.dir, "out")); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("export a snapshot with volumes: %v", err)
	}

	if err := n.RemoveSnapshot(t.Context(), "gold"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"web", "a", "cold"} {
		if err := n.Remove(t.Context(), name, true); err != nil {
			t.Fatal(err)
		}
	}
	left, err := n.ListVolumeSnapshots(t.Context())
	if err != nil || len(left) > 0 {
		t.Errorf("left are %+v, %v", left, err)
	}
	for _, r := range []vm.Record{a, cold} { // they are disks of their own
		for _, v := range r.Attached {
			if err := n.RemoveVolume(t.Context(), string(v.ID)); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestVMSnapshotWithVolumesOfStoppedVM: where files do not share their content, the VM with a volume is saved when it is stopped, and not while
// its guest runs, which goes on.
func TestVMSnapshotWithVolumesOfStoppedVM(t *testing.T) {
	n := newNode(t)
	if _, err := n.CreateVolume(t.Context(), volume.Spec{Name: "data", Size: 32 << 20}); err != nil {
		t.Fatal(err)
	}
	n.counting("web")
	if _, err := n.AttachVolume(t.Context(), "web", vm.VolumeUse{Ref: "data"}, "/data"); err != nil {
		t.Fatal(err)
	}
	n.sh("web", "echo one >/data/file; sync")
	switch _, err := n.SaveSnapshot(t.Context(), "web", vm.SaveSpec{Name: "gold"}); {
	case err == nil:
		t.Skip("files share their content here")
	case !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "volume data"):
		t.Errorf("save a VM that runs: %v", err)
	}
	n.goesOn("web")
	if _, err := n.Stop(t.Context(), "web", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := n.SaveSnapshot(t.Context(), "web", vm.SaveSpec{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	a, err := n.Clone(t.Context(), vm.CloneSpec{Snapshot: "gold", Name: "a"})
	if err != nil {
		t.Fatal(err)
	}
	n.ready("a")
	if got := n.sh("a", "cat /data/file"); got != "one" {
		t.Errorf("the clone reads %q", got)
	}
	if v, err := n.GetVolume(t.Context(), "data"); err != nil || v.AttachedTo(a.ID) {
		t.Errorf("the source's volume is attached to %+v, %v", v.Attachments, err)
	}
}

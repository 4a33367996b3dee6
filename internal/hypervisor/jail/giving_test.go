package jail

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// TestGiving: a hypervisor cannot be used where the files of its VMs cannot be given to its processes, and can as soon as they are elsewhere.
func TestGiving(t *testing.T) {
	need.Root(t)
	dir := filepath.Join(t.TempDir(), "state")
	g := &Giving{Folder: dir}
	if err := g.Check("Firecracker"); err != nil {
		t.Errorf("there is no folder yet: %v", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("ramfs", dir, "ramfs", 0, ""); err != nil { // which does not map users
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	if err := g.Check("Firecracker"); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "Firecracker") || !strings.Contains(err.Error(), "ext4, xfs or btrfs") {
		t.Errorf("no mapped users: %v", err)
	}
	if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if err := g.Check("Firecracker"); err != nil {
		t.Error(err)
	}
	if err := (&Giving{}).Check("QEMU"); err != nil {
		t.Error(err)
	}
}

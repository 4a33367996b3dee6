//go:build vm

package qemu

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// A guest reads and writes a file of the node that only root may open. A second VM does not get it at the same time, unless both share it. A link is no file.
func TestDiskOfNode(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(root, "disk")
	if err := os.WriteFile(path, append([]byte("from-the-node\n"), make([]byte, 1<<20)...), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path, filepath.Join(root, "link")); err != nil {
		t.Fatal(err)
	}
	disk := vm.Disk{Path: path, Root: root, Format: vm.DiskRaw, Serial: vm.HostDiskSerial(0), Role: vm.RoleHost}
	p := a.plan(t)
	p.Disks = []vm.Disk{disk}
	i := start(t, d, p)
	logged(t, i, "GUEST-READY disks: cocoon-h000 0")
	say(t, i, "read")
	logged(t, i, "DISK from-the-node")
	say(t, i, "write from-the-guest")
	logged(t, i, "WRITTEN")
	await(t, "the file has what the guest has written", func() bool {
		text, err := os.ReadFile(path)
		return err == nil && strings.HasPrefix(string(text), "from-the-guest\n")
	})

	second := a.plan(t)
	second.Disks = []vm.Disk{disk}
	if _, err := d.Launch(t.Context(), second); err == nil || !strings.Contains(err.Error(), "lock") {
		t.Errorf("a second VM: %v", err)
	}
	if left := left(t, second); len(left) > 0 {
		t.Errorf("left of it: %v", left)
	}
	if err := i.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}

	linked := a.plan(t)
	linked.Disks = []vm.Disk{disk}
	linked.Disks[0].Path = filepath.Join(root, "link")
	if _, err := d.Launch(t.Context(), linked); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a link: %v", err)
	}

	disk.Shared = true
	for range 2 {
		shared := a.plan(t)
		shared.Disks = []vm.Disk{disk}
		i := start(t, d, shared)
		logged(t, i, "GUEST-READY disks: cocoon-h000 0")
		say(t, i, "read")
		logged(t, i, "DISK from-the-guest")
	}
}

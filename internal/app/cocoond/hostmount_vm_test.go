//go:build vm

package cocoond_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/hostmount"
)

// TestVMVolumeMovesToTheHost: a volume goes from the host, which mounts it for containers, to a guest and back, whoever has made its file system,
// and also when the guest was killed. While a VM runs with it, the host does not mount it, and no VM gets
// what the host has mounted, even if the store does not know of the mount.
func TestVMVolumeMovesToTheHost(t *testing.T) {
	n := newNode(t)
	mounts, err := filepath.EvalSymlinks(n.dir)
	if err != nil {
		t.Fatal(err)
	}
	mounts = filepath.Join(mounts, "mounts")
	host, err := hostmount.New(hostmount.Config{Dir: mounts})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(mounts, 0) })
	at := filepath.Join(mounts, "data")
	disks := map[string]vm.Disk{}
	for _, name := range []string{"by-host", "by-guest"} {
		v, err := n.CreateVolume(t.Context(), volume.Spec{Name: name, Size: 64 << 20})
		if err != nil {
			t.Fatal(err)
		}
		disks[name] = vm.Disk{Path: filepath.Join(n.dir, "state/volumes/volumes", string(v.ID), "data"), Format: vm.DiskRaw}
	}
	onHost := func(name string, do func()) {
		t.Helper()
		if _, err := host.Mount(t.Context(), disks[name], at, hostmount.Options{}); err != nil {
			t.Fatal(err)
		}
		do()
		if err := host.Unmount(t.Context(), at); err != nil {
			t.Fatal(err)
		}
	}
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(at, file), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	reads := func(file, want string) {
		t.Helper()
		if got, err := os.ReadFile(filepath.Join(at, file)); err != nil || string(got) != want {
			t.Errorf("the host reads %q (%v) in %s, want %q", got, err, file, want)
		}
	}
	onHost("by-host", func() { write("host", "from the host") })
	n.counting("web")
	attach := func(name string) {
		t.Helper()
		if _, err := n.AttachVolume(t.Context(), "web", vm.VolumeUse{Ref: name}, "/data"); err != nil {
			t.Fatal(err)
		}
	}
	detach := func(name string) {
		t.Helper()
		if _, err := n.DetachVolume(t.Context(), "web", name); err != nil {
			t.Fatal(err)
		}
	}
	attach("by-host")
	if got := n.sh("web", "cat /data/host; printf 'from the guest' >/data/guest"); got != "from the host" {
		t.Errorf("the guest reads %q", got)
	}
	_, err = host.Mount(t.Context(), disks["by-host"], at, hostmount.Options{})
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "running VM") {
		t.Errorf("the host mounts what a guest has: %v", err)
	}
	detach("by-host")
	onHost("by-host", func() {
		if _, err := n.AttachVolume(t.Context(), "web", vm.VolumeUse{Ref: "by-host"}, "/data"); err == nil {
			t.Error("a guest gets what the host has mounted")
		}
		reads("guest", "from the guest")
		write("host", "again")
	})
	attach("by-guest")
	n.sh("web", "printf 'kept' >/data/guest; sync; printf 'perhaps' >/data/lost")
	r, err := n.Inspect(t.Context(), "web")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(r.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.until("the VM has ended", func() bool {
		r, err := n.Inspect(t.Context(), "web")
		return err == nil && r.State == vm.StateStopped
	})
	detach("by-guest")
	onHost("by-guest", func() {
		reads("guest", "kept")
		write("host", "from the host")
	})
	if _, err := n.Start(t.Context(), "web"); err != nil {
		t.Fatal(err)
	}
	n.ready("web")
	for name, want := range map[string]string{"by-host": "again", "by-guest": "from the host"} {
		attach(name)
		if got := n.sh("web", "cat /data/host"); got != want {
			t.Errorf("the guest reads %q in volume %s, want %q", got, name, want)
		}
		detach(name)
	}
}

//go:build vm

package cocoond_test

import (
	"errors"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/loopdev"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// TestVMDevice: a guest uses a block device of the host as a volume, which the host cannot use meanwhile, whatever becomes of cocoond.
func TestVMDevice(t *testing.T) {
	dev := loopdev.New(t, 32<<20)
	n := newNode(t, "volumeDevices: [disk="+dev+"]")
	run := func(name string) error {
		_, err := n.Launch(t.Context(), vm.Spec{
			Name: name, Image: demo, CPUs: 1, Memory: 256 << 20, Storage: 64 << 20,
			Volumes: []vm.Volume{{Name: "data", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "disk"}}}, Mounts: []vm.Mount{{Volume: "data", Path: "/data"}},
		})
		return err
	}
	host := func() error { // as a mount does
		f, err := os.OpenFile(dev, os.O_RDONLY|unix.O_EXCL, 0)
		return errors.Join(err, f.Close())
	}
	if err := run("one"); err != nil {
		t.Fatal(err)
	}
	n.ready("one")
	if got := n.sh("one", "echo kept >/data/f; sync; cat /data/f; mount | grep -o ' /data type ext4 (rw'"); got != "kept\n /data type ext4 (rw" {
		t.Errorf("the guest: %q", got)
	}
	if err := run("two"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a second VM: %v", err)
	}
	for range 2 {
		if err := host(); !errors.Is(err, unix.EBUSY) {
			t.Errorf("the host uses the device too: %v", err)
		}
		n.crash()
		n.ready("one")
	}
	n.sh("one", "echo more >>/data/f; sync")
	if err := n.RemoveVolume(t.Context(), "disk"); !errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("removed: %v", err)
	}
	if _, err := n.CreateVolume(t.Context(), volume.Spec{Name: "disk", Size: 1 << 20}); !errdefs.IsAlreadyExists(err) {
		t.Errorf("another volume of that name: %v", err)
	}
	if _, err := n.Stop(t.Context(), "one", 0); err != nil {
		t.Fatal(err)
	}
	if err := n.Remove(t.Context(), "one", true); err != nil {
		t.Fatal(err)
	}
	if err := host(); err != nil {
		t.Errorf("the host, after the VM is removed: %v", err)
	}
	if out, err := exec.CommandContext(t.Context(), need.Tool(t, "e2fsck"), "-fn", dev).CombinedOutput(); err != nil {
		t.Errorf("the file system: %v: %s", err, out)
	}
	if err := run("two"); err != nil {
		t.Fatal(err)
	}
	n.ready("two")
	if got := n.sh("two", "cat /data/f"); got != "kept\nmore" {
		t.Errorf("the next guest: %q", got)
	}
}

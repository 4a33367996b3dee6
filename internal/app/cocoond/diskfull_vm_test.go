//go:build vm

package cocoond_test

import (
	"bytes"
	"crypto/md5"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/loopdev"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// TestVMDiskFull makes a guest write more than its host has space for. The guest is paused and reports it, also to the
// next cocoond, and cannot be saved. It continues by itself when there is space, and no written data is lost. The
// host's file system is the test's own.
func TestVMDiskFull(t *testing.T) {
	const size = 160 << 20
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprint("mode=755,size=", size)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	t.Setenv("TMPDIR", dir)
	n := newNode(t)
	was := n.counting("sleeper")
	boot := n.sh("sleeper", "cat /proc/sys/kernel/random/boot_id")
	const line, written = "what the guest writes\n", 24 << 20
	want := fmt.Sprintf("%x", md5.Sum(bytes.Repeat([]byte(line), written/len(line)+1)[:written]))

	other := filepath.Join(dir, "other")
	leave(t, dir, other, 8<<20)
	n.sh("sleeper", fmt.Sprintf("(yes '%s' | head -c %d >/big; sync; echo all >/done) >/dev/null 2>&1 &", strings.TrimSpace(line), written))
	n.until("it stands", func() bool { return n.reason() == vm.ReasonDiskFull })
	if _, err := n.Hibernate(t.Context(), "sleeper", ""); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("hibernate: %v", err)
	} else {
		t.Log(err)
	}
	// The space that most file systems reserve for root is enough for cocoond, but not enough to let the guest
	// continue.
	if st, err := os.Stat(other); err != nil || os.Truncate(other, st.Size()-1<<20) != nil {
		t.Fatal(err)
	}
	n.crash()
	n.until("the next cocoond knows", func() bool { return n.reason() == vm.ReasonDiskFull })
	if r, err := n.Inspect(t.Context(), "sleeper"); err != nil || r.PID != was.PID || r.State != vm.StateRunning {
		t.Errorf("it is %s with process %d, it was %d; %v", r.State, r.PID, was.PID, err)
	}
	if err := os.Remove(other); err != nil {
		t.Fatal(err)
	}
	n.until("it goes on", func() bool { return n.reason() == "" })
	n.goesOn("sleeper")
	n.until("all is written", func() bool { return n.sh("sleeper", "cat /done 2>/dev/null || true") == "all" })
	got := n.sh("sleeper", "sync; echo 3 >/proc/sys/vm/drop_caches; md5sum </big")
	if !strings.HasPrefix(got, want) {
		t.Errorf("the guest reads %s, want %s", got, want)
	}
	if b := n.sh("sleeper", "cat /proc/sys/kernel/random/boot_id"); b != boot {
		t.Error("it has booted")
	}
}

// TestVMVolumeFull fills the file system of a volume, which is an ext4 of its own, while a guest writes there. The guest is paused, and
// the reason names the folder of the volume and no other. When there is room, it goes on by itself; what it wrote is on the volume, whose
// file system is sound.
func TestVMVolumeFull(t *testing.T) {
	fsck, mkfs := need.Tool(t, "e2fsck"), need.Tool(t, "mkfs.ext4")
	dir := t.TempDir()
	store := filepath.Join(dir, "state/volumes")
	if err := os.MkdirAll(store, 0o711); err != nil {
		t.Fatal(err)
	}
	dev := loopdev.New(t, 64<<20)
	if out, err := exec.CommandContext(t.Context(), mkfs, "-q", "-m", "0", dev).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := unix.Mount(dev, store, "ext4", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(store, 0); err != nil {
			t.Error(err)
		}
	})
	n := newNodeIn(t, dir)
	data, err := n.CreateVolume(t.Context(), volume.Spec{Name: "data", Size: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	n.counting("sleeper")
	if _, err := n.AttachVolume(t.Context(), "sleeper", vm.VolumeUse{Ref: "data"}, "/data"); err != nil {
		t.Fatal(err)
	}
	const line, written = "what the guest writes\n", 24 << 20
	want := fmt.Sprintf("%x", md5.Sum(bytes.Repeat([]byte(line), written/len(line)+1)[:written]))
	n.sh("sleeper", "echo before >/data/before; sync")

	other := filepath.Join(store, "other")
	leave(t, store, other, 6<<20)
	n.sh("sleeper", fmt.Sprintf("(yes '%s' | head -c %d >/data/big; sync; echo all >/done) >/dev/null 2>&1 &", strings.TrimSpace(line), written))
	n.until("it stands", func() bool { return n.reason() == vm.ReasonDiskFull })
	r, err := n.Inspect(t.Context(), "sleeper")
	if err != nil || !strings.Contains(r.Message, filepath.Join(store, "volumes", string(data.ID))) || strings.Contains(r.Message, "state/vms") {
		t.Errorf("it is %s: %s; %v", r.Reason, r.Message, err)
	}
	if err := os.Remove(other); err != nil {
		t.Fatal(err)
	}
	n.until("it goes on", func() bool { return n.reason() == "" })
	n.goesOn("sleeper")
	n.until("all is written", func() bool { return n.sh("sleeper", "cat /done 2>/dev/null || true") == "all" })
	const sum = "echo 3 >/proc/sys/vm/drop_caches; cat /data/before; md5sum </data/big"
	if got := n.sh("sleeper", sum); !strings.HasPrefix(got, "before\n"+want) {
		t.Errorf("the guest reads %s, want %s", got, want)
	}
	if faults := n.sh("sleeper", "dmesg | grep -c 'EXT4-fs error\\|I/O error' || true"); faults != "0" {
		t.Errorf("the guest had %s errors", faults)
	}

	if _, err := n.Stop(t.Context(), "sleeper", 2*time.Minute); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), fsck, "-f", "-n", filepath.Join(store, "volumes", string(data.ID), "data")).CombinedOutput(); err != nil {
		t.Errorf("the file system of the volume: %v\n%s", err, out)
	}
	if _, err := n.Start(t.Context(), "sleeper"); err != nil {
		t.Fatal(err)
	}
	n.ready("sleeper")
	if got := n.sh("sleeper", sum); !strings.HasPrefix(got, "before\n"+want) {
		t.Errorf("started again, the guest reads %s, want %s", got, want)
	}
}

// reason is the reason of the VM called sleeper.
func (n *node) reason() string {
	r, err := n.Inspect(n.t.Context(), "sleeper")
	if err != nil {
		return "?"
	}
	return r.Reason
}

// leave fills the file system of dir with the file path, and leaves room bytes free.
func leave(t *testing.T, dir, path string, room int64) {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(st.Bavail)*st.Bsize-room); err != nil {
		t.Fatal(err)
	}
}

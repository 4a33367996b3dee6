//go:build vm

package cocoond_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// TestVMClonesGrow gives clones larger disks than their snapshots have. Clones that resume and clones that boot see the
// whole size, the data on the disk is intact, and the file system is sound. 20 GiB need more blocks of group
// descriptors than the file system was made with, whose 64 MiB are one group.
func TestVMClonesGrow(t *testing.T) {
	n := newNode(t)
	n.counting("source")
	const sum = "echo 3 >/proc/sys/vm/drop_caches; sha256sum </data"
	data := n.sh("source", "dd if=/dev/urandom of=/data bs=1M count=8 2>/dev/null; sync; "+sum)
	boot := n.sh("source", "cat /proc/sys/kernel/random/boot_id")
	if _, err := n.SaveSnapshot(t.Context(), "source", vm.SaveSpec{Name: "source"}); err != nil {
		t.Fatal(err)
	}
	size := func(ref string) int64 {
		t.Helper()
		kib, err := strconv.ParseInt(n.sh(ref, "df -k / | tail -1 | awk '{print $2}'"), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return kib << 10
	}
	own := size("source")
	for _, c := range []struct {
		name    string
		storage int64
		cold    bool
	}{
		{"same", 0, false},
		{"live", 20 << 30, false},
		{"cold", 20 << 30, true},
	} {
		if _, err := n.Clone(t.Context(), vm.CloneSpec{Snapshot: "source", Name: c.name, Storage: c.storage, Cold: c.cold}); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		n.ready(c.name)
		t.Logf("%s is ready after %s", c.name, time.Since(began))
		has := size(c.name)
		if c.storage == 0 && has != own || c.storage > 0 && (has < c.storage/100*97 || has > c.storage) {
			t.Errorf("%s has %d bytes of the %d asked for, its source %d", c.name, has, c.storage, own)
		}
		if same := n.sh(c.name, "cat /proc/sys/kernel/random/boot_id") == boot; same == c.cold {
			t.Errorf("%s has the boot id of the source: %v", c.name, same)
		}
		if got := n.sh(c.name, sum); got != data {
			t.Errorf("%s reads %s, its source wrote %s", c.name, got, data)
		}
		if c.name == "live" { // more than the source's disk could hold, and it is there without the caches
			n.sh(c.name, "dd if=/dev/urandom of=/more bs=1M count=70 2>/dev/null && sync && sha256sum </more >/sum && "+sum+" >/dev/null && [ \"$(sha256sum </more)\" = \"$(cat /sum)\" ]")
		}
		if got := n.sh(c.name, sum); got != data {
			t.Errorf("%s, having written more, reads %s, its source wrote %s", c.name, got, data)
		}
	}
	for _, name := range []string{"live", "cold"} {
		if _, err := n.Stop(t.Context(), name, 0); err != nil {
			t.Fatal(err)
		}
		n.sound(name)
	}
	if _, err := n.Start(t.Context(), "live"); err != nil {
		t.Fatal(err)
	}
	n.ready("live")
	if got := n.sh("live", sum); got != data || size("live") < 19<<30 {
		t.Errorf("started anew it reads %s of %s, on %d bytes", got, data, size("live"))
	}
}

// sound checks the file system on the writable disk of a stopped VM, if the tools are installed.
func (n *node) sound(ref string) {
	n.t.Helper()
	const fsck = "/usr/sbin/e2fsck"
	if exec.Command(fsck, "-V").Run() != nil || exec.Command("qemu-img", "--version").Run() != nil {
		n.t.Log("e2fsck and qemu-img would check the file systems")
		return
	}
	r, err := n.Inspect(n.t.Context(), ref)
	if err != nil {
		n.t.Fatal(err)
	}
	raw := filepath.Join(n.t.TempDir(), "raw")
	for _, d := range r.Disks {
		if d.Role != vm.RoleCOW {
			continue
		}
		if out, err := exec.Command("qemu-img", "convert", "-U", "-O", "raw", d.Path, raw).CombinedOutput(); err != nil {
			n.t.Fatalf("%v: %s", err, out)
		}
	}
	defer os.Remove(raw)
	// The journal of a guest that was not shut down is replayed first; then nothing may be wrong.
	_ = exec.Command(fsck, "-p", "-E", "journal_only", raw).Run()
	if out, err := exec.Command(fsck, "-f", "-n", raw).CombinedOutput(); err != nil {
		n.t.Errorf("the file system of %s: %v\n%s", ref, err, strings.TrimSpace(string(out)))
	}
}

//go:build vm

package cocoond_test

import (
	"strconv"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// TestVMAttachVolume: a volume is plugged into a guest that runs, filled, grown while the guest runs and while it sleeps, and taken
// away, also after cocoond was killed. The next guest reads it.
func TestVMAttachVolume(t *testing.T) { attachesVolume(t, newNode(t)) }

func attachesVolume(t *testing.T, n *node) {
	t.Helper()
	if _, err := n.CreateVolume(t.Context(), volume.Spec{Name: "data", Size: 32 << 20}); err != nil {
		t.Fatal(err)
	}
	n.counting("web")
	n.counting("other")
	attach := func(name string) {
		t.Helper()
		if _, err := n.AttachVolume(t.Context(), name, vm.VolumeUse{Ref: "data"}, "/data"); err != nil {
			t.Fatal(err)
		}
	}
	detach := func(name string) {
		t.Helper()
		if _, err := n.DetachVolume(t.Context(), name, "data"); err != nil {
			t.Fatal(err)
		}
		if got := n.sh(name, "mount | grep -c /data || true; ls -A /data; cat /sys/block/sd*/size 2>/dev/null || true"); got != "0" {
			t.Errorf("detached, %s shows %q", name, got)
		}
		v, err := n.GetVolume(t.Context(), "data")
		if err != nil || len(v.Attachments) > 0 {
			t.Errorf("detached: %+v, %v", v.Attachments, err)
		}
	}
	mib := func(name string) int {
		t.Helper()
		n, err := strconv.Atoi(n.sh(name, "df -m /data | tail -1 | awk '{print $2}'"))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	grow := func(size int64, waiting int) {
		t.Helper()
		if v, err := n.ResizeVolume(t.Context(), "data", size<<20); err != nil || len(v.Waiting) != waiting {
			t.Fatalf("resize: %+v, %v", v, err)
		}
	}
	attach("web")
	n.sh("web", "echo kept >/data/file")
	if _, err := n.AttachVolume(t.Context(), "other", vm.VolumeUse{Ref: "data"}, "/data"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("attach what another VM has: %v", err)
	}
	grow(64, 0)
	if got := mib("web"); got < 50 {
		t.Errorf("grown while it runs, it has %d MiB", got)
	}
	n.sh("web", "(cd /data && exec sleep 1000) >/dev/null 2>&1 </dev/null & echo $! >/pid")
	if _, err := n.DetachVolume(t.Context(), "web", "data"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "in use") {
		t.Errorf("detach what a program uses: %v", err)
	}
	n.sh("web", "cat /data/file; kill $(cat /pid)")
	n.crash()
	n.ready("web")
	if _, err := n.Hibernate(t.Context(), "web", ""); err != nil {
		t.Fatal(err)
	}
	grow(96, 1)
	if _, err := n.Wake(t.Context(), "web"); err != nil {
		t.Fatal(err)
	}
	n.ready("web")
	if got := mib("web"); got < 80 {
		t.Errorf("grown while it slept, it has %d MiB", got)
	}
	n.goesOn("web")
	n.until("the program has ended", func() bool { return n.sh("web", "kill -0 $(cat /pid) 2>/dev/null && echo on || true") == "" })
	detach("web")

	attach("other")
	if got := n.sh("other", "cat /data/file; echo more >/data/more; sync"); got != "kept" {
		t.Errorf("the next guest reads %q", got)
	}
	if _, err := n.Restart(t.Context(), "other", 0); err != nil {
		t.Fatal(err)
	}
	n.ready("other")
	if got := n.sh("other", "cat /data/file /data/more"); got != "kept\nmore" {
		t.Errorf("restarted, it reads %q", got)
	}
	detach("other")
	if _, err := n.Stop(t.Context(), "web", 0); err != nil {
		t.Fatal(err)
	}
	attach("web")
	if _, err := n.Start(t.Context(), "web"); err != nil {
		t.Fatal(err)
	}
	n.ready("web")
	if got := n.sh("web", "cat /data/file /data/more"); got != "kept\nmore" {
		t.Errorf("attached while it was stopped, it reads %q", got)
	}
	detach("web")

	// A crash while the volume is attached or detached leaves it with its VM, or with nobody.
	for i := range 4 {
		done, client := make(chan error, 1), n.Client
		go func() {
			var err error
			if i%2 == 0 {
				_, err = client.AttachVolume(t.Context(), "web", vm.VolumeUse{Ref: "data"}, "/data")
			} else {
				_, err = client.DetachVolume(t.Context(), "web", "data")
			}
			done <- err
		}()
		n.until("the operation has begun", func() bool {
			v, err := n.GetVolume(t.Context(), "data")
			return err == nil && (i%2 == 1 || len(v.Attachments) > 0)
		})
		n.crash()
		t.Logf("round %d: %v", i, <-done)
		n.ready("web")
		var has bool
		n.until("the VM, its guest and the store agree", func() bool {
			r, err := n.Inspect(t.Context(), "web")
			if err != nil {
				t.Fatal(err)
			}
			v, err := n.GetVolume(t.Context(), "data")
			if err != nil {
				t.Fatal(err)
			}
			has = len(r.Attached) == 1
			return has == v.AttachedTo(r.ID) && has == (n.sh("web", "mount | grep -c ' /data ' || true") == "1")
		})
		if !has {
			attach("web")
		}
		if got := n.sh("web", "cat /data/file /data/more"); got != "kept\nmore" {
			t.Errorf("round %d: it reads %q", i, got)
		}
	}
	detach("web")
}

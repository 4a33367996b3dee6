//go:build vm

package guestagent_test

import (
	"os"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// TestVMLimitedVolumes: a volume on disk takes as much as its limit, whatever others do. What is in it outlives containers and boots.
func TestVMLimitedVolumes(t *testing.T) {
	disks := busyboxDisks(t)
	if err := os.Truncate(disks["cocoon-cow"], 256*mebibyte); err != nil { // the guest grows its file system
		t.Fatal(err)
	}
	group := int64(2000)
	s := guest.Setup{Hostname: "web-0", Restart: vm.RestartAlways, Volumes: []vm.Volume{
		{Name: "small", Kind: vm.VolumeEmpty, SizeLimit: mebibyte},
		{Name: "large", Kind: vm.VolumeEmpty, SizeLimit: 32 * mebibyte, Group: &group},
		{Name: "free", Kind: vm.VolumeEmpty},
		{Name: "huge", Kind: vm.VolumeEmpty, SizeLimit: 1 << 40},
	}}
	script := `if test -f /large/f; then cat /large/f; exec sleep 1000; fi; echo kept > /large/f; exit 1`
	one := containerOf("one", vm.ContainerApp, script, vm.Mount{Volume: "large", Path: "/large"}, vm.Mount{Volume: "small", Path: "/small"})
	two := containerOf("two", vm.ContainerApp, "exec sleep 1000",
		vm.Mount{Volume: "large", Path: "/l", ReadOnly: true}, vm.Mount{Volume: "large", Path: "/part", SubPath: "a/b"}, vm.Mount{Volume: "free", Path: "/free"}, vm.Mount{Volume: "huge", Path: "/huge"})
	s.Containers = []guest.Container{one, two}
	q := bootGuest(t, disks)
	a := q.connect(t)
	for range 2 { // a host that reconnects repeats the whole request
		if err := a.Setup(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	logOf(t, a.(guest.ContainerKeeper), "one", "kept\n") // by the second run of the container
	asRoot(t, a, "two", "echo part > /part/p")
	script = `dd if=/dev/zero of=/small/f bs=64k count=16 2>/dev/null && echo fits; dd if=/dev/zero of=/small/g bs=64k count=8 2>&1 | grep -o 'No space left on device'
		dd if=/dev/zero of=/large/g bs=1M count=31 2>/dev/null && echo fits; dd if=/dev/zero of=/large/h bs=1M count=3 2>&1 | grep -o 'No space left on device'
		ls -ld /large | grep -o '^d[a-z-]* .* 2000'; ls -A /small; echo still > /large/f; cat /large/f`
	if got := asRoot(t, a, "one", script); got != "fits\nNo space left on device\nfits\nNo space left on device\ndrwxrwsrwx    3 root     2000\nf\ng\nstill\n" {
		t.Errorf("the limited volumes: %q", got)
	}
	if n, err := a.(guest.Freezer).Freeze(t.Context()); err != nil || n != 3 {
		t.Errorf("%d file systems are frozen, %v", n, err)
	}
	if _, err := a.(guest.Freezer).Thaw(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The whole disk gets full: only those without a limit notice.
	script = `cat /l/f; echo hi > /free/f; for f in /free/big /huge/big; do dd if=/dev/zero of=$f bs=1M count=300 2>&1 | grep -o 'No space left on device'; done; cat /free/f`
	if got := asRoot(t, a, "two", script); got != "still\nNo space left on device\nNo space left on device\nhi\n" {
		t.Errorf("the full disk: %q", got)
	}
	if got := asRoot(t, a, "one", "busybox rm /large/g /large/h; dd if=/dev/zero of=/large/g bs=1M count=31 2>/dev/null && busybox sync && echo fits; cat /large/a/b/p"); got != "fits\npart\n" {
		t.Errorf("a limited volume on a full disk: %q", got)
	}
	asRoot(t, a, "two", "busybox rm /free/big /huge/big")
	if err := a.Poweroff(t.Context(), time.Second); err != nil {
		t.Fatal(err)
	}
	q.waitEnd(t)
	a.Close()

	q = bootGuest(t, disks)
	a = q.connect(t)
	defer a.Close()
	s.Containers[0].Run, s.Containers[1].Run = 2, 2
	if err := a.Setup(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	logOf(t, a.(guest.ContainerKeeper), "one", "still\n")
	script = `cat /large/a/b/p; busybox wc -c < /large/g; busybox rm /small/g; dd if=/dev/zero of=/small/h bs=64k count=8 2>&1 | grep -o 'No space left on device'`
	if got := asRoot(t, a, "one", script); got != "part\n32505856\nNo space left on device\n" {
		t.Errorf("after a boot: %q", got)
	}
}

//go:build vm

package cocoond_test

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// up waits until the system of a demo disk has come up for the n-th time.
func (n *node) up(ref string, times int) {
	n.t.Helper()
	n.until(ref+" is up", func() bool {
		var all bytes.Buffer
		err := n.Logs(n.t.Context(), ref, guest.LogOptions{Serial: true, Tail: -1}, func(e guest.LogEntry) error {
			all.Write(e.Data)
			return nil
		})
		return err == nil && strings.Count(all.String(), " is up, ") >= times
	})
}

// typed types a line into the console of a VM whose shell runs, and returns what that writes.
func (n *node) typed(ref, line string) string {
	n.t.Helper()
	var c io.ReadWriteCloser
	n.until("the console of "+ref+" is free", func() bool { // the one before may not be closed yet
		var err error
		if c, err = n.Console(n.t.Context(), ref); err != nil && !errdefs.Is(err, errdefs.Conflict) {
			n.t.Fatal(err)
		}
		return err == nil
	})
	defer c.Close()
	shown := make(chan []byte)
	go func() { // ends with the console
		defer close(shown)
		for {
			buf := make([]byte, 4<<10)
			k, err := c.Read(buf)
			if err != nil {
				return
			}
			select {
			case shown <- buf[:k]:
			case <-n.t.Context().Done():
				return
			}
		}
	}()
	var all bytes.Buffer
	const begin, end = "begin-42", "end-42" // the shell computes them, so what is typed does not hold them
	var last time.Time
	n.until("the shell of "+ref+" answers", func() bool {
		if time.Since(last) > 10*time.Second { // a shell that has just begun may lose what it reads
			if _, err := io.WriteString(c, "\necho begin-$((6*7)); "+line+"; echo end-$((6*7))\n"); err != nil {
				n.t.Fatal(err)
			}
			last = time.Now()
		}
		select {
		case b, ok := <-shown:
			if !ok {
				n.t.Fatalf("the console of %s has ended: %q", ref, all.String())
			}
			all.Write(b)
		default:
		}
		return strings.Contains(all.String(), end)
	})
	text, _, _ := strings.Cut(all.String(), end)
	text = text[max(0, strings.LastIndex(text, begin)):]
	return strings.TrimSpace(strings.ReplaceAll(strings.TrimPrefix(text, begin), "\r", ""))
}

// TestVMBootFromVolume: a guest boots from a volume, and finds there what it wrote, also when it has slept and as another VM. It finds its disks
// where they were.
func TestVMBootFromVolume(t *testing.T) {
	n := newNode(t)
	system, err := os.Open(need.Built(t, "bin/guest/disk.img", "make guest"))
	if err != nil {
		t.Fatal(err)
	}
	defer system.Close()
	if _, err := n.ImportVolume(t.Context(), volume.Spec{Name: "system", Size: 64 << 20}, system); err != nil {
		t.Fatal(err)
	}
	if _, err := n.ImportVolume(t.Context(), volume.Spec{Name: "data", Size: 1 << 20}, strings.NewReader("of the data\n")); err != nil {
		t.Fatal(err)
	}
	launch := func(name string) {
		t.Helper()
		_, err := n.Launch(t.Context(), vm.Spec{
			Name: name, Image: vm.FromVolume("root"), CPUs: 1, Memory: 256 << 20, NICs: []vm.NICSpec{{}},
			Volumes: []vm.Volume{
				{Name: "data", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "data"}},
				{Name: "root", Kind: vm.VolumeDisk, Disk: &vm.VolumeUse{Ref: "system"}},
			},
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	const look = "for d in vda vdb; do blockdev --getsize64 /dev/$d; done; cat /proc/partitions | grep -c vd[a-z]$; head -n 1 /dev/vdb; dd if=/dev/vda bs=1M skip=63 count=1 2>/dev/null | head -n 1"
	has := func(what, last string) {
		t.Helper()
		if got, want := n.typed("pet", look), "67108864\n1048576\n3\nof the data\n"+last; got != want {
			t.Errorf("%s:\n got %q\nwant %q", what, got, want)
		}
	}
	write := func(text string) {
		t.Helper()
		n.typed("pet", "echo "+text+" | dd of=/dev/vda bs=1M seek=63 conv=fsync 2>/dev/null; echo 3 >/proc/sys/vm/drop_caches")
	}
	launch("pet")
	n.up("pet", 1)
	write("one")
	has("booted", "one")
	if _, err := n.Hibernate(t.Context(), "pet", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Wake(t.Context(), "pet"); err != nil {
		t.Fatal(err)
	}
	n.typed("pet", "echo 3 >/proc/sys/vm/drop_caches")
	has("awake", "one")
	write("two")
	n.crash()
	has("adopted", "two")
	if _, err := n.Restart(t.Context(), "pet", 0); err != nil {
		t.Fatal(err)
	}
	n.up("pet", 2)
	has("restarted", "two")
	if err := n.Remove(t.Context(), "pet", true); err != nil {
		t.Fatal(err)
	}
	launch("pet")
	n.up("pet", 1)
	has("as another VM", "two")
}

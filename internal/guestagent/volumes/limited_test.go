package volumes

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// fillUp writes to a file until that fails, and returns how many bytes were written.
func fillUp(t *testing.T, file string, most int) (n int) {
	t.Helper()
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for block := make([]byte, 64<<10); n < most; {
		k, err := f.Write(block)
		n += k
		if errors.Is(err, unix.ENOSPC) {
			return n
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// TestLimits: volumes on disk hold as much as their limits, and hardly more.
func TestLimits(t *testing.T) {
	dir := alone(t)
	if dir == "" {
		return
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		need.Missing(t, "loop devices")
	}
	k := newKeeper(filepath.Join(dir, "stage"), filepath.Join(dir, "disk"), Machine{HasDisk: true, Loop: func() error { return nil }})
	room, group := filepath.Join(dir, "room"), int64(2000)
	if err := os.Mkdir(room, 0o755); err != nil {
		t.Fatal(err)
	}
	empty := func(name string, limit int64) vm.Volume {
		return vm.Volume{Name: name, Kind: vm.VolumeEmpty, SizeLimit: limit}
	}
	volumes := []vm.Volume{empty("small", 1<<20), empty("large", 40<<20), empty("free", 0), empty("huge", 1<<62), empty("more", largestLimit)}
	volumes[1].Group = &group
	var mounts []vm.Mount
	for _, v := range volumes {
		mounts = append(mounts, vm.Mount{Volume: v.Name, Path: "/" + v.Name})
	}
	for range 2 { // a host that reconnects repeats the whole request
		if _, err := k.Mount(context.Background(), volumes, nil, map[string][]vm.Mount{room: mounts}); err != nil {
			t.Fatal(err)
		}
	}
	for name, limit := range map[string]int{"small": 1 << 20, "large": 40 << 20} {
		if n := fillUp(t, filepath.Join(room, name, "f"), 2*limit); n < limit || n > limit+limit/100+256<<10 {
			t.Errorf("volume %s with a limit of %d bytes takes %d", name, limit, n)
		}
		if n := fillUp(t, filepath.Join(room, name, "g"), 1<<20); n > 64<<10 {
			t.Errorf("the full volume %s takes %d bytes more", name, n)
		}
		entries, err := os.ReadDir(filepath.Join(room, name))
		if err != nil || len(entries) != 2 {
			t.Errorf("volume %s shows %v, %v", name, entries, err)
		}
		if err := os.Remove(filepath.Join(room, name, "f")); err != nil {
			t.Fatal(err)
		}
		if n := fillUp(t, filepath.Join(room, name, "f"), limit/2); n < limit/2 {
			t.Errorf("the emptied volume %s takes %d bytes", name, n)
		}
	}
	if st, err := os.Stat(filepath.Join(room, "large")); err != nil || st.Mode() != os.ModeDir|os.ModeSetgid|0o777 {
		t.Errorf("the folder is %v, %v", st, err)
	}
	for _, name := range []string{"free", "huge", "more"} {
		if n := fillUp(t, filepath.Join(room, name, "f"), 50<<20); n < 50<<20 {
			t.Errorf("volume %s, which only the disk limits, takes %d bytes", name, n)
		}
	}
	if n := len(k.Disks()); n != 2 {
		t.Errorf("%d file systems would be frozen", n)
	}
	if text, err := k.ReadFile("small", "g", 1<<20); err != nil || len(text) > 64<<10 {
		t.Errorf("a file of the volume: %d bytes, %v", len(text), err)
	}
}

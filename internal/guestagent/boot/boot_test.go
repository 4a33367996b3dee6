package boot

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

func image(offset int, magic string) []byte {
	b := make([]byte, probeSize)
	copy(b[offset:], magic)
	return b
}

func TestFileSystem(t *testing.T) {
	for name, c := range map[string]struct {
		head []byte
		want string
	}{
		"ext4":      {image(1024+56, "\x53\xef"), "ext4"},
		"erofs":     {image(1024, "\xe2\xe1\xf5\xe0"), "erofs"},
		"squashfs":  {image(0, "hsqs"), "squashfs"},
		"xfs":       {image(0, "XFSB"), ""},
		"zeros":     {make([]byte, probeSize), ""},
		"nothing":   {nil, ""},
		"truncated": {image(1024, "\xe2\xe1\xf5\xe0")[:1026], ""},
	} {
		dev := filepath.Join(t.TempDir(), "disk")
		if err := os.WriteFile(dev, c.head, 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := fileSystem(dev); got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

func TestFindDisks(t *testing.T) {
	dir := t.TempDir()
	for name, serial := range map[string]string{"vda": "cocoon-l000\n", "vdb": "cocoon-cow", "loop0": ""} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name, "serial"), []byte(serial), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "sda", "device"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "sda", "device", "vpd_pg80"), []byte("\x00\x80\x00\x0bcocoon-i007"), 0o644); err != nil {
		t.Fatal(err)
	}
	disks, err := findDisks(dir, dir+"/cmdline")
	if err != nil || len(disks) != 3 || disks["cocoon-i007"] != "/dev/sda" || disks["cocoon-l000"] != "/dev/vda" || disks[serialCOW] != "/dev/vdb" {
		t.Errorf("%v, %v", disks, err)
	}
	// A machine whose virtio disks have no serials tells them.
	if err := os.WriteFile(filepath.Join(dir, "cmdline"), []byte("quiet cocoon.disks=data,,cocoon-l000 panic=-1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	disks, err = findDisks(dir, dir+"/cmdline")
	if err != nil || len(disks) != 2 || disks["data"] != "/dev/vda" || disks["cocoon-i007"] != "/dev/sda" {
		t.Errorf("%v, %v", disks, err)
	}
	if disks, err := findDisks(dir+"/none", dir+"/cmdline"); err != nil || len(disks) != 0 {
		t.Errorf("a machine without disks: %v, %v", disks, err)
	}
}

// TestAppeared: a disk of which only sysfs knows is not there yet.
func TestAppeared(t *testing.T) {
	need.Root(t)
	early := filepath.Join(t.TempDir(), "early")
	const local = 240 // a major number that no driver has
	if err := unix.Mknod(early, unix.S_IFBLK|0o600, int(unix.Mkdev(local, 1))); err != nil {
		t.Fatal(err)
	}
	for dev, want := range map[string]bool{"": false, early: false, early + "er": false, "/dev/null": true} {
		if got := appeared(dev); got != want {
			t.Errorf("%q: %v", dev, got)
		}
	}
}

func TestFindLayers(t *testing.T) {
	for name, c := range map[string]struct {
		disks map[string]string
		want  []string
		fails bool
	}{
		"none":    {map[string]string{"cocoon-cow": "/dev/vda", "other": "/dev/vdb"}, nil, false},
		"three":   {map[string]string{"cocoon-l001": "b", "cocoon-l000": "a", "cocoon-cow": "x", "cocoon-l002": "c"}, []string{"a", "b", "c"}, false},
		"missing": {map[string]string{"cocoon-l000": "a", "cocoon-l002": "c"}, nil, true},
		"odd":     {map[string]string{"cocoon-l000": "a", "cocoon-lx": "c"}, nil, true},
	} {
		got, err := findLayers(c.disks)
		if !slices.Equal(got, c.want) || (err != nil) != c.fails {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

func TestModulesAreLoadedOnceAndInOrder(t *testing.T) {
	dir := t.TempDir()
	dep := "virtio virtio_ring\nvirtio_ring\nvirtio_blk virtio_ring virtio\nvirtio_net virtio_ring virtio failover\n"
	if err := os.WriteFile(filepath.Join(dir, "modules.dep"), []byte(dep), 0o644); err != nil {
		t.Fatal(err)
	}
	m, err := openModules(dir)
	if err != nil {
		t.Fatal(err)
	}
	got := m.files([]string{"virtio_blk", "built_in", "virtio_net", "virtio_blk"})
	if want := []string{"virtio_ring", "virtio", "virtio_blk", "failover", "virtio_net"}; !slices.Equal(got, want) {
		t.Errorf("order %v", got)
	}
	if m, err := openModules(dir + "/none"); err != nil || m.load("virtio_blk") != nil {
		t.Errorf("a kernel without modules: %v", err)
	}
}

func TestFolderReplacesWhatIsNoFolder(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("/etc", dir+"/link"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"link", "file", "new"} {
		if err := folder(filepath.Join(dir, name), 0o1777); err != nil {
			t.Fatal(err)
		}
		if st, err := os.Lstat(filepath.Join(dir, name)); err != nil || !st.IsDir() || st.Mode()&os.ModeSticky == 0 {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
}

func TestPowerButtonEvents(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	event := func(kind, code, value byte) []byte {
		b := make([]byte, eventSize)
		b[16], b[18], b[20] = kind, code, value
		return b
	}
	for _, e := range [][]byte{event(evKey, keyPower, 1), event(evKey, keyPower, 0), event(0, 0, 0), event(evKey, 30, 1), event(evKey, keyPower, 1), {1, 2}} {
		if _, err := w.Write(e); err != nil {
			t.Fatal(err)
		}
	}
	w.Close()
	presses := 0
	readEvents(r, func() { presses++ })
	if presses != 2 {
		t.Errorf("%d presses", presses)
	}
}

// Few guests mount folders of NFS servers, so the modules for it are compressed, and only opened if the host says that they are needed.
func TestModulesOfNFS(t *testing.T) {
	dir := t.TempDir()
	for args, want := range map[string][]string{
		"quiet cocoon.nfs tsc=reliable\n": nfs, "cocoon.nfs=0 quiet\n": nil, "quiet\n": nil,
	} {
		if err := os.WriteFile(filepath.Join(dir, "cmdline"), []byte(args), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := wantedNFS(filepath.Join(dir, "cmdline")); !slices.Equal(got, want) {
			t.Errorf("%q: %v", args, got)
		}
	}
	for name, text := range map[string]string{"modules.dep": "nfsv4 sunrpc\nsunrpc\n", "sunrpc.ko": "plain", "nfsv4.ko.gz": "compressed"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	m, err := openModules(dir)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"sunrpc": "sunrpc.ko", "nfsv4": "nfsv4.ko.gz"} {
		f, err := m.open(name)
		if err != nil {
			t.Fatal(err)
		}
		if got := filepath.Base(f.Name()); got != want {
			t.Errorf("%s is %s", name, got)
		}
		f.Close()
	}
	if _, err := m.prepare("nfsv4"); err != nil {
		t.Error(err)
	}
}

package volumes

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

// alone runs the test again in a mount namespace of its own. In that run, it returns a folder, which outlives its mounts.
func alone(t *testing.T) (dir string) {
	t.Helper()
	need.Root(t)
	const word = "COCOON_TEST_ALONE"
	if dir := os.Getenv(word); dir != "" {
		return dir
	}
	cmd := exec.CommandContext(t.Context(), need.Tool(t, "unshare"), "--mount", "--propagation", "private", os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), word+"="+t.TempDir())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	return ""
}

// A keeper whose stage is gone still reads volumes and makes more mounts of them. No link leads out of a volume.
func TestVolumesAfterTheStage(t *testing.T) {
	dir := alone(t)
	if dir == "" {
		return
	}
	k := newKeeper(filepath.Join(dir, "stage"), filepath.Join(dir, "disk"), Machine{})
	image, room, late := filepath.Join(dir, "image"), filepath.Join(dir, "room"), filepath.Join(dir, "late")
	for _, d := range []string{image + "/etc", room, late} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(image+"/etc/os", "image")
	write(filepath.Join(dir, "secret"), "secret")
	ctx := context.Background()
	conf := vm.Volume{Name: "conf", Kind: vm.VolumeFiles, Files: []vm.VolumeFile{{Path: "key", Data: []byte("one"), Mode: 0o644}}}
	if err := k.Put(ctx, conf); err != nil {
		t.Fatal(err)
	}
	volumes := []vm.Volume{conf, {Name: "disk", Kind: vm.VolumeEmpty}, {Name: "mem", Kind: vm.VolumeEmpty, Memory: true}, {Name: "files", Kind: vm.VolumeImage, Image: "demo"}}
	mounts := []vm.Mount{
		{Volume: "conf", Path: "/conf"},
		{Volume: "disk", Path: "/disk"},
		{Volume: "mem", Path: "/mem"},
		{Volume: "files", Path: "/files"},
		{Volume: "files", Path: "/part", SubPath: "etc/os"},
		{Volume: "files", Path: "/none", SubPath: "none"},
	}
	for range 2 { // a host that reconnects repeats the whole request
		lacks, err := k.Mount(ctx, volumes, map[string]string{"files": image}, map[string][]vm.Mount{room: mounts})
		if err != nil || len(lacks) != 1 || !errdefs.IsNotFound(lacks[room]) {
			t.Fatalf("%v, %v", lacks, err)
		}
	}
	if _, err := os.Lstat(filepath.Join(dir, "stage")); !os.IsNotExist(err) {
		t.Errorf("the stage: %v", err)
	}
	if err := k.MountLater(ctx, late, mounts[:5]); err != nil {
		t.Fatal(err)
	}
	write(late+"/disk/f", "disk")
	write(late+"/mem/f", "mem")
	for path, want := range map[string]string{
		room + "/disk/f": "disk", room + "/mem/f": "mem", late + "/conf/key": "one", late + "/files/etc/os": "image", late + "/part": "image", room + "/part": "image",
	} {
		if text, err := os.ReadFile(path); string(text) != want {
			t.Errorf("%s: %q, %v", path, text, err)
		}
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(late+"/files", &fs); err != nil {
		t.Fatal(err)
	}
	if want := int64(unix.ST_RDONLY | unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC); fs.Flags&want != want {
		t.Errorf("the files of the image are mounted with %#x", fs.Flags)
	}
	for _, path := range []string{late + "/files/x", late + "/conf/x"} {
		if err := os.WriteFile(path, nil, 0o600); err == nil {
			t.Errorf("%s can be written", path)
		}
	}
	conf.Files[0].Data = []byte("two")
	if err := k.Put(ctx, conf); err != nil {
		t.Fatal(err)
	}
	for _, in := range []string{room, late} {
		if text, err := os.ReadFile(in + "/conf/key"); string(text) != "two" {
			t.Errorf("after a change in %s: %q, %v", in, text, err)
		}
	}
	if err := k.MountLater(ctx, late, []vm.Mount{{Volume: "none", Path: "/x"}}); !errdefs.IsInvalid(err) {
		t.Errorf("a volume that is not there: %v", err)
	}
	readsInside(t, k, dir, late)
}

// readsInside tries ReadFile with what programs may have left in volumes.
func readsInside(t *testing.T, k *Keeper, dir, late string) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Mkdir(late+"/disk/d", 0o755))
	for name, to := range map[string]string{
		"link": "f", "inside": "/f", "self": "self", "up": "../../secret", "absolute": filepath.Join(dir, "secret"), "env": "/proc/self/environ", "loop": "d/../link",
	} {
		must(os.Symlink(to, late+"/disk/"+name))
	}
	must(unix.Mkfifo(late+"/disk/pipe", 0o644))
	must(unix.Mknod(late+"/disk/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(os.WriteFile(late+"/disk/large", make([]byte, 101), 0o644))
	must(os.WriteFile(late+"/disk/most", make([]byte, 100), 0o644))
	for _, tc := range []struct{ volume, path, want, fails string }{
		{"disk", "f", "disk", ""},
		{"mem", "f", "mem", ""},
		{"disk", "link", "disk", ""},
		{"disk", "loop", "disk", ""},
		{"disk", "inside", "disk", ""}, // / is the volume
		{"disk", "most", strings.Repeat("\x00", 100), ""},
		{"disk", "none", "", "not found"},
		{"disk", "f/x", "", "not found"},
		{"disk", "up", "", "not found"},
		{"disk", "absolute", "", "not found"},
		{"disk", "env", "", "not found"},
		{"disk", "../../secret", "", "not found"},
		{"conf", "key", "", "not found"},
		{"files", "etc/os", "", "not found"},
		{"none", "f", "", "not found"},
		{"disk", "self", "", "failed"},
		{"disk", "pipe", "", "failed"},
		{"disk", "null", "", "failed"},
		{"disk", "d", "", "failed"},
		{"disk", "large", "", "failed"},
	} {
		text, err := k.ReadFile(tc.volume, tc.path, 100)
		fails := ""
		switch {
		case errdefs.IsNotFound(err):
			fails = "not found"
		case errdefs.IsFailedPrecondition(err):
			fails = "failed"
		case err != nil:
			t.Errorf("%s in %s: %v", tc.path, tc.volume, err)
		}
		if string(text) != tc.want || fails != tc.fails {
			t.Errorf("%s in %s: %q, %v, want %q %s", tc.path, tc.volume, text, err, tc.want, tc.fails)
		}
	}
}

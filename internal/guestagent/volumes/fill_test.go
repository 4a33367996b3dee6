package volumes

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"cocoonstack.io/cocoon/internal/vm"
)

func file(path, data string) vm.VolumeFile {
	return vm.VolumeFile{Path: path, Data: []byte(data), Mode: 0o644}
}

func openDir(t testing.TB) (*os.Root, string) {
	t.Helper()
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root, dir
}

// content reads the files as programs see them: names that do not begin with "..", links followed.
func content(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "..") {
			continue
		}
		if e.Type() != fs.ModeSymlink {
			t.Errorf("%s is no symbolic link", e.Name())
		}
		top, err := filepath.EvalSymlinks(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		err = filepath.WalkDir(top, func(p string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			data, err := os.ReadFile(p)
			out[e.Name()+strings.TrimPrefix(p, top)] = string(data)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func TestFillReplacesEverythingAtOnce(t *testing.T) {
	root, dir := openDir(t)
	for _, step := range [][]vm.VolumeFile{
		{file("a", "1"), file("b/c/d", "2"), file("b/e", "3")},
		{file("a", "one"), file("b/c/d", "2"), file("new", "")},
		{file("b", "a file now")},
		nil,
		{file("a", "back")},
	} {
		if err := fill(root, step, nil); err != nil {
			t.Fatal(err)
		}
		want := map[string]string{}
		for _, f := range step {
			want[f.Path] = string(f.Data)
		}
		if got := content(t, dir); !maps.Equal(got, want) {
			t.Errorf("holds %q, want %q", got, want)
		}
		data, err := os.Readlink(filepath.Join(dir, "..data"))
		if err != nil || !strings.HasPrefix(data, "..2") {
			t.Errorf("..data leads to %q, %v", data, err)
		}
		entries, _ := os.ReadDir(dir)
		var hidden []string
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), "..") {
				hidden = append(hidden, e.Name())
			}
		}
		if slices.Sort(hidden); !slices.Equal(hidden, []string{data, "..data"}) {
			t.Errorf("left beside the content: %q", hidden)
		}
	}
}

func TestFillCutOffIsMended(t *testing.T) {
	root, dir := openDir(t)
	if err := fill(root, []vm.VolumeFile{file("a", "1")}, nil); err != nil {
		t.Fatal(err)
	}
	for _, left := range []string{"..2020_01_01_00_00_00.dead", "..2020_01_01_00_00_00.beef/sub"} {
		if err := os.MkdirAll(filepath.Join(dir, left), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("..2020_01_01_00_00_00.dead", filepath.Join(dir, "..data_tmp")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("..data/gone", filepath.Join(dir, "gone")); err != nil {
		t.Fatal(err)
	}
	if err := fill(root, []vm.VolumeFile{file("a", "2")}, nil); err != nil {
		t.Fatal(err)
	}
	entries, _ := os.ReadDir(dir)
	if got := content(t, dir); len(entries) != 3 || got["a"] != "2" {
		t.Errorf("holds %v, %q", entries, got)
	}
}

func TestFillFailureLeavesTheOld(t *testing.T) {
	root, dir := openDir(t)
	if err := fill(root, []vm.VolumeFile{file("a", "1")}, nil); err != nil {
		t.Fatal(err)
	}
	// fill does not check these paths: a file that is also a folder.
	if err := fill(root, []vm.VolumeFile{file("a", "2"), file("a/b", "3")}, nil); err == nil {
		t.Fatal("a file became a folder")
	}
	entries, _ := os.ReadDir(dir)
	if got := content(t, dir); got["a"] != "1" || len(entries) != 3 {
		t.Errorf("holds %v, %q", entries, got)
	}
}

func TestFillModesAndOwners(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	root, dir := openDir(t)
	gid, uid := int64(os.Getegid()), int64(os.Geteuid())
	group := &gid
	if os.Geteuid() == 0 {
		gid, uid = 2000, 1000
	}
	files := []vm.VolumeFile{{Path: "token", Mode: 0o600, UID: &uid}, {Path: "d/script", Mode: 0o755}}
	for _, c := range []struct {
		group                *int64
		token, script, where fs.FileMode
	}{
		{nil, 0o600, 0o755, 0o755 | fs.ModeDir},
		{group, 0o640, 0o755, 0o755 | fs.ModeDir | fs.ModeSetgid},
	} {
		if err := fill(root, files, c.group); err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]fs.FileMode{"token": c.token, "d/script": c.script, "d": c.where} {
			st, err := os.Stat(filepath.Join(dir, name))
			if err != nil || st.Mode() != want {
				t.Errorf("%s has mode %v, want %v (%v)", name, st.Mode(), want, err)
			}
			sys := st.Sys().(*syscall.Stat_t)
			if name == "token" && int64(sys.Uid) != uid {
				t.Errorf("%s belongs to user %d, want %d", name, sys.Uid, uid)
			}
			if c.group != nil && int64(sys.Gid) != gid {
				t.Errorf("%s belongs to group %d, want %d", name, sys.Gid, gid)
			}
		}
	}
}

// TestReadersNeverSeeHalf reads while the content changes: two files always have the same version.
func TestReadersNeverSeeHalf(t *testing.T) {
	root, dir := openDir(t)
	if err := fill(root, []vm.VolumeFile{file("a", "0"), file("b", "0")}, nil); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		for i := range 200 {
			v := strings.Repeat("x", i)
			if err := fill(root, []vm.VolumeFile{file("a", v), file("b", v)}, nil); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for {
		version, err := os.OpenRoot(filepath.Join(dir, "..data")) // one resolution of the link
		if err == nil {
			a, errA := version.ReadFile("a")
			b, errB := version.ReadFile("b")
			if errA == nil && errB == nil && string(a) != string(b) {
				t.Fatalf("a is %q, b is %q", a, b)
			}
			version.Close()
		}
		// A reader whose folder is removed while it follows the link must follow it again, as with the kubelet's
		// volumes.
		_, missing := os.Stat(filepath.Join(dir, "a"))
		for try := 0; missing != nil && try < 20; try++ {
			_, missing = os.Stat(filepath.Join(dir, "a"))
		}
		if missing != nil {
			t.Fatalf("a is missing: %v", missing)
		}
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			return
		default:
		}
	}
}

// FuzzFill: accepted files stay in their folder and are readable at their path.
func FuzzFill(f *testing.F) {
	f.Add("a", "b/c")
	f.Add("../x", "/etc/passwd")
	f.Add("..data", "..data/a")
	f.Add("a", "a/b")
	f.Add("a/..", "a\x00")
	f.Add(strings.Repeat("d/", 300)+"f", strings.Repeat("n", 300))
	f.Fuzz(func(t *testing.T, one, two string) {
		files := []vm.VolumeFile{file(one, "1"), file(two, "2")}
		if vm.ValidateFiles("v", files) != nil {
			return
		}
		parent := t.TempDir()
		dir := filepath.Join(parent, "v")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		if err := fill(root, files, nil); err != nil {
			return // the whole path may be too long for the file system
		}
		for _, want := range files {
			if got, err := os.ReadFile(filepath.Join(dir, want.Path)); err != nil || string(got) != string(want.Data) {
				t.Errorf("%q holds %q, %v", want.Path, got, err)
			}
		}
		if entries, _ := os.ReadDir(parent); len(entries) != 1 {
			t.Errorf("it left its folder: %v", entries)
		}
	})
}

package hostdir

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestParse(t *testing.T) {
	list, err := Parse([]string{"/srv/data", "/mnt/ro:ro", "prod=/srv/prod", "prod=/srv/data:ro"})
	want := "[{ /srv/data false} { /mnt/ro true} {prod /srv/prod false} {prod /srv/data true}]"
	if err != nil || fmt.Sprint(list) != want {
		t.Errorf("%v, %v; want %s", list, err, want)
	}
	for _, bad := range []string{"", "srv", "prod", "=/srv", "prod=srv", "/srv/", "/srv/../etc", "/srv//a", "/a/./b", "prod=/a/..", "/a\x00b", "/" + strings.Repeat("x", 4096)} {
		if list, err := Parse([]string{bad}); !errdefs.IsInvalid(err) {
			t.Errorf("%q: %v, %v", bad, list, err)
		}
	}
	if _, err := Parse([]string{"/srv", "prod=/srv", "/srv:ro"}); !errdefs.IsInvalid(err) {
		t.Errorf("twice: %v", err)
	}
}

func TestFind(t *testing.T) {
	list, err := Parse([]string{"/srv/data", "/srv/data/fixed:ro", "/mnt/ro:ro", "prod=/srv/prod", "prod=/srv/data/fixed"})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		namespace, path string
		write           bool
		want            string // the entry's path, or the error's class
	}{
		{"test", "/srv/data", true, "/srv/data"},
		{"test", "/srv/data/a/b", true, "/srv/data"},
		{"test", "/srv/database", true, "failed precondition"},
		{"test", "/srv", false, "failed precondition"},
		{"test", "/", false, "failed precondition"},
		{"test", "/etc", false, "failed precondition"},
		{"test", "/srv/data/../../etc", false, "invalid argument"},
		{"test", "/srv/data/", false, "invalid argument"},
		{"test", "srv/data", false, "invalid argument"},
		{"test", "", false, "invalid argument"},
		{"test", "/srv/data/fixed/a", false, "/srv/data/fixed"},
		{"test", "/srv/data/fixed/a", true, "failed precondition"},
		{"prod", "/srv/data/fixed/a", true, "/srv/data/fixed"},
		{"test", "/mnt/ro", false, "/mnt/ro"},
		{"test", "/mnt/ro", true, "failed precondition"},
		{"prod", "/srv/prod/x", true, "/srv/prod"},
		{"test", "/srv/prod/x", false, "failed precondition"},
		{"", "/srv/prod/x", true, "/srv/prod"},
		{"", "/etc", false, "failed precondition"},
	} {
		got, err := list.Find(c.namespace, c.path, c.write)
		result := got.Path
		if err != nil {
			result = errdefs.ClassOf(err).String()
			if strings.Contains(err.Error(), "/srv/prod") && !strings.HasPrefix(c.path, "/srv/prod") {
				t.Errorf("%+v: %v tells of another namespace's folder", c, err)
			}
		}
		if result != c.want {
			t.Errorf("%+v: %s (%v)", c, result, err)
		}
	}
	if _, err := List(nil).Find("", "/srv", false); !errdefs.Is(err, errdefs.FailedPrecondition) || !strings.Contains(err.Error(), Setting) {
		t.Errorf("without entries: %v", err)
	}
}

func TestCheckPaths(t *testing.T) {
	dir := realDir(t)
	must(t, os.Mkdir(filepath.Join(dir, "real"), 0o755), os.Symlink("real", filepath.Join(dir, "link")), os.WriteFile(filepath.Join(dir, "file"), nil, 0o644))
	for name, fine := range map[string]bool{"real": true, "missing": true, "link": false, "link/below": false, "file": false, "state": false, "state/vms": false} {
		err := (List{{Path: filepath.Join(dir, name)}}).CheckPaths(filepath.Join(dir, "state"))
		if (err == nil) != fine || err != nil && !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := (List{{Path: "/"}}).CheckPaths(filepath.Join(dir, "state")); !errdefs.IsInvalid(err) {
		t.Errorf("the parent of the state folder: %v", err)
	}
}

func TestOpen(t *testing.T) {
	dir := realDir(t)
	secret := filepath.Join(dir, "secret")
	root := filepath.Join(dir, "root")
	must(t, os.MkdirAll(secret+"/in", 0o755), os.MkdirAll(root+"/a/b", 0o755), os.WriteFile(root+"/file", nil, 0o644),
		os.Symlink(secret, root+"/abs"), os.Symlink("../secret", root+"/rel"), os.Symlink("a", root+"/inside"), os.Symlink("/proc/self/cwd", root+"/magic"),
		os.Symlink("nowhere", root+"/dangling"), unix.Mkfifo(root+"/pipe", 0o600))
	for _, c := range []struct {
		path   string
		create bool
		want   string
	}{
		{"", false, ""},
		{"/a/b", false, ""},
		{"/a/b", true, ""},
		{"/a/c", false, "does not exist"},
		{"/a/c/d", true, ""},
		{"/abs", false, "symbolic link"},
		{"/abs/in", false, "symbolic link"},
		{"/abs/new", true, "symbolic link"},
		{"/rel/in", false, "symbolic link"},
		{"/inside/b", false, "symbolic link"},
		{"/magic", false, "symbolic link"},
		{"/dangling", true, "symbolic link"},
		{"/file", false, "not a folder"},
		{"/file", true, "not a folder"},
		{"/file/x", true, "not a folder"},
		{"/pipe", false, "not a folder"},
		{"/../secret", false, "absolute path"},
		{"2", false, "not below"},
	} {
		dir, err := Open(root, root+c.path, c.create, false)
		if err == nil {
			if at, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", dir.Fd())); at != root+c.path {
				t.Errorf("%s: leads to %s", c.path, at)
			}
			dir.Close()
		}
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if st, err := os.Stat(root + "/a/c/d"); err != nil || st.Mode().Perm() != 0o755 {
		t.Errorf("made folder: %v, %v", st, err)
	}
	if left, _ := os.ReadDir(secret); len(left) != 1 {
		t.Errorf("made outside: %v", left)
	}
	if _, err := Open(dir+"/gone", dir+"/gone/x", true, false); !errdefs.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("an allowed folder that does not exist: %v", err)
	}
}

func TestOpenFile(t *testing.T) {
	dir := realDir(t)
	root, secret := dir+"/root", dir+"/secret"
	must(t, os.MkdirAll(root+"/a", 0o755), os.WriteFile(secret, []byte("s"), 0o600), os.WriteFile(root+"/a/file", nil, 0o600),
		os.Symlink(secret, root+"/abs"), os.Symlink("../secret", root+"/rel"), os.Symlink("nothing", root+"/dangling"), os.Symlink("a", root+"/inside"), unix.Mkfifo(root+"/pipe", 0o600))
	for _, c := range []struct {
		path   string
		create bool
		want   string
	}{
		{"/a/file", false, ""},
		{"/a/file", true, ""},
		{"/a/new", false, "does not exist"},
		{"/a/new", true, ""},
		{"/b/new", true, "does not exist"},
		{"/a", false, "is not a file"},
		{"/pipe", false, "is not a file"},
		{"/abs", false, "symbolic link"},
		{"/rel", true, "symbolic link"},
		{"/dangling", true, "symbolic link"},
		{"/inside/file", false, "symbolic link"},
		{"/../secret", false, "absolute path"},
		{"", false, "not below"},
		{"2/x", true, "not below"},
	} {
		f, err := Open(root, root+c.path, c.create, true)
		if err == nil {
			if at, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd())); at != root+c.path {
				t.Errorf("%s: leads to %s", c.path, at)
			}
			f.Close()
		}
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if st, err := os.Stat(root + "/a/new"); err != nil || st.Mode() != 0o644 {
		t.Errorf("made file: %v, %v", st.Mode(), err)
	}
	if _, err := os.Lstat(root + "/nothing"); err == nil {
		t.Error("made through a link")
	}
}

// TestOpenWhileSwapped replaces a folder by a link to a secret one again and again, as a guest could. What was opened is never secret.
func TestOpenWhileSwapped(t *testing.T) {
	dir := realDir(t)
	root := dir + "/root"
	must(t, os.MkdirAll(dir+"/secret/sub", 0o755), os.MkdirAll(root+"/x/sub", 0o755), os.Symlink(dir+"/secret", root+"/y"))
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-done:
				return
			default:
				_ = unix.Renameat2(unix.AT_FDCWD, root+"/x", unix.AT_FDCWD, root+"/y", unix.RENAME_EXCHANGE)
			}
		}
	}()
	var right, refused int
	for i := 0; i < 100_000 && (i < 3000 || right == 0 || refused == 0); i++ {
		got, err := Open(root, root+"/x/sub", false, false)
		if err != nil {
			refused++
			continue
		}
		right++
		at, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", got.Fd()))
		got.Close()
		if !strings.HasPrefix(at, root+"/") {
			t.Fatalf("it leads to %s", at)
		}
	}
	close(done)
	<-ended
	if right == 0 || refused == 0 {
		t.Errorf("%d opened and %d refused: the folder was never swapped", right, refused)
	}
}

func realDir(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	return dir
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

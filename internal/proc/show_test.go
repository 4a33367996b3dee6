package proc

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// TestShow shows files of root to a process, one after the other, at a place that is empty without them.
func TestShow(t *testing.T) {
	need.Root(t)
	in, say, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	heard, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer heard.Close()
	_, _ = in.Fd(), out.Fd() // makes them blocking, as a shell needs them
	user := User{UID: rootUser, GID: rootUser}
	p, err := Start(Spec{
		Path: "/bin/sh", In: in, Out: out, Isolated: true, User: &user, Root: &Root{Places: []string{"/save/one"}, Devices: []string{"/dev/null"}},
		Args: []string{"sh", "-c", `while read -r go; do read -r x </save/one; { echo "written $go" >/save/one; } 2>/dev/null || :; echo "$go: $x"; done`},
	})
	_ = out.Close()
	if errdefs.Is(err, errdefs.Unsupported) {
		need.Missing(t, "a folder for temporary files on a file system that maps users, such as ext4")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(p.Kill(context.Background()), p.Close()) })
	ask := func(word, want string) {
		t.Helper()
		if _, err := say.WriteString(word + "\n"); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 100)
		if n, err := heard.Read(buf); err != nil || strings.TrimSpace(string(buf[:n])) != strings.TrimSpace(word+": "+want) {
			t.Errorf("it answers %q, %v; want %q", buf[:n], err, want)
		}
	}
	ask("before", "")
	if err := p.Hide("/save/one"); err != nil {
		t.Errorf("hide nothing: %v", err)
	}
	var all []string
	for range 2 {
		path := secretFile(t, 0)
		all = append(all, path)
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		err = p.Show(RootFile{At: "/save/one", File: f}, user)
		if errdefs.Is(err, errdefs.Unsupported) {
			need.Missing(t, "a folder for temporary files on a file system that maps users, such as ext4")
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Show(RootFile{At: "/save/one", File: f}, user); err != nil { // what is below it is gone with it
			t.Fatal(err)
		}
		ask("shown", "content")
		if text, err := os.ReadFile(path); err != nil || string(text) != "written shown\n" {
			t.Errorf("the file has %q, %v", text, err)
		}
		if err := p.Hide("/save/one"); err != nil {
			t.Fatal(err)
		}
		ask("hidden", "")
	}
	for _, path := range all {
		if text, err := os.ReadFile(path); err != nil || string(text) != "written shown\n" {
			t.Errorf("a hidden file has %q, %v", text, err)
		}
	}
	folder, err := os.Open(filepath.Dir(all[0]))
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	if err := p.Show(RootFile{At: "/save/../one", File: folder}, user); !errdefs.IsInvalid(err) {
		t.Errorf("an unclean path: %v", err)
	}
	if err := p.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Show(RootFile{At: "/save/one", File: folder}, user); !errdefs.IsNotFound(err) {
		t.Errorf("a process that has ended: %v", err)
	}
}

// TestShowFolder shows a folder to a process, which writes a file there, and no longer when it is hidden.
func TestShowFolder(t *testing.T) {
	need.Root(t)
	in, say, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	heard, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer heard.Close()
	_, _ = in.Fd(), out.Fd() // makes them blocking, as a shell needs them
	user := User{UID: rootUser, GID: rootUser}
	p, err := Start(Spec{
		Path: "/bin/sh", In: in, Out: out, Isolated: true, User: &user, Root: &Root{Folders: []string{"/save/all"}, Devices: []string{"/dev/null"}},
		Args: []string{"sh", "-c", `while read -r go; do { echo "$go" >/save/all/made; } 2>/dev/null && echo yes || echo no; done`},
	})
	_ = out.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(p.Kill(context.Background()), p.Close()) })
	writes := func(word, want string) {
		t.Helper()
		if _, err := say.WriteString(word + "\n"); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 100)
		if n, err := heard.Read(buf); err != nil || strings.TrimSpace(string(buf[:n])) != want {
			t.Errorf("whether it writes %s: %q, %v; want %s", word, buf[:n], err, want)
		}
	}
	dir := t.TempDir()
	if err := os.Chown(dir, rootUser, rootUser); err != nil {
		t.Fatal(err)
	}
	folder, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	writes("before", "no")
	if err := p.Show(RootFile{At: "/save/all", File: folder}, user); err != nil {
		t.Fatal(err)
	}
	writes("shown", "yes")
	if err := p.Hide("/save/all"); err != nil {
		t.Fatal(err)
	}
	writes("hidden", "no")
	if text, err := os.ReadFile(filepath.Join(dir, "made")); err != nil || string(text) != "shown\n" {
		t.Errorf("the file has %q, %v", text, err)
	}
}

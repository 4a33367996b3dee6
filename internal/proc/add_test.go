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

// TestAdd adds files and block devices to the root of a process, in a folder that it did not have, and removes them.
func TestAdd(t *testing.T) {
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
	fixed := opened(t, secretFile(t, 0))
	p, err := Start(Spec{
		Path: "/bin/sh", In: in, Out: out, Isolated: true, User: &user, Root: &Root{Devices: []string{"/dev/null"}, Files: []RootFile{{At: "/fixed", File: fixed}}},
		Args: []string{"sh", "-c", `while read -r at; do { read -r x <$at; } 2>/dev/null || x=nothing; { echo "written $at" >$at; } 2>/dev/null && x="$x, can write"; { echo >/disks/new; } 2>/dev/null && x="$x, can make files"; [ -e $at ] && x="$x, is there"; echo "$x"; done`},
	})
	_ = out.Close()
	if errdefs.Is(err, errdefs.Unsupported) {
		need.Missing(t, "a folder for temporary files on a file system that maps users, such as ext4")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(p.Kill(context.Background()), p.Close()) })
	finds := func(at, want string) {
		t.Helper()
		if _, err := say.WriteString(at + "\n"); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 100)
		if n, err := heard.Read(buf); err != nil || strings.TrimSpace(string(buf[:n])) != want {
			t.Errorf("at %s it finds %q, %v; want %q", at, buf[:n], err, want)
		}
	}
	finds("/disks/1", "nothing")
	for range 2 {
		if err := p.Remove("/disks/1"); err != nil {
			t.Errorf("remove nothing: %v", err)
		}
	}
	for _, of := range []struct {
		path     string
		readOnly bool
		want     string
	}{
		{secretFile(t, 0), false, "content, can write, is there"},
		{secretFile(t, 0), true, "content, is there"},
		{loopDevice(t), false, "content, can write, is there"},
		{loopDevice(t), true, "content, is there"},
	} {
		f := opened(t, of.path)
		for range 2 {
			if err := p.Add(RootFile{At: "/disks/1", File: f, ReadOnly: of.readOnly}, user); err != nil {
				t.Fatal(err)
			}
		}
		finds("/disks/1", of.want)
		finds("/disks/2", "nothing")
		if of.readOnly {
			if err := p.Remove("/disks/1"); err != nil {
				t.Fatal(err)
			}
			finds("/disks/1", "nothing")
		}
	}
	finds("/fixed", "content, can write, is there")
	if err := p.Remove("/fixed"); err != nil {
		t.Fatal(err)
	}
	finds("/fixed", "nothing")
	if text, err := os.ReadFile(fixed.Name()); err != nil || string(text) != "written /fixed\n" {
		t.Errorf("the file on the host has %q, %v", text, err)
	}
	folder := opened(t, filepath.Dir(fixed.Name()))
	for what, f := range map[string]RootFile{"an unclean path": {At: "/disks/../1", File: fixed}, "a folder": {At: "/disks/1", File: folder}} {
		if err := p.Add(f, user); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := p.Remove("disks"); !errdefs.IsInvalid(err) {
		t.Errorf("remove at an unclean path: %v", err)
	}
	if err := p.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{p.Add(RootFile{At: "/disks/1", File: fixed}, user), p.Remove("/disks/1")} {
		if !errdefs.IsNotFound(err) {
			t.Errorf("a process that has ended: %v", err)
		}
	}
}

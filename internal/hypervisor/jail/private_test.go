package jail

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// TestDialPrivate connects to a socket of the right user, and to nothing that a hostile process may put in its place.
func TestDialPrivate(t *testing.T) {
	need.Root(t)
	const uid = DefaultUIDBase + 7
	private, err := NewPrivate(uid)
	if err != nil {
		t.Fatal(err)
	}
	defer private.Close()
	p, err := proc.Start(proc.Spec{
		Path: "/bin/sleep", Args: []string{"sleep", "600"}, Isolated: true, User: &proc.User{UID: uid, GID: uid},
		Root: &proc.Root{Files: []proc.RootFile{{At: "/run", File: private, Scratch: true}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(p.Kill(context.Background()), p.Close()) })
	run := "/proc/self/fd/" + strconv.Itoa(int(private.Fd()))
	listener, err := (Dir{private}).Listen("a.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	me := uint32(os.Geteuid())
	conn, err := DialPrivate(t.Context(), p, "/run", "a.sock", me)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	outside, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer outside.Close()
	for _, err := range []error{
		os.Symlink(outside.Addr().String(), filepath.Join(run, "link")), os.Symlink(".", filepath.Join(run, "folder")),
		os.WriteFile(filepath.Join(run, "file"), nil, 0o600), unix.Mkfifo(filepath.Join(run, "pipe"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, try := range map[string]func() (net.Conn, error){
		"of another user":          func() (net.Conn, error) { return DialPrivate(t.Context(), p, "/run", "a.sock", me+1) },
		"by a link":                func() (net.Conn, error) { return DialPrivate(t.Context(), p, "/run", "link", me) },
		"in a folder by a link":    func() (net.Conn, error) { return DialPrivate(t.Context(), p, "/run/folder", "a.sock", me) },
		"a file":                   func() (net.Conn, error) { return DialPrivate(t.Context(), p, "/run", "file", me) },
		"a pipe":                   func() (net.Conn, error) { return DialPrivate(t.Context(), p, "/run", "pipe", me) },
		"missing":                  func() (net.Conn, error) { return DialPrivate(t.Context(), p, "/run", "none", me) },
		"in a folder that is none": func() (net.Conn, error) { return DialPrivate(t.Context(), p, "/run/file", "a.sock", me) },
	} {
		if conn, err := try(); !errdefs.IsUnavailable(err) {
			t.Errorf("%s: %v", name, err)
			if conn != nil {
				conn.Close()
			}
		}
	}
	if err := p.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := DialPrivate(t.Context(), p, "/run", "a.sock", me); !errdefs.IsUnavailable(err) {
		t.Errorf("of a process that has ended: %v", err)
	}
}

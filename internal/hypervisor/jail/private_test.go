package jail

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// TestDialPrivate connects to a socket of the right user, and to nothing that a hostile process may put in its place.
func TestDialPrivate(t *testing.T) {
	need.Root(t)
	const uid = DefaultUIDBase + 7
	base := filepath.Join(t.TempDir(), strings.Repeat("deep/", 25))
	if err := os.MkdirAll(base, 0o700); err != nil {
		t.Fatal(err)
	}
	dir, err := OpenDir(base)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	private, err := dir.Private("run", uid)
	if err != nil {
		t.Fatal(err)
	}
	private.Close()
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(base, "run"), &st); err != nil || st.Uid != uid || st.Gid != uid || st.Mode&0o7777 != 0o700 {
		t.Errorf("the folder is of %d:%d, mode %o, %v", st.Uid, st.Gid, st.Mode, err)
	}
	run := filepath.Join(base, "run")
	listener, err := (Dir{mustOpen(t, run)}).Listen("a.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	me := uint32(os.Geteuid())
	conn, err := DialPrivate(t.Context(), run, "a.sock", me)
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
		os.Symlink(outside.Addr().String(), filepath.Join(run, "link")), os.Symlink(run, filepath.Join(base, "folder")),
		os.WriteFile(filepath.Join(run, "file"), nil, 0o600), unix.Mkfifo(filepath.Join(run, "pipe"), 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, try := range map[string]func() (net.Conn, error){
		"of another user":          func() (net.Conn, error) { return DialPrivate(t.Context(), run, "a.sock", me+1) },
		"by a link":                func() (net.Conn, error) { return DialPrivate(t.Context(), run, "link", me) },
		"in a folder by a link":    func() (net.Conn, error) { return DialPrivate(t.Context(), filepath.Join(base, "folder"), "a.sock", me) },
		"a file":                   func() (net.Conn, error) { return DialPrivate(t.Context(), run, "file", me) },
		"a pipe":                   func() (net.Conn, error) { return DialPrivate(t.Context(), run, "pipe", me) },
		"missing":                  func() (net.Conn, error) { return DialPrivate(t.Context(), run, "none", me) },
		"in a folder that is none": func() (net.Conn, error) { return DialPrivate(t.Context(), run+"/file", "a.sock", me) },
	} {
		if conn, err := try(); !errdefs.IsUnavailable(err) {
			t.Errorf("%s: %v", name, err)
			if conn != nil {
				conn.Close()
			}
		}
	}

	// The next run begins with an empty folder, whatever is in it; what links there point to stays.
	if err := errors.Join(os.MkdirAll(run+"/a/b", 0o700), os.Symlink(base, run+"/a/up")); err != nil {
		t.Fatal(err)
	}
	if private, err = dir.Private("run", uid+1); err != nil {
		t.Fatal(err)
	}
	private.Close()
	if left, err := os.ReadDir(run); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	for range 2 {
		if err := RemovePrivate(base, "run"); err != nil {
			t.Error(err)
		}
	}
	if left, err := os.ReadDir(base); err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func mustOpen(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

package proc

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

// TestScratch: a process has a folder that no path of the host leads to. It fills that folder, and nothing else, and the folder is gone with it.
func TestScratch(t *testing.T) {
	need.Root(t)
	user := User{UID: rootUser, GID: rootUser}
	const size, files = 64 << 10, 8
	folder, err := NewScratch(user, size, files)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Symlinkat("/proc", int(folder.Fd()), "link"); err != nil {
		t.Fatal(err)
	}
	heard, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer heard.Close()
	in, hold, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	defer hold.Close()
	_, _ = in.Fd(), out.Fd() // makes them blocking, as a shell needs them
	p, err := Start(Spec{
		Path: "/bin/sh", In: in, Out: out, Isolated: true, User: &user, Root: &Root{Files: []RootFile{{At: "/run", File: folder, Scratch: true}}},
		Args: []string{"sh", "-c", `n=1; cd /run || exit; while echo >"file$n"; do n=$((n+1)); done 2>&-
x=0123456789abcdef; for i in 1 2 3 4 5 6 7 8 9 10; do x=$x$x; done; b=0; while printf %s "$x" >>file1; do b=$((b+16)); done 2>&-
mkdir deep 2>&- ; echo "no file $n, no more than $b KiB"; read -r x`},
	})
	_, _ = out.Close(), folder.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(p.Kill(context.Background()), p.Close()) })
	// The link and the files share what is allowed. What is written is in whole pages.
	if said, err := bufio.NewReader(heard).ReadString('\n'); err != nil || !strings.HasPrefix(said, "no file 8, no more than ") || len(said) > len("no file 8, no more than 64 KiB\n") {
		t.Errorf("it has %q, %v", said, err)
	}
	there, err := p.Folder("/run")
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(there.Fd()), &st); err != nil || st.Uid != user.UID || st.Gid != user.GID || st.Mode&0o7777 != 0o700 {
		t.Errorf("the folder is of %d:%d, mode %o, %v", st.Uid, st.Gid, st.Mode, err)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(there.Fd()), &fs); err != nil || int64(fs.Blocks)*fs.Bsize != size || fs.Files != files+1 {
		t.Errorf("it has %d blocks of %d bytes and %d files, %v", fs.Blocks, fs.Bsize, fs.Files, err)
	}
	for _, at := range []string{"/run/link", "/run/link/1", "/run/none", "/run/file1", "/proc/self/root", "/../none"} {
		if f, err := p.Folder(at); err == nil {
			t.Errorf("%s is a folder", at)
			f.Close()
		}
	}
	if err := p.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Folder("/run"); !errdefs.IsNotFound(err) {
		t.Errorf("after its end: %v", err)
	}
}

// TestScratchOfAnother: a process that has ended has no folder, also if its number is that of another one now.
func TestScratchOfAnother(t *testing.T) {
	other := exec.Command("/bin/sleep", "600")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = other.Process.Kill(), other.Wait() })
	p, err := Start(Spec{Path: "/bin/sleep", Args: []string{"sleep", "600"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	if err := p.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.pid = other.Process.Pid
	if f, err := p.Folder(filepath.Clean(os.TempDir())); !errdefs.IsNotFound(err) {
		t.Errorf("%v", err)
		if f != nil {
			f.Close()
		}
	}
}

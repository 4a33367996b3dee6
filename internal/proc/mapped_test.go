package proc

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

var testIDs = IDs{Base: 0x71230000, Count: 65536}

// mapped runs a script that sees dir as $D, and returns what it prints.
func mapped(t *testing.T, dir string, readOnly bool, script string) string {
	t.Helper()
	return mappedAs(t, dir, "", Tree{ReadOnly: readOnly}, script)
}

// mappedAs is mapped for a file, which the script sees in $D as name.
func mappedAs(t *testing.T, dir, name string, what Tree, script string) string {
	t.Helper()
	fd, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close()
	tree, err := MappedTree(fd, testIDs, what)
	if errdefs.Is(err, errdefs.Unsupported) {
		need.Missing(t, "a folder for temporary files on a file system that maps users, such as ext4")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer tree.Close()
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	m := &Mount{Tree: tree, Name: "shared", File: name}
	p, err := Start(Spec{
		Path: "/bin/sh", Args: []string{"sh", "-c", script}, Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "D=" + m.Path()},
		Out: out, Isolated: true, Mapped: &testIDs, Mount: m,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err := p.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestMapped(t *testing.T) {
	need.Root(t)
	dir, outside := t.TempDir(), t.TempDir()
	for _, err := range []error{
		os.WriteFile(dir+"/old", []byte("content"), 0o600), os.Chown(dir+"/old", 1000, 1001),
		os.WriteFile(outside+"/secret", []byte("secret"), 0o644), os.Symlink(outside+"/secret", dir+"/link"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	got := mapped(t, dir, false, `
id -u
grep NoNewPrivs /proc/self/status
cat $D/old
echo
echo x >$D/new && chown 7:8 $D/new && echo made
mknod $D/null c 1 3 2>/dev/null || echo no-device
cat $D/link 2>/dev/null || echo no-link
cat /etc/shadow 2>/dev/null || echo no-shadow
mount -o remount,dev,suid,exec $D 2>/dev/null || echo no-remount
cp /bin/true $D/true; $D/true 2>/dev/null || echo no-program
`)
	want := "0\nNoNewPrivs:\t1\ncontent\nmade\nno-device\nno-link\nno-shadow\nno-remount\nno-program\n"
	if got != want {
		t.Errorf("%s\nwant:\n%s", got, want)
	}
	var st unix.Stat_t
	if err := unix.Stat(dir+"/new", &st); err != nil || st.Uid != 7 || st.Gid != 8 {
		t.Errorf("the new file belongs to %d:%d, %v", st.Uid, st.Gid, err)
	}
	if _, err := os.Lstat(mountsDir + "/shared"); err == nil {
		t.Error("others see the mount")
	}
	got = mapped(t, dir, true, `cat $D/old; echo x 2>/dev/null >$D/old || echo fixed; mount -o remount,rw,bind $D 2>/dev/null || echo still; rm -f $D/old 2>/dev/null || echo kept`)
	if got != "contentfixed\nstill\nkept\n" {
		t.Errorf("read-only: %q", got)
	}
}

// A file is alone: nothing beside it can be seen or made, on the host or for the process.
func TestMappedFile(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	for _, err := range []error{
		os.WriteFile(dir+"/token", []byte("content"), 0o600), os.Chown(dir+"/token", 1000, 1001), os.WriteFile(dir+"/secret", []byte("secret"), 0o644),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	got := mappedAs(t, dir+"/token", "file", Tree{ReadOnly: false}, `
ls -A $D
cat $D/file
echo " and more" >>$D/file && cat $D/file
echo x 2>/dev/null >$D/new || echo no-new
rm -f $D/file 2>/dev/null || echo kept
mv $D/file $D/other 2>/dev/null || echo there
cat $D/../secret $D/secret 2>/dev/null || echo no-secret
`)
	if want := "file\ncontentcontent and more\nno-new\nkept\nthere\nno-secret\n"; got != want {
		t.Errorf("%q\nwant %q", got, want)
	}
	if text, err := os.ReadFile(dir + "/token"); string(text) != "content and more\n" || err != nil {
		t.Errorf("the host has %q, %v", text, err)
	}
	if got := mappedAs(t, dir+"/token", "file", Tree{ReadOnly: true}, `cat $D/file; echo x 2>/dev/null >>$D/file || echo fixed`); got != "content and more\nfixed\n" {
		t.Errorf("read-only: %q", got)
	}
}

func TestMappedTreeOfAnUnfitFolder(t *testing.T) {
	need.Root(t)
	fd, err := os.Open("/proc")
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close()
	if tree, err := MappedTree(fd, testIDs, Tree{}); !errdefs.Is(err, errdefs.Unsupported) {
		t.Errorf("%v, %v", tree, err)
	}
}

func TestUserNamespaceLeavesNoProcess(t *testing.T) {
	need.Root(t)
	ns, err := UserNamespace(testIDs)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	ours := func(pid int) bool { // another program that runs now may make one, too
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		return strings.Contains(string(text), fmt.Sprintf("\nPPid:\t%d\n", os.Getpid()))
	}
	found, err := Find(t.Context(), ours, func(_ int, args []string) bool { return len(args) == 1 && args[0] == "userns" })
	if err != nil || len(found) > 0 {
		t.Errorf("left: %v, %v", found, err)
	}
	if at, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", ns.Fd())); err != nil || !strings.HasPrefix(at, "user:") {
		t.Errorf("it is %s, %v", at, err)
	}
}

// What is mounted below a folder is there only if it is asked for. It can be written unless that is excluded, too. The host's mounts stay when the tree goes.
func TestMappedBelow(t *testing.T) {
	need.Root(t)
	dir, other := t.TempDir(), t.TempDir()
	below := filepath.Join(dir, "below")
	for _, err := range []error{os.Mkdir(below, 0o755), os.WriteFile(other+"/file", []byte("content"), 0o644)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, err := range []error{ // with propagation, as the mounts of most hosts have it
		unix.Mount(dir, dir, "", unix.MS_BIND, ""), unix.Mount("", dir, "", unix.MS_PRIVATE, ""), unix.Mount("", dir, "", unix.MS_SHARED, ""),
		unix.Mount(other, below, "", unix.MS_BIND, ""),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Unmount(below, 0), unix.Unmount(dir, 0)); err != nil {
			t.Error(err)
		}
	})
	if got := MountsBelow(dir); len(got) != 1 || got[0] != below || len(MountsBelow(other)) != 0 {
		t.Errorf("mounted below: %v", got)
	}
	const script = `cat $D/below/file 2>/dev/null || echo nothing; echo; echo x 2>/dev/null >$D/new && echo new; echo x 2>/dev/null >$D/below/new && echo new-below; true`
	for _, tt := range []struct {
		what Tree
		want string
	}{
		{Tree{}, "nothing\n\nnew\nnew-below\n"}, // in the folder over which something is mounted
		{Tree{Below: true}, "content\nnew\nnew-below\n"},
		{Tree{Below: true, ReadOnly: true}, "content\nnew-below\n"},
		{Tree{Below: true, ReadOnly: true, ReadOnlyBelow: true}, "content\n"},
	} {
		if got := mappedAs(t, dir, "", tt.what, script); got != tt.want {
			t.Errorf("%+v: %q, want %q", tt.what, got, tt.want)
		}
	}
	fd, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer fd.Close()
	tree, err := MappedTree(fd, testIDs, Tree{Below: true})
	if err != nil {
		t.Fatal(err)
	}
	defer tree.Close()
	at := t.TempDir()
	if err := Attach(tree, at); err != nil {
		t.Fatal(err)
	}
	if err := Detach(at); err != nil {
		t.Fatal(err)
	}
	if there, err := Mounted(below); !there || err != nil {
		t.Errorf("the mount of the host is gone: %v", err)
	}
}

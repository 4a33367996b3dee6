package proc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

const rootUser = 0x71234567

// inRoot runs a script of the shell that the host has, as an unprivileged user with that root, and returns what it prints.
func inRoot(t *testing.T, r *Root, script string) string {
	t.Helper()
	need.Root(t)
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	p, err := Start(Spec{
		Path: "/bin/sh", Args: []string{"sh", "-c", script}, Out: out, Root: r, Isolated: true, User: &User{UID: rootUser, GID: rootUser},
	})
	if errdefs.Is(err, errdefs.Unsupported) {
		need.Missing(t, "a folder for temporary files on a file system that maps users, such as ext4")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = errors.Join(p.Kill(context.Background()), p.Close()) })
	if _, err := p.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(out.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// opened opens a file as a driver does that has checked it, without the right to do anything with it.
func opened(t *testing.T, path string) *os.File {
	t.Helper()
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), path)
	t.Cleanup(func() { f.Close() })
	return f
}

// secretFile is a file that only its owner may read or write.
func secretFile(t *testing.T, owner int) string {
	t.Helper()
	need.Root(t)
	path := filepath.Join(t.TempDir(), "file")
	if err := errors.Join(os.WriteFile(path, []byte("content\n"), 0o600), os.Chown(path, owner, owner+1), os.Chmod(filepath.Dir(path), 0o700)); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestRootHasNothingElse lists all that a process in a root finds.
func TestRootHasNothingElse(t *testing.T) {
	got := inRoot(t, &Root{Devices: []string{"/dev/null"}, Files: []RootFile{{At: "/disks/vda", File: opened(t, secretFile(t, 0))}}}, `
cd /; echo root: *; echo hidden: .[a-z]* ; echo dev: dev/*; echo disks: disks/*; echo usr: usr/*; cd ..; echo above: *
[ -e /etc/passwd ] && echo passwd
[ -e /proc/1/root/etc/passwd ] && echo passwd by proc
[ -e /proc/self/cwd/../etc/passwd ] && echo passwd by cwd
n=0; for p in /proc/[0-9]*; do n=$((n+1)); done; echo "processes $n"
[ -e /proc/sys ] && echo kernel settings
[ -e /proc/self/fd/1 ] && echo fd
while read -r line; do case "$line" in *NoNewPrivs*|*CapBnd*|*CapEff*) echo $line ;; esac; done </proc/self/status
while read -r a b c d at options rest; do echo "mount $at $options"; done </proc/self/mountinfo`)
	want := []string{
		"hidden: .[a-z]*", "dev: dev/null", "disks: disks/vda", "processes 1", "fd", "NoNewPrivs: 1", "CapBnd: 0000000000000000", "CapEff: 0000000000000000", "mount / ro,nosuid,noexec,relatime",
		"mount /disks/vda rw,nosuid,nodev,noexec,relatime", "mount /proc rw,nosuid,nodev,noexec,relatime",
	}
	for _, w := range want {
		if !strings.Contains("\n"+got, "\n"+w) {
			t.Errorf("no line %q", w)
		}
	}
	for line := range strings.Lines(got) {
		what, rest, _ := strings.Cut(line, ": ")
		switch {
		case strings.Contains(line, "passwd"), strings.Contains(line, "kernel settings"):
			t.Errorf("it finds the %s", line)
		case what == "root" || what == "above":
			for _, name := range strings.Fields(rest) {
				if !slices.Contains([]string{"bin", "dev", "disks", "etc", "lib", "lib32", "lib64", "proc", "usr"}, name) {
					t.Errorf("%s has %s", what, name)
				}
			}
		}
	}
	if t.Failed() {
		t.Log(got)
	}
}

// TestRootGivesFiles opens files by their paths that only their owners may open, and no more than that.
func TestRootGivesFiles(t *testing.T) {
	for _, owner := range []int{0, 1000, 65534} {
		disk, image := secretFile(t, owner), secretFile(t, owner)
		got := inRoot(t, &Root{Devices: []string{"/dev/null"}, Files: []RootFile{{At: "/disk", File: opened(t, disk)}, {At: image, File: opened(t, image), ReadOnly: true}}}, `
IFS= read -r line </disk; echo "disk $line"
IFS= read -r line <`+image+`; echo "image $line"
echo changed >/disk && echo disk is written
(echo x >`+image+`) 2>/dev/null && echo image is written
(echo x >/new) 2>/dev/null && echo root is written
(echo x >`+filepath.Dir(image)+`/new) 2>/dev/null && echo folder is written
exit 0`)
		if want := "disk content\nimage content\ndisk is written\n"; got != want {
			t.Errorf("of files of user %d:\n%s", owner, got)
		}
		if text, err := os.ReadFile(disk); err != nil || string(text) != "changed\n" {
			t.Errorf("the disk has %q, %v", text, err)
		}
		if text, err := os.ReadFile(image); err != nil || string(text) != "content\n" {
			t.Errorf("the image has %q, %v", text, err)
		}
		var st unix.Stat_t
		if err := unix.Stat(disk, &st); err != nil || st.Uid != uint32(owner) || st.Gid != uint32(owner+1) || st.Mode&0o7777 != 0o600 {
			t.Errorf("the disk is now of %d:%d, mode %o, %v", st.Uid, st.Gid, st.Mode, err)
		}
	}
}

// TestRootHasAFolder gives the process a folder of its own, in which it makes a socket or a file that the host sees.
func TestRootHasAFolder(t *testing.T) {
	need.Root(t)
	dir := filepath.Join(t.TempDir(), "run")
	if err := errors.Join(os.Mkdir(dir, 0o700), os.Chown(dir, rootUser, rootUser)); err != nil {
		t.Fatal(err)
	}
	inRoot(t, &Root{Files: []RootFile{{At: "/run", File: opened(t, dir)}}}, `echo made >/run/file`)
	var st unix.Stat_t
	if err := unix.Stat(dir+"/file", &st); err != nil || st.Uid != rootUser {
		t.Errorf("it is of user %d, %v", st.Uid, err)
	}
	if err := os.Symlink("/file", dir+"/link"); err != nil {
		t.Fatal(err)
	}
	if got := inRoot(t, &Root{Devices: []string{"/dev/null"}, Files: []RootFile{{At: "/run", File: opened(t, dir), ReadOnly: true}}}, `
IFS= read -r line </run/file; echo "$line"
(: >/run/new) 2>/dev/null && echo written
exit 0`); got != "made\n" {
		t.Errorf("read-only: %q", got)
	}
}

// TestRootHasDevices lets the process use the devices that are named.
func TestRootHasDevices(t *testing.T) {
	if got := inRoot(t, &Root{Devices: []string{"/dev/null", "/dev/zero"}}, `
echo x >/dev/null && echo null
[ -c /dev/zero ] && [ -r /dev/zero ] && [ -w /dev/zero ] && echo zero
[ -e /dev/full ] && echo full
exit 0`); got != "null\nzero\n" {
		t.Errorf("%q", got)
	}
	loop := loopDevice(t)
	if got := inRoot(t, &Root{Devices: []string{"/dev/null"}, Files: []RootFile{{At: "/disk", File: opened(t, loop)}, {At: "/image", File: opened(t, loop), ReadOnly: true}}}, `
IFS= read -r line </disk; echo "disk $line"
IFS= read -r line </image; echo "image $line"
(echo changed >/disk) && echo disk is written
(echo changed >/image) 2>/dev/null && echo image is written
exit 0`); got != "disk content\nimage content\ndisk is written\n" {
		t.Errorf("block devices: %q", got)
	}
}

// loopDevice is a block device that begins with a line.
func loopDevice(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "loop")
	if err := os.WriteFile(file, append([]byte("content\n"), make([]byte, 1<<20)...), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "losetup", "--find", "--show", file).Output()
	if err != nil {
		need.Missing(t, "a loop device: "+err.Error())
	}
	device := strings.TrimSpace(string(out))
	t.Cleanup(func() { _ = exec.CommandContext(context.Background(), "losetup", "--detach", device).Run() })
	return device
}

// TestRootOfStaticProgram has no libraries.
func TestRootOfStaticProgram(t *testing.T) {
	need.Root(t)
	busybox := filepath.Join(filepath.Dir(os.Getenv("COCOON_TEST_KERNEL")), "busybox")
	if _, err := os.Stat(busybox); err != nil {
		t.Skip("the test needs a static busybox beside COCOON_TEST_KERNEL (`make guest`)")
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	p := start(t, Spec{Path: busybox, Args: []string{"ls", "/"}, Out: out, Root: &Root{}, User: &User{UID: rootUser, GID: rootUser}})
	if exit, err := p.Wait(t.Context()); err != nil || exit.Code != 0 {
		t.Errorf("%+v, %v", exit, err)
	}
	text, err := os.ReadFile(out.Name())
	first, _, _ := strings.Cut(strings.TrimPrefix(busybox, "/"), "/")
	if got := strings.Fields(string(text)); err != nil || len(got) != 2 || !slices.Contains(got, "proc") || !slices.Contains(got, first) {
		t.Errorf("%q, %v; want proc and %s", got, err, first)
	}
}

// TestRootKeepsOthersOut: what one process mounts or makes is not seen by another, nor by the host, and ends with it.
func TestRootKeepsOthersOut(t *testing.T) {
	need.Root(t)
	disk := opened(t, secretFile(t, 0))
	sleeping := Spec{Path: "/bin/sleep", Args: []string{"sleep", "600"}, Isolated: true, User: &User{UID: rootUser, GID: rootUser}}
	var all []*Process
	for n := range 3 {
		s := sleeping
		s.Root = &Root{Files: []RootFile{{At: fmt.Sprintf("/disk%d", n), File: disk}}}
		p, err := Start(s)
		if errdefs.Is(err, errdefs.Unsupported) {
			need.Missing(t, "a folder for temporary files on a file system that maps users, such as ext4")
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = errors.Join(p.Kill(context.Background()), p.Close()) })
		all = append(all, p)
	}
	host := mountsOf(t, "self") // others mount and unmount there, too
	for n, p := range all {
		text := mountsOf(t, strconv.Itoa(p.PID()))
		if strings.Count(text, "/disk") != 1 || !strings.Contains(text, fmt.Sprintf("/disk%d ", n)) {
			t.Errorf("process %d has the mounts:\n%s", n, text)
		}
		for line := range strings.Lines(text) {
			f := strings.Fields(line) // number, number of its parent, device, root, place, …
			switch {
			case len(f) < 5:
				t.Errorf("process %d has a mount %q", n, line)
			case f[4] == "/" && strings.Contains(host, " "+f[2]+" "):
				t.Errorf("the host has the root of process %d, which is %s:\n%s", n, line, host)
			case f[4] == fmt.Sprintf("/disk%d", n) && strings.Contains(host, " "+f[3]+" "):
				t.Errorf("the host has the disk of process %d, which is %s:\n%s", n, line, host)
			}
		}
	}
}

func mountsOf(t *testing.T, pid string) string {
	t.Helper()
	text, err := os.ReadFile("/proc/" + pid + "/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestRootRefused names what cannot be placed, and leaves nothing.
func TestRootRefused(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	if err := unix.Mkfifo(dir+"/pipe", 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		spec Spec
		is   func(error) bool
	}{
		"a pipe":            {Spec{Root: &Root{Files: []RootFile{{At: "/x", File: opened(t, dir+"/pipe")}}}}, errdefs.IsFailedPrecondition},
		"no absolute path":  {Spec{Root: &Root{Files: []RootFile{{At: "x", File: opened(t, dir)}}}}, errdefs.IsInvalid},
		"the root":          {Spec{Root: &Root{Files: []RootFile{{At: "/", File: opened(t, dir)}}}}, errdefs.IsInvalid},
		"no clean path":     {Spec{Root: &Root{Files: []RootFile{{At: "/a/../b", File: opened(t, dir)}}}}, errdefs.IsInvalid},
		"no device":         {Spec{Root: &Root{Devices: []string{dir}}}, errdefs.IsFailedPrecondition},
		"a missing device":  {Spec{Root: &Root{Devices: []string{"/dev/none"}}}, errdefs.IsUnavailable},
		"a missing program": {Spec{Path: "/none", Root: &Root{}}, errdefs.IsFailedPrecondition},
		"mapped users":      {Spec{Root: &Root{}, Mapped: &testIDs, Isolated: true}, errdefs.IsInvalid},
	} {
		if tt.spec.Path == "" {
			tt.spec.Path = "/bin/sleep"
		}
		tt.spec.Args = []string{"sleep", "1"}
		if p, err := Start(tt.spec); !tt.is(err) {
			t.Errorf("%s: %v", name, err)
			if p != nil {
				_ = errors.Join(p.Kill(t.Context()), p.Close())
			}
		}
	}
	// A file system that does not know idmapped mounts, and a file that only its owner may read.
	own := filepath.Join(dir, "other")
	if err := errors.Join(os.Mkdir(own, 0o700), unix.Mount("ramfs", own, "ramfs", 0, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(own, unix.MNT_DETACH) })
	if err := errors.Join(os.WriteFile(own+"/secret", []byte("content\n"), 0o600), os.WriteFile(own+"/public", []byte("content\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	if err := CanGive(own); !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), own+" is on a file system") {
		t.Errorf("no mapped users: %v", err)
	}
	if err := CanGive(dir); err != nil { // where the other tests of this file give files to processes
		t.Error(err)
	}
	if err := CanGive(dir + "/none"); !errdefs.IsNotFound(err) {
		t.Errorf("no folder: %v", err)
	}
	_, err := Start(Spec{Path: "/bin/sleep", Args: []string{"sleep", "1"}, Isolated: true, User: &User{UID: rootUser, GID: rootUser}, Root: &Root{Files: []RootFile{{At: "/x", File: opened(t, own+"/secret")}}}})
	if !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), own+"/secret is on a file system") {
		t.Errorf("no mapped users: %v", err)
	}
	if got := inRoot(t, &Root{Files: []RootFile{{At: "/x", File: opened(t, own+"/public"), ReadOnly: true}}}, `IFS= read -r line </x; echo "$line"`); got != "content\n" {
		t.Errorf("a file that everybody may read: %q", got)
	}
	if err := os.Chown(own+"/secret", rootUser, rootUser); err != nil {
		t.Fatal(err)
	}
	if got := inRoot(t, &Root{Files: []RootFile{{At: "/x", File: opened(t, own+"/secret")}}}, `IFS= read -r line </x; echo "$line"`); got != "content\n" {
		t.Errorf("a file of the user's own: %q", got)
	}
}

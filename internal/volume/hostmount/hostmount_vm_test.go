//go:build vm

package hostmount_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/loopdev"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume/hostmount"
)

const mib = 1 << 20

type rig struct {
	*hostmount.Mounter
	t   *testing.T
	dir string // of the mounts
}

func newRig(t *testing.T) *rig {
	t.Helper()
	need.Root(t)
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		need.Missing(t, "loop devices")
	}
	base, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, dir: filepath.Join(base, "mounts")}
	r.restart()
	t.Cleanup(func() {
		all, err := r.List(r.dir)
		if err != nil {
			t.Error(err)
		}
		for _, m := range all {
			if err := r.Unmount(context.WithoutCancel(t.Context()), m.Dir); err != nil {
				t.Error(err)
			}
		}
		if err := unix.Unmount(r.dir, 0); err != nil && err != unix.EINVAL && err != unix.ENOENT {
			t.Error(err)
		}
	})
	return r
}

// restart gives the rig a Mounter that knows nothing.
func (r *rig) restart() {
	r.t.Helper()
	var err error
	if r.Mounter, err = hostmount.New(hostmount.Config{Dir: r.dir}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) at(name string) string { return filepath.Join(r.dir, name) }

// mount mounts a disk, which must succeed.
func (r *rig) mount(d vm.Disk, name string, o hostmount.Options) hostmount.Mount {
	r.t.Helper()
	m, err := r.Mount(r.t.Context(), d, r.at(name), o)
	if err != nil {
		r.t.Fatal(err)
	}
	return m
}

func (r *rig) unmount(name string) {
	r.t.Helper()
	if err := r.Unmount(r.t.Context(), r.at(name)); err != nil {
		r.t.Fatal(err)
	}
}

// refused wants a disk not to be mounted, with an error of the class that has the words in it.
func (r *rig) refused(d vm.Disk, name string, o hostmount.Options, want errdefs.Class, words string) {
	r.t.Helper()
	_, err := r.Mount(r.t.Context(), d, r.at(name), o)
	if !errdefs.Is(err, want) || !strings.Contains(err.Error(), words) {
		r.t.Errorf("%v; want class %v with %q", err, want, words)
	}
}

// write writes hello into the file of a volume that is mounted.
func (r *rig) write(name string) {
	r.t.Helper()
	f, err := os.Create(filepath.Join(r.at(name), "file"))
	if err == nil {
		_, err = f.WriteString("hello")
	}
	if err == nil {
		err = f.Sync()
	}
	if err != nil {
		r.t.Fatal(err)
	}
	f.Close()
}

// reads wants the file of a volume that is mounted to have a text.
func (r *rig) reads(name, want string) {
	r.t.Helper()
	if got, err := os.ReadFile(filepath.Join(r.at(name), "file")); err != nil || string(got) != want {
		r.t.Errorf("%s has %q (%v), want %q", name, got, err, want)
	}
}

// disk makes a file of zeros.
func disk(t *testing.T, size int64) vm.Disk {
	t.Helper()
	path := filepath.Join(t.TempDir(), "data")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	return vm.Disk{Path: path, Format: vm.DiskRaw}
}

func readOnly(d vm.Disk) vm.Disk {
	d.ReadOnly = true
	return d
}

// loopsOf returns the loop devices of a file.
func loopsOf(t *testing.T, file string) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), need.Tool(t, "losetup"), "--noheadings", "--output", "NAME", "-j", file).Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(out))
}

// clean checks a file system that is not mounted.
func clean(t *testing.T, d vm.Disk) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), need.Tool(t, "e2fsck"), "-f", "-n", d.Path).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v: %s", err, out)
	}
}

func size(t *testing.T, dir string) int64 {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Blocks) * st.Bsize
}

func TestMount(t *testing.T) {
	r, d := newRig(t), disk(t, 64*mib)
	m := r.mount(d, "a/data", hostmount.Options{})
	if m.Dir != r.at("a/data") || m.Path != d.Path || m.Type != "ext4" || m.ReadOnly || !strings.HasPrefix(m.Device, "/dev/loop") {
		t.Errorf("%+v", m)
	}
	r.write("a/data")
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(info)) {
		if strings.Contains(line, " "+m.Dir+" ") {
			for _, option := range []string{"nosuid", "nodev", "discard"} {
				if !strings.Contains(line, option) {
					t.Errorf("%q is not in %q", option, line)
				}
			}
		}
	}
	for range 2 { // also by a daemon that has started again
		if again := r.mount(d, "a/data", hostmount.Options{}); again != m {
			t.Errorf("mounted again: %+v, before %+v", again, m)
		}
		if all, err := r.List(r.dir); err != nil || len(all) != 1 || all[0] != m {
			t.Errorf("listed: %+v, %v", all, err)
		}
		r.restart()
	}
	r.refused(d, "b", hostmount.Options{}, errdefs.FailedPrecondition, "already")
	r.refused(d, "a/data", hostmount.Options{ReadOnly: true}, errdefs.FailedPrecondition, "another way")
	r.refused(disk(t, 64*mib), "a/data", hostmount.Options{}, errdefs.FailedPrecondition, "another disk")
	if all, err := r.List(r.at("b")); err != nil || len(all) > 0 {
		t.Errorf("elsewhere: %+v, %v", all, err)
	}
	for range 2 {
		r.unmount("a/data")
		if got := loopsOf(t, d.Path); len(got) > 0 {
			t.Errorf("loop devices %v are left", got)
		}
	}
	if _, err := os.Lstat(m.Dir); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
	clean(t, d)
	r.mount(d, "b", hostmount.Options{})
	r.reads("b", "hello")
	group := int64(4711)
	r.mount(disk(t, 64*mib), "c", hostmount.Options{Group: &group})
	if st, err := os.Stat(r.at("c")); err != nil || st.Mode() != os.ModeDir|os.ModeSetgid|0o777 {
		t.Errorf("root folder %v, %v", st.Mode(), err)
	}
}

func TestReadOnly(t *testing.T) {
	r, d := newRig(t), disk(t, 64*mib)
	r.refused(readOnly(d), "a", hostmount.Options{}, errdefs.FailedPrecondition, "blank")
	if got := loopsOf(t, d.Path); len(got) > 0 {
		t.Errorf("loop devices %v are left", got)
	}
	r.mount(d, "a", hostmount.Options{ReadOnly: true})
	if err := os.WriteFile(r.at("a/x"), nil, 0o600); !strings.Contains(fmt.Sprint(err), "read-only") {
		t.Errorf("written: %v", err)
	}
	r.unmount("a")
	r.mount(d, "a", hostmount.Options{})
	r.write("a")
	r.refused(readOnly(d), "b", hostmount.Options{}, errdefs.FailedPrecondition, "already")
	r.unmount("a")
	for _, name := range []string{"a", "b"} {
		if m := r.mount(readOnly(d), name, hostmount.Options{}); !m.ReadOnly {
			t.Errorf("%+v", m)
		}
		r.reads(name, "hello")
		if err := os.WriteFile(r.at(name+"/x"), nil, 0o600); !strings.Contains(fmt.Sprint(err), "read-only") {
			t.Errorf("written: %v", err)
		}
	}
	r.refused(d, "c", hostmount.Options{}, errdefs.FailedPrecondition, "already")
	r.unmount("a")
	r.reads("b", "hello")
}

func TestGrow(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} {
		t.Run(kind, func(t *testing.T) { grows(t, kind) })
	}
}

func grows(t *testing.T, kind string) {
	r, d := newRig(t), disk(t, 512*mib)
	if kind == "xfs" {
		_ = need.Tool(t, "mkfs.xfs")
	}
	if m := r.mount(d, "a", hostmount.Options{FSType: kind}); m.Type != kind {
		t.Errorf("%+v", m)
	}
	r.write("a")
	grow := func(to int64) {
		t.Helper()
		if err := os.Truncate(d.Path, to); err != nil {
			t.Fatal(err)
		}
	}
	grow(1024 * mib)
	if kind == "ext4" && !mayGrow(t) {
		err := r.Grow(t.Context(), r.at("a"))
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "CAP_SYS_RESOURCE") {
			t.Errorf("grown without the right to: %v", err)
		}
		r.unmount("a")
		r.refused(d, "a", hostmount.Options{}, errdefs.FailedPrecondition, "CAP_SYS_RESOURCE")
		clean(t, d)
		t.Log("the kernel lets ext4 grow only with CAP_SYS_RESOURCE, which is missing here; TestHostMounts grows it on a machine of its own")
		return
	}
	for range 2 {
		if err := r.Grow(t.Context(), r.at("a")); err != nil {
			t.Fatal(err)
		}
		if got := size(t, r.at("a")); got < 900*mib {
			t.Errorf("it has %d bytes", got)
		}
	}
	grow(1536 * mib)
	r.mount(d, "a", hostmount.Options{}) // a daemon was killed before it grew the file system
	if got := size(t, r.at("a")); got < 1400*mib {
		t.Errorf("it has %d bytes", got)
	}
	r.unmount("a")
	grow(2048 * mib)
	r.mount(d, "a", hostmount.Options{})
	if got := size(t, r.at("a")); got < 1900*mib {
		t.Errorf("it has %d bytes", got)
	}
	r.reads("a", "hello")
	if err := r.Grow(t.Context(), r.at("b")); !errdefs.IsNotFound(err) {
		t.Errorf("what is not mounted grows: %v", err)
	}
	r.unmount("a")
	if kind == "ext4" {
		clean(t, d)
	}
}

// mayGrow reports whether this process may grow a mounted ext4 file system.
func mayGrow(t *testing.T) bool {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		t.Fatal(err)
	}
	return data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

// A file system that was not unmounted has its journal replayed. One with errors is repaired, or refused as it is.
func TestUnclean(t *testing.T) {
	r, d := newRig(t), disk(t, 64*mib)
	r.mount(d, "a", hostmount.Options{})
	r.write("a")
	dirty := disk(t, 0)
	bytesOf, err := os.ReadFile(d.Path) // as after a power cut
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dirty.Path, bytesOf, 0o600); err != nil {
		t.Fatal(err)
	}
	r.unmount("a")
	r.refused(readOnly(dirty), "b", hostmount.Options{}, errdefs.FailedPrecondition, "journal")
	r.mount(dirty, "b", hostmount.Options{})
	r.reads("b", "hello")
	r.unmount("b")
	clean(t, dirty)

	debugfs := need.Tool(t, "debugfs")
	mark := func(d vm.Disk, request string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), debugfs, "-w", "-R", request, d.Path).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	mark(d, "set_super_value state 2")
	r.refused(readOnly(d), "c", hostmount.Options{}, errdefs.DataLoss, "errors")
	r.mount(d, "c", hostmount.Options{})
	r.reads("c", "hello")
	r.unmount("c")
	clean(t, d)

	mark(d, "set_super_value state 2")
	mark(d, "clri <2>") // no root folder
	before := sum(t, d.Path)
	if _, err := r.Mount(t.Context(), d, r.at("d"), hostmount.Options{}); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("mounted without a root folder: %v", err)
	}
	if sum(t, d.Path) != before {
		t.Log("e2fsck -p has changed a part of it") // as it does in a guest
	}
	if got := loopsOf(t, d.Path); len(got) > 0 {
		t.Errorf("loop devices %v are left", got)
	}
}

func sum(t *testing.T, path string) (s [sha256.Size]byte) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// What is no file system stays as it is, and so does what is used by others.
func TestRefused(t *testing.T) {
	r, d := newRig(t), disk(t, 16*mib)
	garbage := make([]byte, 16*mib)
	noise := rand.New(rand.NewPCG(1, 2))
	for i := range garbage {
		garbage[i] = byte(noise.Uint32())
	}
	for name, content := range map[string][]byte{
		"garbage": garbage, "at the end": append(make([]byte, 16*mib-4096), garbage[:4096]...), "luks": append([]byte("LUKS\xba\xbe"), make([]byte, 16*mib-6)...),
	} {
		if err := os.WriteFile(d.Path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		r.refused(d, "a", hostmount.Options{}, errdefs.FailedPrecondition, "stays unchanged")
		if now, err := os.ReadFile(d.Path); err != nil || !bytes.Equal(now, content) {
			t.Errorf("%s: the disk was changed (%v)", name, err)
		}
	}
	r.refused(disk(t, 4*mib), "a", hostmount.Options{}, errdefs.InvalidArgument, "at least")
	r.refused(vm.Disk{Path: d.Path, Format: vm.DiskQCOW2}, "a", hostmount.Options{}, errdefs.InvalidArgument, "raw")
	r.refused(vm.Disk{Path: d.Path, Format: vm.DiskRaw, Shared: true}, "a", hostmount.Options{}, errdefs.InvalidArgument, "share")
	r.refused(vm.Disk{Path: d.Path, Format: vm.DiskRaw, Device: true}, "a", hostmount.Options{}, errdefs.FailedPrecondition, "")
	r.refused(vm.Disk{Path: "/nowhere", Format: vm.DiskRaw}, "a", hostmount.Options{}, errdefs.DataLoss, "gone")
	for _, dir := range []string{"/mnt", r.dir, r.dir + "/../x", r.at("a") + "/"} {
		if _, err := r.Mount(t.Context(), d, dir, hostmount.Options{}); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", dir, err)
		}
		if err := r.Unmount(t.Context(), dir); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", dir, err)
		}
	}
	if err := os.Symlink("/tmp", r.at("link")); err != nil {
		t.Fatal(err)
	}
	r.refused(d, "link", hostmount.Options{}, errdefs.InvalidArgument, "link")

	used := disk(t, 16*mib)
	dev := loopdev.Of(t, used.Path)
	r.refused(used, "a", hostmount.Options{}, errdefs.FailedPrecondition, dev)
	if got := loopsOf(t, used.Path); len(got) != 1 || got[0] != dev {
		t.Errorf("loop devices %v, want %s", got, dev)
	}
	if err := os.MkdirAll(r.at("other"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", r.at("other"), "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	r.refused(disk(t, 16*mib), "other", hostmount.Options{}, errdefs.FailedPrecondition, "tmpfs")
	if err := r.Unmount(t.Context(), r.at("other")); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("the mount of another program: %v", err)
	}
	if err := unix.Unmount(r.at("other"), 0); err != nil {
		t.Errorf("it is gone: %v", err)
	}
}

// A hypervisor that has the disk is noticed by the locks that it has on it, and notices the mount in the same way.
func TestLocked(t *testing.T) {
	r, d := newRig(t), disk(t, 16*mib)
	r.mount(d, "a", hostmount.Options{})
	f, err := os.OpenFile(d.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	call := func(command int, at int64, kind int16) int16 {
		t.Helper()
		l := unix.Flock_t{Type: kind, Start: at, Len: 1}
		if err := unix.FcntlFlock(f.Fd(), command, &l); err != nil {
			t.Fatal(err)
		}
		return l.Type
	}
	locked := func(want map[int64]bool) {
		t.Helper()
		for at, want := range want {
			if got := call(unix.F_OFD_GETLK, at, unix.F_WRLCK) != unix.F_UNLCK; got != want {
				t.Errorf("byte %d is locked: %v", at, got)
			}
		}
	}
	locked(map[int64]bool{100: true, 101: true, 103: true, 200: false, 201: true, 203: true})
	r.unmount("a")
	locked(map[int64]bool{100: false, 101: false, 103: false, 200: false, 201: false, 203: false})
	r.mount(readOnly(d), "a", hostmount.Options{})
	r.mount(readOnly(d), "b", hostmount.Options{})
	locked(map[int64]bool{100: true, 101: false, 103: false, 200: false, 201: true, 203: true})
	r.unmount("a")
	r.unmount("b")
	call(unix.F_OFD_SETLK, 100, unix.F_RDLCK) // it reads
	call(unix.F_OFD_SETLK, 201, unix.F_RDLCK) // and lets nobody write
	r.refused(d, "a", hostmount.Options{}, errdefs.FailedPrecondition, "running VM")
	r.mount(readOnly(d), "a", hostmount.Options{})
	r.unmount("a")
	call(unix.F_OFD_SETLK, 101, unix.F_RDLCK) // it writes
	r.refused(readOnly(d), "a", hostmount.Options{}, errdefs.FailedPrecondition, "running VM")
}

// The store has a device open exclusively while it is attached.
func TestDevice(t *testing.T) {
	r := newRig(t)
	dev := loopdev.New(t, 64*mib)
	f, err := os.OpenFile(dev, os.O_RDONLY|unix.O_EXCL, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	d := vm.Disk{Path: dev, Format: vm.DiskRaw, Device: true}
	m := r.mount(d, "a", hostmount.Options{})
	if m.Path != dev {
		t.Errorf("%+v", m)
	}
	r.write("a")
	r.restart()
	if again := r.mount(d, "a", hostmount.Options{}); again != m {
		t.Errorf("mounted again: %+v, before %+v", again, m)
	}
	r.refused(d, "b", hostmount.Options{}, errdefs.FailedPrecondition, "already")
	r.unmount("a")
	clean(t, d)
}

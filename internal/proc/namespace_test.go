package proc

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/testkit/need"
)

// takeNamespace is what the test binary does as a process in a Root: it tries every system call that makes a user namespace, and prints what becomes of each.
func takeNamespace() {
	for _, sys := range []*syscall.SysProcAttr{{Cloneflags: unix.CLONE_NEWUSER}, {Unshareflags: unix.CLONE_NEWUSER}} {
		_, err := syscall.ForkExec("/proc/self/exe", []string{"nothing"}, &syscall.ProcAttr{Env: []string{"PROC_TEST_NOTHING=1"}, Sys: sys})
		fmt.Println(err)
	}
	args := struct{ flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls uint64 }{flags: unix.CLONE_NEWUSER, exitSignal: uint64(unix.SIGCHLD)}
	pid, _, errno := syscall.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&args)), unsafe.Sizeof(args), 0)
	if pid == 0 && errno == 0 { // the child, a copy that has only this thread
		for {
			_, _, _ = syscall.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
	}
	fmt.Println(errno)
}

// TestRootHasNoNamespaces: a process in a Root makes no user namespace, by which it would get capabilities: it could mount, lead cocoond elsewhere, and open
// for writing what it may only read.
func TestRootHasNoNamespaces(t *testing.T) {
	need.Root(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	exit, err := start(t, Spec{
		Path: self, Args: []string{"take-namespace"}, Env: []string{"PROC_TEST_NAMESPACE=1"}, Out: out,
		User: &User{UID: rootUser, GID: rootUser}, Isolated: true, Root: &Root{},
	}).Wait(t.Context())
	said, rerr := os.ReadFile(out.Name())
	const want = "operation not permitted\noperation not permitted\noperation not permitted\n"
	if err := errors.Join(err, rerr); err != nil || exit != (Exit{}) || string(said) != want {
		t.Errorf("%+v, %v: it said\n%swant\n%s", exit, err, said, want)
	}
}

// TestUnmountAll: whoever mounts at a place again and again keeps nobody there.
func TestUnmountAll(t *testing.T) {
	need.Root(t)
	at := t.TempDir()
	err := OnThread(func() error {
		if err := errors.Join(unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")); err != nil {
			return err
		}
		for n, ends := range map[int]bool{0: true, 3: true, maxMounts: true, maxMounts + 1: false} {
			for range n {
				if err := unix.Mount("tmpfs", at, "tmpfs", 0, "size=4k"); err != nil {
					return err
				}
			}
			if err := unmountAll(at); (err == nil) != ends {
				t.Errorf("%d mounts: %v", n, err)
			}
			if err := unmountAll(at); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const threadNS = "/proc/thread-self/ns/net"

// Space is a network namespace. The zero value is the process's own.
type Space struct{ Path string }

// Do runs fn on a thread inside the namespace. What fn opens stays inside; goroutines that it starts do not run inside.
func (s Space) Do(fn func() error) error {
	if s.Path == "" {
		return fn()
	}
	return s.apart(fn)
}

// Inside is Space.Do for an open namespace.
func Inside(f *os.File, fn func() error) error {
	return Space{Path: fmt.Sprintf("/proc/self/fd/%d", f.Fd())}.apart(fn)
}

func (s Space) apart(fn func() error) error {
	done := make(chan error, 1)
	go func() { done <- s.enter(fn) }()
	return <-done
}

// enter moves this goroutine's thread. A thread that cannot be moved back stays locked and so ends with the goroutine.
func (s Space) enter(fn func() error) error {
	runtime.LockOSThread()
	home, err := os.Open(threadNS)
	if err != nil {
		return fmt.Errorf("open own network namespace: %w", err)
	}
	defer home.Close()
	target, err := os.Open(s.Path)
	if errors.Is(err, fs.ErrNotExist) {
		runtime.UnlockOSThread()
		return errdefs.New(errdefs.FailedPrecondition, "network namespace %s does not exist; make it with `ip netns add %s`: %w", s.Path, filepath.Base(s.Path), err)
	}
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open network namespace: %w", err)
	}
	defer target.Close()
	if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		if errors.Is(err, unix.EINVAL) {
			return errdefs.Preconditionf("%s is not a network namespace; make one with `ip netns add %s`", s.Path, filepath.Base(s.Path))
		}
		return fmt.Errorf("enter network namespace %s: %w", s.Path, err)
	}
	err = fn()
	if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
		runtime.UnlockOSThread()
	}
	return err
}

// Open opens the namespace, which then lasts while the file is open.
// Errors: FailedPrecondition if there is none at the path.
func (s Space) Open() (*os.File, error) {
	f, err := os.OpenFile(s.Path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO does not block it
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errdefs.New(errdefs.FailedPrecondition, "there is no network namespace at %s: %w", s.Path, err)
	case err != nil:
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	kind, err := unix.IoctlRetInt(int(f.Fd()), unix.NS_GET_NSTYPE)
	if err != nil || kind != unix.CLONE_NEWNET {
		f.Close()
		return nil, errdefs.Preconditionf("%s is not a network namespace", s.Path)
	}
	return f, nil
}

// Here reports whether f is the namespace of the calling thread.
func Here(f *os.File) (bool, error) {
	var own, other unix.Stat_t
	if err := unix.Stat(threadNS, &own); err != nil {
		return false, fmt.Errorf("identify own network namespace: %w", err)
	}
	if err := unix.Fstat(int(f.Fd()), &other); err != nil {
		return false, fmt.Errorf("identify network namespace %s: %w", f.Name(), err)
	}
	return own.Dev == other.Dev && own.Ino == other.Ino, nil
}

// Identity identifies the namespace of the calling thread. A namespace created later under the same path has another identity.
func Identity() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot id: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Stat(threadNS, &st); err != nil {
		return "", fmt.Errorf("identify network namespace: %w", err)
	}
	return fmt.Sprintf("%s:%d", strings.TrimSpace(string(boot)), st.Ino), nil
}

// Exists reports whether there is a namespace at the path.
func (s Space) Exists() bool {
	var st unix.Statfs_t
	return unix.Statfs(s.Path, &st) == nil && st.Type == unix.NSFS_MAGIC
}

// Make creates the namespace if there is none, as `ip netns add` does. It uses a file that a crash or a reboot left.
func (s Space) Make() error {
	if s.Exists() {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(s.Path), 0o755); err != nil {
		return fmt.Errorf("make the folder of network namespaces: %w", err)
	}
	f, err := os.OpenFile(s.Path, os.O_CREATE|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("make network namespace %s: %w", s.Path, err)
	}
	f.Close()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread is in the new namespace, and it ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- unix.Mount(threadNS, s.Path, "", unix.MS_BIND, "")
	}()
	if err := <-done; err != nil {
		return errors.Join(fmt.Errorf("make network namespace %s: %w", s.Path, err), os.Remove(s.Path))
	}
	return nil
}

// Unmount removes the topmost namespace from the path, whose file stays. It is no error if there is none.
func (s Space) Unmount() error {
	if err := unix.Unmount(s.Path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove network namespace %s: %w", s.Path, err)
	}
	return nil
}

// Remove removes the namespace and the links in it, provided that no process is inside. It is no error if there is none.
func (s Space) Remove() error {
	if err := s.Unmount(); err != nil {
		return err
	}
	if err := os.Remove(s.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove network namespace %s: %w", s.Path, err)
	}
	return nil
}

package bridge

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

// space is the network namespace everything happens in. "" is the process's own.
type space struct{ path string }

// do runs fn on a thread inside the namespace. What fn opens stays inside; goroutines that it starts are not.
func (s space) do(fn func() error) error {
	if s.path == "" {
		return fn()
	}
	done := make(chan error, 1)
	go func() { done <- s.enter(fn) }()
	return <-done
}

// enter switches this goroutine's thread. A thread that cannot be switched back dies with the goroutine: it stays locked.
func (s space) enter(fn func() error) error {
	runtime.LockOSThread()
	home, err := os.Open(threadNS)
	if err != nil {
		return fmt.Errorf("open own network namespace: %w", err)
	}
	defer home.Close()
	target, err := os.Open(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		runtime.UnlockOSThread()
		return errdefs.New(errdefs.FailedPrecondition, "network namespace %s does not exist; make it with `ip netns add %s`: %w", s.path, filepath.Base(s.path), err)
	}
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open network namespace: %w", err)
	}
	defer target.Close()
	if err := unix.Setns(int(target.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		if errors.Is(err, unix.EINVAL) {
			return errdefs.Preconditionf("%s is not a network namespace; make one with `ip netns add %s`", s.path, filepath.Base(s.path))
		}
		return fmt.Errorf("enter network namespace %s: %w", s.path, err)
	}
	err = fn()
	if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
		runtime.UnlockOSThread()
	}
	return err
}

// identity names the namespace of the calling thread, different for one made later under the same path.
func identity() (string, error) {
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

// sysctl reads a value below /proc/sys/net of the calling thread's namespace.
func sysctl(key string) (string, error) {
	b, err := os.ReadFile(filepath.Join("/proc/sys/net", key))
	return strings.TrimSpace(string(b)), err
}

// setSysctl writes a value unless it is there already, which also serves hosts where /proc/sys is read-only.
func setSysctl(key, value string) error {
	if old, err := sysctl(key); err != nil || old == value {
		return err
	}
	if err := os.WriteFile(filepath.Join("/proc/sys/net", key), []byte(value), 0o644); err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "set sysctl net/%s to %s: %w; set it on the host", key, value, err)
	}
	return nil
}

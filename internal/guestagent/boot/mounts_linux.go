package boot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// mountKernel mounts the file systems that programs expect. Those that only some programs need may fail.
func mountKernel(root string) error {
	const safe = unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_NODEV
	for _, m := range []struct {
		kind, target string
		flags        uintptr
		options      string
		optional     bool
	}{
		{"devtmpfs", "dev", unix.MS_NOSUID, "mode=0755", false},
		{"proc", "proc", safe, "", false},
		{"sysfs", "sys", safe, "", false},
		{"tmpfs", "run", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755", false},
		{"devpts", "dev/pts", unix.MS_NOSUID | unix.MS_NOEXEC, "gid=5,mode=0620,ptmxmode=0666", false},
		{"tmpfs", "dev/shm", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777", false},
		{"mqueue", "dev/mqueue", safe, "", true},
		{"cgroup2", "sys/fs/cgroup", safe, "", true},
	} {
		target := filepath.Join(root, m.target)
		err := os.MkdirAll(target, 0o755)
		if err == nil {
			err = unix.Mount(m.kind, target, m.kind, m.flags, m.options)
		}
		if err != nil && !m.optional && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s on /%s: %w", m.kind, m.target, err)
		}
	}
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, filepath.Join(root, "dev", name)); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("make /dev/%s: %w", name, err)
		}
	}
	return nil
}

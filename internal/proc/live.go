package proc

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// LiveTree makes the folder dir a mount of its own, if it is none, and returns a mount, mounted nowhere yet, that follows it: what Attach
// mounts below dir appears there too, and nothing that is mounted there appears below dir. Nobody can write to the folder itself there,
// follow symbolic links, use device files or run programs. The caller closes it.
func LiveTree(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	there, err := Mounted(dir)
	if err == nil && !there {
		err = unix.Mount(dir, dir, "", unix.MS_BIND, "")
	}
	for _, flag := range []uintptr{unix.MS_PRIVATE, unix.MS_SHARED} { // a group of its own, not that of the host
		if err == nil {
			err = unix.Mount("", dir, "", flag, "")
		}
	}
	if err != nil {
		return nil, fmt.Errorf("make %s a mount: %w", dir, err)
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return nil, fmt.Errorf("clone the mount of %s: %w", dir, err)
	}
	tree := os.NewFile(uintptr(fd), "mount")
	attr := unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_NOSYMFOLLOW,
		Propagation: unix.MS_SLAVE,
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		_ = tree.Close()
		return nil, fmt.Errorf("limit the mount of %s: %w", dir, err)
	}
	return tree, nil
}

// Attach mounts tree, which is mounted nowhere yet, at the path at.
func Attach(tree *os.File, at string) error {
	fd, err := rawFd(tree)
	if err == nil {
		err = unix.MoveMount(int(fd), "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
	if err != nil {
		return fmt.Errorf("mount at %s: %w", at, err)
	}
	return nil
}

// Mounted reports whether something is mounted at a path.
func Mounted(at string) (bool, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, at, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &st)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for a mount at %s: %w", at, err)
	}
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// Detach unmounts all that is mounted at a path and below it, also what is in use. Idempotent.
func Detach(at string) error {
	for {
		there, err := Mounted(at)
		if !there || err != nil {
			return err
		}
		if err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount %s: %w", at, err)
		}
	}
}

// MountsBelow returns mount points below a folder, the innermost first.
func MountsBelow(dir string) []string {
	var all []string
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if fields := strings.Fields(s.Text()); len(fields) > 4 && fields[4] != dir && strings.HasPrefix(fields[4], strings.TrimSuffix(dir, "/")+"/") {
			all = append(all, fields[4])
		}
	}
	slices.Reverse(all)
	return all
}

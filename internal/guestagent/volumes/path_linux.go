package volumes

import (
	"errors"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// resolve opens a path of the guest as a reference (O_PATH). It follows links as programs of the guest would, except
// links of /proc, which may lead anywhere.
func resolve(name string) (int, error) {
	return openat2(unix.AT_FDCWD, name, unix.RESOLVE_NO_MAGICLINKS)
}

// beneath opens name in the folder dir, without leaving the folder.
func beneath(dir int, name string) (int, error) {
	return openat2(dir, name, unix.RESOLVE_BENEATH|unix.RESOLVE_NO_MAGICLINKS|unix.RESOLVE_NO_XDEV)
}

func openat2(dir int, name string, how uint64) (int, error) {
	for {
		fd, err := unix.Openat2(dir, name, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: how})
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) { // EAGAIN: a rename at the same time
			return fd, err
		}
	}
}

// within is resolve for a path in the folder root; no link can lead out of root.
func within(root int, name string) (int, error) {
	return openat2(root, name, unix.RESOLVE_IN_ROOT|unix.RESOLVE_NO_MAGICLINKS)
}

// target opens the folder or file in root where a volume is to be mounted, and makes missing parts of its path. The
// image may have put a link there: it is followed unless it leads to the root or to a kernel file system.
func target(root int, name string, folder bool) (int, error) {
	fd, err := within(root, "/")
	if err != nil {
		return -1, err
	}
	at, parts := "", strings.Split(strings.Trim(name, "/"), "/")
	for i, part := range parts {
		at += "/" + part
		dir := folder || i < len(parts)-1
		next, err := step(root, fd, at, part, dir)
		unix.Close(fd)
		if err != nil {
			return -1, err
		}
		fd = next
	}
	if err := mountable(root, fd, name, folder); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// step opens the path at, whose last part is in the folder parent, and makes it if it is missing.
func step(root, parent int, at, part string, folder bool) (int, error) {
	fd, err := within(root, at)
	switch {
	case errors.Is(err, unix.ENOTDIR): // see below
	case !errors.Is(err, unix.ENOENT):
		return fd, err
	case folder:
		err = unix.Mkdirat(parent, part, 0o755)
	case strings.HasPrefix(at, "/dev/"): // all containers see it: no device, so that nobody writes to a file by mistake
		err = unix.Mknodat(parent, part, unix.S_IFCHR, 0)
	default:
		var file int
		if file, err = unix.Openat(parent, part, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644); err == nil {
			unix.Close(file)
		}
	}
	switch {
	case errors.Is(err, unix.EEXIST):
		return -1, errdefs.Invalidf("%s is a broken symbolic link of the image", at)
	case errors.Is(err, unix.ENOTDIR):
		return -1, errdefs.Invalidf("%s is a file of the image", path.Dir(at))
	case err != nil:
		return -1, err
	}
	return within(root, at)
}

// mountable rejects paths that must not be mounted over.
func mountable(root, fd int, name string, folder bool) error {
	var st, top unix.Stat_t
	var fs unix.Statfs_t
	if err := errors.Join(unix.Fstat(fd, &st), unix.Fstat(root, &top), unix.Fstatfs(fd, &fs)); err != nil {
		return err
	}
	isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR
	switch {
	case st.Dev == top.Dev && st.Ino == top.Ino:
		return errdefs.Invalidf("%s leads to the root folder in this image", name)
	case fs.Type == unix.PROC_SUPER_MAGIC || fs.Type == unix.SYSFS_MAGIC || fs.Type == unix.CGROUP2_SUPER_MAGIC:
		return errdefs.Invalidf("%s leads to a file system of the kernel in this image", name)
	case folder && !isDir:
		return errdefs.Invalidf("%s is a file in this image, and the volume is a folder", name)
	case !folder && isDir:
		return errdefs.Invalidf("%s is a folder in this image, and the sub-path names a file", name)
	}
	return nil
}

// subFolder opens a folder inside a volume that starts empty. It makes missing parts of its path with the mode and
// group of the volume.
func subFolder(root int, name string, group *int64) (int, error) {
	var st unix.Stat_t
	if err := unix.Fstat(root, &st); err != nil {
		return -1, err
	}
	return subFolderBy(root, name, func(parent int, part string) error { return makeShared(parent, part, st.Mode&unix.S_ISVTX, group) })
}

// subFolderAlike opens a folder inside a volume. It makes missing parts of its path with the permissions of the volume's root.
func subFolderAlike(root int, name string) (int, error) {
	var st unix.Stat_t
	if err := unix.Fstat(root, &st); err != nil {
		return -1, err
	}
	return subFolderBy(root, name, func(parent int, part string) error {
		if err := unix.Mkdirat(parent, part, st.Mode&0o777); err != nil {
			return err
		}
		// The agent may not be one of the processes that /proc of a container shows, so the folder is opened and not only referred to.
		fd, err := unix.Openat(parent, part, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Fchmod(fd, st.Mode&permissions) // independent of the umask
	})
}

func subFolderBy(root int, name string, mkdir func(parent int, part string) error) (int, error) {
	at := ""
	for _, part := range strings.Split(name, "/") {
		parent, up := root, at
		at = path.Join(at, part)
		fd, err := beneath(root, at)
		if err == nil {
			unix.Close(fd)
			continue
		}
		if !errors.Is(err, unix.ENOENT) {
			return -1, err
		}
		if up != "" {
			if parent, err = beneath(root, up); err != nil {
				return -1, err
			}
			defer unix.Close(parent)
		}
		if err := mkdir(parent, part); err != nil {
			return -1, err
		}
	}
	return beneath(root, name)
}

func makeShared(parent int, name string, sticky uint32, group *int64) error {
	if err := unix.Mkdirat(parent, name, 0o777); err != nil {
		return err
	}
	fd, err := unix.Openat(parent, name, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return share(fd, sticky, group)
}

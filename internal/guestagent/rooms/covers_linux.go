package rooms

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Covers are the parts of a room that its programs do not see, or cannot change.
type Covers struct {
	ReadOnlyRoot bool     // only what is mounted in the room can be written to
	Masked       []string // paths at which there is an empty file or folder
	ReadOnly     []string // paths that cannot be written to, with all that is mounted there
}

// impose makes the covers in the mount namespace of the thread, whose root is the room. Paths that do not exist are left out.
func (c Covers) impose() error {
	for _, name := range c.Masked {
		if err := cover(name, emptyAlike); err != nil {
			return fmt.Errorf("mask %s: %w", name, err)
		}
	}
	for _, name := range c.ReadOnly {
		if err := cover(name, frozen); err != nil {
			return fmt.Errorf("make %s read-only: %w", name, err)
		}
	}
	if c.ReadOnlyRoot {
		return protect()
	}
	return nil
}

// MountProc mounts the kernel's files about the processes that this one sees at /proc of its root, over what is there, with the covers of c that
// are below it.
func MountProc(c Covers) error {
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	elsewhere := func(name string) bool { return name != "/proc" && !strings.HasPrefix(name, "/proc/") }
	return Covers{
		Masked:   slices.DeleteFunc(slices.Clone(c.Masked), elsewhere),
		ReadOnly: slices.DeleteFunc(slices.Clone(c.ReadOnly), elsewhere),
	}.impose()
}

// cover mounts what with returns at a path of the room, if there is something. Links of the image are followed inside of the room, those
// of /proc are not: they may lead anywhere.
func cover(name string, with func(fd int) (tree int, err error)) error {
	fd, err := open(name, unix.RESOLVE_NO_MAGICLINKS)
	switch {
	case errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR):
		return nil
	case errors.Is(err, unix.ELOOP):
		return errdefs.Invalidf("in this image, it is a symbolic link that leads nowhere, or through a link of /proc")
	case err != nil:
		return err
	}
	defer unix.Close(fd)
	root, err := open("/", 0)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	same, err := sameFile(fd, root)
	if err != nil {
		return err
	}
	if same {
		return errdefs.Invalidf("it leads to the root folder in this image")
	}
	tree, err := with(fd)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	return unix.MoveMount(tree, "", fd, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
}

// open opens a path as a reference.
func open(name string, how uint64) (int, error) {
	for {
		fd, err := unix.Openat2(unix.AT_FDCWD, name, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: how})
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) { // EAGAIN: a rename at the same time
			return fd, err
		}
	}
}

func sameFile(a, b int) (bool, error) {
	var x, y unix.Stat_t
	err := errors.Join(unix.Fstat(a, &x), unix.Fstat(b, &y))
	return x.Dev == y.Dev && x.Ino == y.Ino, err
}

// frozen returns a mount of what fd refers to, and of all that is mounted there, that cannot be written to.
func frozen(fd int) (int, error) {
	tree, err := unix.OpenTree(fd, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH|unix.AT_RECURSIVE)
	if err != nil {
		return -1, fmt.Errorf("clone its mount: %w", err)
	}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
		unix.Close(tree)
		return -1, err
	}
	return tree, nil
}

// emptyAlike returns a mount of an empty folder if fd refers to a folder, and otherwise one of /dev/null.
func emptyAlike(fd int) (int, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return -1, err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return emptyFolder()
	}
	null, err := unix.Open("/dev/null", unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer unix.Close(null)
	if err := unix.Fstat(null, &st); err != nil {
		return -1, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != unix.Mkdev(1, 3) { // containers of the guest share its /dev
		return -1, errdefs.Preconditionf("a program has replaced /dev/null in the guest, which would cover the file; start the pod again")
	}
	return unix.OpenTree(null, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
}

// emptyFolder returns a mount of an empty folder that nobody can write to.
func emptyFolder() (int, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetString(fs, "mode", "0555"); err != nil {
		return -1, err
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, err
	}
	return unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
}

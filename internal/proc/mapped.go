package proc

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// IDs are the users and groups of the host that the users and groups 0 to Count-1 of a user namespace are.
type IDs struct{ Base, Count uint32 }

func (m IDs) mappings() []syscall.SysProcIDMap {
	return []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(m.Base), Size: int(m.Count)}}
}

// Mount is a mount that only one process sees.
type Mount struct {
	Tree *os.File // from open_tree(2), mounted nowhere yet; the caller closes it
	Name string   // one element of a path; see Path
	File string   // not "": Tree is that of a file, which is in the folder Path under this name, alone
}

// mountsDir is the folder in which a process sees its Mount. Each host has this folder. The process does not see the host's files in it.
const mountsDir = "/tmp"

// Path is where the process sees the mount.
func (m Mount) Path() string { return filepath.Join(mountsDir, m.Name) }

// show puts the mount into a new mount namespace of this thread. Preconditions: the thread shares its folders with no other.
func (m Mount) show() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("keep mounts to their namespace: %w", err)
	}
	if err := unix.Mount("tmpfs", mountsDir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755,size=64k"); err != nil {
		return fmt.Errorf("make a place for a mount: %w", err)
	}
	if err := os.Mkdir(m.Path(), 0o755); err != nil {
		return fmt.Errorf("make a place for a mount: %w", err)
	}
	at := m.Path()
	if m.File != "" {
		at = filepath.Join(at, m.File)
		if err := os.WriteFile(at, nil, 0o444); err != nil {
			return fmt.Errorf("make a place for a mount: %w", err)
		}
	}
	tree, err := rawFd(m.Tree)
	if err == nil {
		err = unix.MoveMount(int(tree), "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
	if err != nil {
		return fmt.Errorf("mount at %s: %w", at, err)
	}
	return nil
}

// UserNamespace returns a user namespace with these ids. The caller closes it.
func UserNamespace(ids IDs) (ns *os.File, err error) {
	return userNamespace(ids.mappings(), ids.mappings())
}

func userNamespace(uids, gids []syscall.SysProcIDMap) (ns *os.File, err error) {
	err = OnThread(func() (err error) {
		// Only a process can have a new user namespace. This one stops before its first instruction, because it is traced. The
		// kernel kills it when this thread ends.
		pid, err := syscall.ForkExec("/proc/self/exe", []string{"userns"}, &syscall.ProcAttr{Dir: "/", Sys: &syscall.SysProcAttr{
			Cloneflags: syscall.CLONE_NEWUSER, UidMappings: uids, GidMappings: gids, Ptrace: true, Pdeathsig: syscall.SIGKILL,
		}})
		if err != nil {
			return err
		}
		ns, err = os.Open(fmt.Sprintf("/proc/%d/ns/user", pid))
		_ = unix.Kill(pid, unix.SIGKILL) // our own unreaped child still owns this pid
		_, werr := unix.Wait4(pid, nil, 0, nil)
		return errors.Join(err, werr)
	})
	if err != nil {
		return nil, fmt.Errorf("make a user namespace: %w", err)
	}
	return ns, nil
}

// Tree says what a MappedTree has.
type Tree struct {
	ReadOnly      bool // nobody can write to it
	Below         bool // also what is mounted below the folder now
	ReadOnlyBelow bool // nobody can write to that either
}

// MappedTree returns a mount, mounted nowhere yet, of the folder or file dir, open in any way. A process with
// the same ids sees and makes files there with the owners that they have on the disk. Nobody can follow symbolic links there, use
// device files or run programs. It needs Linux 5.14.
// Errors: Unsupported if one of its file systems, or the kernel, cannot do that.
func MappedTree(dir *os.File, ids IDs, t Tree) (*os.File, error) {
	ns, err := UserNamespace(ids)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	at, err := rawFd(dir)
	if err != nil {
		return nil, err
	}
	deep := uint(0)
	if t.Below {
		deep = unix.AT_RECURSIVE
	}
	fd, err := unix.OpenTree(int(at), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH|deep)
	if err != nil {
		return nil, fmt.Errorf("clone the mount: %w", err)
	}
	tree := os.NewFile(uintptr(fd), "mount")
	attr := unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_IDMAP | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC | unix.MOUNT_ATTR_NOSYMFOLLOW,
		Userns_fd:   uint64(ns.Fd()),
		Propagation: unix.MS_PRIVATE, // otherwise to unmount it would unmount what the host has mounted below the folder
	}
	top := unix.MountAttr{}
	switch {
	case t.ReadOnly && (!t.Below || t.ReadOnlyBelow):
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	case t.ReadOnly:
		top.Attr_set = unix.MOUNT_ATTR_RDONLY
	}
	err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|deep, &attr)
	if err == nil && top.Attr_set != 0 {
		err = unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &top)
	}
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EPERM):
		err = errdefs.Unsupportedf("its file system cannot be shared with a guest, because Linux cannot map its users (ext4, xfs and btrfs can, from Linux 5.14): %w", err)
	case err != nil:
		err = fmt.Errorf("map the users of the mount: %w", err)
	}
	if err != nil {
		_ = tree.Close()
		return nil, err
	}
	return tree, nil
}

// LimitFiles sets how many descriptors the process may have open: n, or what the host allows this process at most.
func (p *Process) LimitFiles(n uint64) error {
	if text, err := os.ReadFile("/proc/sys/fs/nr_open"); err == nil {
		if most, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err == nil {
			n = min(n, most)
		}
	}
	limit, had := unix.Rlimit{Cur: n, Max: n}, unix.Rlimit{}
	err := unix.Prlimit(p.pid, unix.RLIMIT_NOFILE, nil, &had)
	if err == nil {
		err = unix.Prlimit(p.pid, unix.RLIMIT_NOFILE, &limit, nil)
	}
	if errors.Is(err, unix.EPERM) { // only with CAP_SYS_RESOURCE can it be more than this process may have
		limit.Cur, limit.Max = min(n, had.Max), min(n, had.Max)
		err = unix.Prlimit(p.pid, unix.RLIMIT_NOFILE, &limit, nil)
	}
	if err != nil {
		return fmt.Errorf("limit the files of process %d: %w", p.pid, err)
	}
	return nil
}

package proc

import (
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Root is a file system of its own for a process: a tmpfs that has what is named here, the program itself and a /proc that shows no process of
// another user. Nothing else of the host can be reached from it, and nothing in it can be written except where Root says so. Nobody can use
// set-user-ID files there, or device files that are not named, or make a user namespace. The files of the host do not change, and nothing has to be undone when the process has
// ended. It needs Linux 5.12.
type Root struct {
	Files   []RootFile
	Devices []string // character devices, at their paths; the process may read and write them
	Places  []string // empty files that nobody can write to; Process.Show puts others there
	Folders []string // empty folders that nobody can write to; Process.Show puts others there
}

// RootFile is something of the host in a Root.
type RootFile struct {
	// At is where the process finds it: an absolute, clean path.
	At string
	// File is what it finds, opened in any way; the caller closes it. The process can open a file or a block device as its owner can, whoever that is.
	// A folder it sees as it is: with its owners, and with all that is in it.
	File     *os.File
	ReadOnly bool // of a file or a folder: nobody can write to it there. A block device cannot be opened for writing
	Scratch  bool // File is from NewScratch, and becomes visible in this root alone
}

// NewScratch returns a folder of user, empty and in a file system of its own, which is in memory and mounted nowhere yet. It has at most size bytes and
// that many files. Its memory is free again when the process that has it in its Root has ended, and File is closed.
func NewScratch(user User, size int64, files int) (*os.File, error) {
	fd, err := newTmpfs(map[string]string{
		"mode": "0700", "uid": strconv.FormatUint(uint64(user.UID), 10), "gid": strconv.FormatUint(uint64(user.GID), 10),
		"size": strconv.FormatInt(size, 10), "nr_inodes": strconv.Itoa(files + 1),
	})
	if err != nil {
		return nil, fmt.Errorf("make a folder for a process: %w", err)
	}
	return os.NewFile(uintptr(fd), "scratch"), nil
}

// libraries are where a program that is not static finds its loader and libraries.
var libraries = []string{"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"}

// newRoot is where a Root is made, in the namespace that holds no file of the host.
const newRoot = "/new"

// empty is a mount namespace that has nothing but the folder newRoot: a new namespace is a copy of another, and this one is quickly copied.
var empty = sync.OnceValues(func() (ns *os.File, err error) {
	err = OnThread(func() error {
		if ns, err = newEmpty(); err != nil {
			return fmt.Errorf("make an empty mount namespace: %w", err)
		}
		return nil
	})
	return ns, err
})

func newEmpty() (*os.File, error) {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return nil, err
	}
	ns, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return nil, err
	}
	if err := empties(int(ns.Fd())); err != nil {
		_ = ns.Close()
		return nil, err
	}
	return ns, nil
}

// empties makes a tmpfs the root of the namespace ns, in which this thread is, and unmounts all else. Where the root is the initial file system of the
// kernel, which nobody can unmount, the tmpfs is above it, and what the host unmounts is unmounted there, too.
func empties(ns int) error {
	err := unix.Setns(ns, unix.CLONE_NEWNS) // the namespace's own root, wherever that of this process is
	if err == nil {
		err = unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, "")
	}
	if err != nil {
		return err
	}
	dir, err := newTmpfs(map[string]string{"mode": "0755", "size": "64k"})
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(dir) }()
	err = unix.Mkdirat(dir, newRoot[1:], 0o755)
	if err == nil {
		err = unix.MoveMount(dir, "", unix.AT_FDCWD, "/", unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
	if err == nil {
		err = unix.Fchdir(dir)
	}
	if err == nil {
		err = pivot()
	}
	if err != nil && !errors.Is(err, unix.EINVAL) {
		return err
	}
	if err := unix.Setns(ns, unix.CLONE_NEWNS); err != nil { // the uppermost mount there
		return err
	}
	return unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")
}

// newTmpfs returns a tmpfs that is mounted nowhere yet.
func newTmpfs(options map[string]string) (int, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(fs) }()
	for key, value := range options {
		if err := unix.FsconfigSetString(fs, key, value); err != nil {
			return -1, err
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, err
	}
	return unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
}

// pivot makes the mount of the working folder the root of this thread, and unmounts the root before.
func pivot() error {
	err := unix.PivotRoot(".", ".") // the old root is then mounted over the new one
	if err == nil {
		err = unix.Unmount(".", unix.MNT_DETACH)
	}
	if err == nil {
		err = unix.Chdir("/")
	}
	return err
}

// placed is what a Root consists of. Its mounts exist, but are mounted nowhere yet.
type placed struct {
	user  User
	parts []part
}

// part is one entry of a Root.
type part struct {
	at   string
	fd   int    // of a mount, from open_tree(2); -1 for a link or a device
	mode uint32 // its type, and the permissions of a device
	link string // target of a link
	rdev int
}

// place makes the mounts that s.Root names. The caller closes them.
func (s Spec) place() (p *placed, err error) {
	p = &placed{user: User{UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}}
	if s.User != nil {
		p.user = *s.User
	}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	if err := p.program(s.Path); err != nil {
		return p, err
	}
	for _, path := range s.Root.Devices {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return p, errdefs.Unavailablef("device %s: %w", path, err)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFCHR {
			return p, errdefs.Preconditionf("%s is no character device", path)
		}
		p.parts = append(p.parts, part{at: path, fd: -1, mode: unix.S_IFCHR | 0o600, rdev: int(st.Rdev)})
	}
	for mode, all := range map[uint32][]string{unix.S_IFREG: s.Root.Places, unix.S_IFDIR: s.Root.Folders} {
		for _, at := range all {
			if !clean(at) {
				return p, errdefs.Invalidf("%q is no absolute, clean path", at)
			}
			p.parts = append(p.parts, part{at: at, fd: -1, mode: mode})
		}
	}
	spaces := spaces{}
	defer spaces.close()
	for _, f := range s.Root.Files {
		t, err := p.file(f, spaces)
		if err != nil {
			return p, fmt.Errorf("place %s in the root of %s: %w", f.At, s.Path, err)
		}
		p.parts = append(p.parts, t)
	}
	return p, nil
}

func (p *placed) close() {
	for _, t := range p.parts {
		if t.fd >= 0 {
			_ = unix.Close(t.fd)
		}
	}
}

// program adds the program, and what it needs to run.
func (p *placed) program(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return errdefs.Preconditionf("program %s: %w", path, err)
	}
	dynamic := false
	for _, part := range f.Progs {
		dynamic = dynamic || part.Type == elf.PT_INTERP
	}
	_ = f.Close()
	all := []string{path}
	if dynamic {
		all = append(all, libraries...)
	}
	for _, path := range all {
		if target, err := os.Readlink(path); err == nil && path != all[0] { // such as /lib -> usr/lib
			p.parts = append(p.parts, part{at: path, fd: -1, link: target, mode: unix.S_IFLNK})
			continue
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); errors.Is(err, unix.ENOENT) && path != all[0] {
			continue
		} else if err != nil {
			return errdefs.Preconditionf("program %s: %w", path, err)
		}
		fd, err := cloneMount(unix.AT_FDCWD, path, 0)
		if err != nil {
			return err
		}
		p.parts = append(p.parts, part{at: path, fd: fd, mode: st.Mode})
		if err := setMount(fd, unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}); err != nil {
			return err
		}
	}
	return nil
}

func clean(path string) bool {
	return filepath.IsAbs(path) && filepath.Clean(path) == path && path != "/"
}

// spaces are user namespaces by the owner that they map.
type spaces map[[2]uint32]*os.File

func (s spaces) close() {
	for _, ns := range s {
		_ = ns.Close()
	}
}

// file makes the mount of one file, folder or block device.
func (p *placed) file(f RootFile, spaces spaces) (part, error) {
	if !clean(f.At) {
		return part{}, errdefs.Invalidf("%q is no absolute, clean path", f.At)
	}
	of, err := rawFd(f.File)
	if err != nil {
		return part{}, err
	}
	if f.Scratch {
		fd, err := unix.FcntlInt(of, unix.F_DUPFD_CLOEXEC, 0)
		return part{at: f.At, fd: fd, mode: unix.S_IFDIR}, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(of), &st); err != nil {
		return part{}, err
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC}
	if f.ReadOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		mode := uint32(unix.S_IFBLK | 0o600)
		if f.ReadOnly {
			mode = unix.S_IFBLK | 0o400
		}
		return part{at: f.At, fd: -1, mode: mode, rdev: int(st.Rdev)}, nil
	case unix.S_IFREG:
		if f.ReadOnly && st.Mode&0o004 != 0 { // everybody may read it, whatever its file system can do
			break
		}
		if st.Uid == p.user.UID && st.Gid == p.user.GID { // it is the user's own
			break
		}
		owner := [2]uint32{st.Uid, st.Gid}
		if spaces[owner] == nil {
			ns, err := userNamespace(asUser(st.Uid, p.user.UID), asUser(st.Gid, p.user.GID))
			if err != nil {
				return part{}, err
			}
			spaces[owner] = ns
		}
		attr.Attr_set |= unix.MOUNT_ATTR_IDMAP
		attr.Userns_fd = uint64(spaces[owner].Fd())
	case unix.S_IFDIR:
	default:
		return part{}, errdefs.Preconditionf("%s is neither a file nor a folder nor a block device", f.File.Name())
	}
	fd, err := cloneMount(int(of), "", unix.AT_EMPTY_PATH)
	if err != nil {
		return part{}, err
	}
	if err := setMount(fd, attr); err != nil {
		_ = unix.Close(fd)
		if attr.Attr_set&unix.MOUNT_ATTR_IDMAP != 0 {
			err = notGiven(f.File.Name(), err)
		}
		return part{}, err
	}
	return part{at: f.At, fd: fd, mode: st.Mode}, nil
}

// notGiven explains err, by which the owner of name could not be mapped.
func notGiven(name string, err error) error {
	if !errdefs.Is(err, errdefs.Unsupported) {
		return err
	}
	return errdefs.Unsupportedf("%s is on a file system on which Linux cannot give it to the user of a VM; move it to ext4, xfs or btrfs (or tmpfs, from Linux 6.3): %w", name, err)
}

// CanGive reports whether a Root could have the files in the folder dir that only their owner can use. It changes nothing, and needs root.
// Errors: Unsupported if the file system of dir, or the kernel, cannot do that; Unavailable without user namespaces; NotFound.
func CanGive(dir string) error {
	fd, err := cloneMount(unix.AT_FDCWD, dir, 0)
	if errors.Is(err, unix.ENOENT) {
		return errdefs.NotFoundf("%s is not there", dir)
	}
	if errors.Is(err, unix.ENOSYS) {
		return notGiven(dir, errdefs.Unsupportedf("clone a mount (Linux 5.12 can): %w", err))
	}
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	ns, err := userNamespace(asUser(0, 1), asUser(0, 1))
	if err != nil {
		return errdefs.Unavailablef("no user namespace can be made, see the sysctl user.max_user_namespaces: %w", err)
	}
	defer ns.Close()
	return notGiven(dir, setMount(fd, unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(ns.Fd())}))
}

// asUser makes the owner on the disk appear as user.
func asUser(owner, user uint32) []syscall.SysProcIDMap {
	return []syscall.SysProcIDMap{{ContainerID: int(owner), HostID: int(user), Size: 1}}
}

func cloneMount(at int, path string, flags uint) (int, error) {
	fd, err := unix.OpenTree(at, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|flags)
	if err != nil {
		return -1, fmt.Errorf("clone a mount: %w", err)
	}
	return fd, nil
}

// setMount returns Unsupported if the file system or the kernel cannot do that.
func setMount(fd int, attr unix.MountAttr) error {
	attr.Propagation = unix.MS_PRIVATE
	err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
		return errdefs.Unsupportedf("limit a mount (Linux 5.12 can): %w", err)
	}
	if err != nil {
		return fmt.Errorf("limit a mount: %w", err)
	}
	return nil
}

// show makes the root that of this thread. Preconditions: the thread shares its folders with no other.
func (p *placed) show() error {
	ns, err := empty()
	if err != nil {
		return err
	}
	fd, err := rawFd(ns)
	if err != nil {
		return err
	}
	// A thread that shares its working directory with other threads cannot leave their mount namespace.
	err = unix.Unshare(unix.CLONE_FS)
	if err == nil {
		err = unix.Setns(int(fd), unix.CLONE_NEWNS)
	}
	if err == nil {
		err = unix.Unshare(unix.CLONE_NEWNS)
	}
	if err == nil {
		err = unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, "")
	}
	if err == nil { // without MS_NODEV: it has the nodes of devices, of which nobody can make more
		err = unix.Mount("tmpfs", newRoot, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0755,size=256k")
	}
	if err != nil {
		return fmt.Errorf("make a root: %w", err)
	}
	for _, t := range p.parts {
		if err := p.mount(t); err != nil {
			return fmt.Errorf("make a root: %s: %w", t.at, err)
		}
	}
	if err := p.proc(); err != nil {
		return fmt.Errorf("make a root: %w", err)
	}
	// What is above the root stays, and is empty. Linux lets nobody make a user namespace whose root is not the one of its mount namespace, by whatever
	// system call. In one, the process would have capabilities: it could mount, and open for writing what it may only read.
	if err = unix.Chroot(newRoot); err == nil {
		err = unix.Chdir("/")
	}
	if err == nil {
		err = unix.MountSetattr(unix.AT_FDCWD, "/", 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	}
	if err != nil {
		return fmt.Errorf("enter a root: %w", err)
	}
	return nil
}

// mount puts t at its place.
func (p *placed) mount(t part) error {
	at := newRoot + t.at
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	switch t.mode & unix.S_IFMT {
	case unix.S_IFLNK:
		return os.Symlink(t.link, at)
	case unix.S_IFCHR, unix.S_IFBLK:
		if err := unix.Mknod(at, t.mode, t.rdev); err != nil {
			return err
		}
		return errors.Join(unix.Chown(at, int(p.user.UID), int(p.user.GID)), unix.Chmod(at, t.mode&0o777))
	case unix.S_IFDIR:
		if err := os.Mkdir(at, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if t.fd < 0 {
			return nil
		}
	default:
		if err := os.WriteFile(at, nil, 0o444); err != nil || t.fd < 0 {
			return err
		}
	}
	return unix.MoveMount(t.fd, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// proc mounts a /proc that has the processes of the same user, and nothing else of the kernel.
func (p *placed) proc() error {
	if err := os.Mkdir(newRoot+"/proc", 0o555); err != nil {
		return err
	}
	err := unix.Mount("proc", newRoot+"/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "hidepid=invisible,subset=pid")
	if errors.Is(err, unix.EINVAL) {
		return errdefs.Unsupportedf("mount /proc: Linux 5.8 or newer is needed: %w", err)
	}
	return err
}

// Package hostdir knows which folders of the node may be shared with guests, and opens them.
//
// A path with a symbolic link in it is refused. So a path is its own resolved path, comparing paths as text is exact, and a link that
// somebody puts there later leads nowhere. The package shares and mounts nothing.
package hostdir

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Setting is the name of the setting that lists the folders, for messages.
const Setting = "hostPaths"

// Allowed is one entry of the list.
type Allowed struct {
	Namespace string // whose VMs may have it; "": those of all namespaces
	Path      string // the folder, and all that is below it; clean and absolute
	ReadOnly  bool   // no VM may write to it
}

// List are the folders that may be shared. The operator of the node may share those of all namespaces.
type List []Allowed

// Parse reads entries of the form [NAMESPACE=]/PATH[:ro].
// Errors: InvalidArgument, also if two entries are for the same folder and namespace.
func Parse(entries []string) (List, error) {
	var list List
	for _, e := range entries {
		var a Allowed
		rest := e
		if !strings.HasPrefix(e, "/") {
			var ok bool
			if a.Namespace, rest, ok = strings.Cut(e, "="); !ok || a.Namespace == "" {
				return nil, errdefs.Invalidf("%s: %q is not /PATH, /PATH:ro or NAMESPACE=/PATH", Setting, e)
			}
		}
		a.Path, a.ReadOnly = strings.CutSuffix(rest, ":ro")
		if err := Clean(a.Path); err != nil {
			return nil, fmt.Errorf("%s: %w", Setting, err)
		}
		for _, b := range list {
			if a.Namespace == b.Namespace && a.Path == b.Path {
				return nil, errdefs.Invalidf("%s: %s is there twice", Setting, e)
			}
		}
		list = append(list, a)
	}
	return list, nil
}

// Clean returns an InvalidArgument error unless p is absolute and has no empty, "." or ".." part.
func Clean(p string) error {
	if !strings.HasPrefix(p, "/") || path.Clean(p) != p || strings.IndexByte(p, 0) >= 0 || len(p) >= unix.PathMax {
		return errdefs.Invalidf("%q is not an absolute path without empty, \".\" and \"..\" parts", p)
	}
	return nil
}

// CheckPaths returns an InvalidArgument error if an entry has a symbolic link in its path, is no folder, or contains or is inside one
// of private, which are folders that no guest may see. A folder that does not exist yet is no error.
func (l List) CheckPaths(private ...string) error {
	for _, a := range l {
		for _, p := range private {
			if below(p, a.Path) || below(a.Path, p) {
				return errdefs.Invalidf("%s: %s would share %s, which holds what all VMs have; name another folder", Setting, a.Path, p)
			}
		}
		fd, err := open(a.Path)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return errdefs.Invalidf("%s: %w", Setting, explain(a.Path, err))
		}
		_ = unix.Close(fd)
	}
	return nil
}

// Find returns the entry by which a VM of namespace ("": the operator's) may have the folder p. The deepest entry decides: one for the
// namespace before one for all.
// Errors: InvalidArgument for a path that is not clean, FailedPrecondition if there is no such entry, or if write and it is read-only.
func (l List) Find(namespace, p string, write bool) (Allowed, error) {
	if err := Clean(p); err != nil {
		return Allowed{}, err
	}
	var best Allowed
	for _, a := range l {
		if a.Namespace != "" && a.Namespace != namespace && namespace != "" || !below(p, a.Path) {
			continue
		}
		if len(a.Path) > len(best.Path) || len(a.Path) == len(best.Path) && best.Namespace == "" {
			best = a
		}
	}
	switch {
	case best.Path == "":
		return best, errdefs.Preconditionf("%s on the node is not below a folder that its operator has allowed for this namespace (%s of cocoond)", p, Setting)
	case write && best.ReadOnly:
		return best, errdefs.Preconditionf("the folder %s of the node may only be shared read-only (%s of cocoond); ask for it read-only", p, Setting)
	}
	return best, nil
}

// below reports whether p is dir or inside it.
func below(p, dir string) bool {
	return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/")
}

// Open opens the folder p, which is below the allowed folder root, or with file the regular file p, as a reference (O_PATH). With create, missing
// folders below root are made with mode 0755. A missing file is made with mode 0644 and without content, in a folder that is there.
// Errors: FailedPrecondition if it is missing, something else, or has a symbolic link in its path.
func Open(root, p string, create, file bool) (*os.File, error) {
	if !file {
		return openFolder(root, p, create)
	}
	if err := Clean(p); err != nil {
		return nil, err
	}
	dir, err := openFolder(root, path.Dir(p), false)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	fd, err := openFile(int(dir.Fd()), path.Base(p), create)
	if err != nil {
		return nil, explainFile(p, err)
	}
	f := os.NewFile(uintptr(fd), p)
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = errdefs.Preconditionf("%s on the node is not a file", p)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// OpenData opens the regular file p, which is below the allowed folder root, for reading and with write also for writing.
// Errors: as those of Open.
func OpenData(root, p string, write bool) (*os.File, error) {
	f, err := Open(root, p, false, true)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	flag := os.O_RDONLY
	if write {
		flag = os.O_RDWR
	}
	data, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), flag, 0) // the same file, whatever the path means by now
	if err != nil {
		return nil, errdefs.Preconditionf("open the file %s of the node: %w", p, err)
	}
	return data, nil
}

// CreateData makes the file p with size bytes, all of them holes, unless there is something called p. Missing folders below root are made. The file exists
// with its size, or not at all. Only root may read and write it.
// Errors: as those of Open.
func CreateData(root, p string, size int64) error {
	if err := Clean(p); err != nil {
		return err
	}
	dir, err := openFolder(root, path.Dir(p), true)
	if err != nil {
		return err
	}
	defer dir.Close()
	if fd, err := resolve(int(dir.Fd()), path.Base(p), 0); err == nil || !errors.Is(err, unix.ENOENT) {
		_ = unix.Close(fd) // whatever it is, Open explains it
		return nil
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), unix.O_TMPFILE|os.O_RDWR, 0o600)
	if err == nil {
		defer f.Close()
		err = errors.Join(f.Truncate(size), f.Sync())
	}
	if err == nil {
		err = unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), int(dir.Fd()), path.Base(p), unix.AT_SYMLINK_FOLLOW)
	}
	if errors.Is(err, unix.EEXIST) { // somebody else has made it
		return nil
	}
	if err != nil {
		return errdefs.Preconditionf("make the file %s of the node: %w", p, err)
	}
	return syncFolder(int(dir.Fd()))
}

// syncFolder makes the names in a folder durable.
func syncFolder(dir int) error {
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", dir)) // a reference alone cannot be synced
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// openFile opens what is called name in dir, which must not be a link.
func openFile(dir int, name string, create bool) (int, error) {
	fd, err := resolve(dir, name, 0)
	if !create || !errors.Is(err, unix.ENOENT) {
		return fd, err
	}
	made, err := unix.Openat(dir, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o644)
	if err == nil {
		err = errors.Join(unix.Fchmod(made, 0o644), unix.Close(made)) // independent of the umask
	}
	if err != nil && !errors.Is(err, unix.EEXIST) { // somebody else has made it
		return -1, err
	}
	return resolve(dir, name, 0)
}

func openFolder(root, p string, create bool) (*os.File, error) {
	if err := errors.Join(Clean(root), Clean(p)); err != nil {
		return nil, err
	}
	if !below(p, root) {
		return nil, errdefs.Invalidf("folder %s is not below %s", p, root)
	}
	fd, err := open(root)
	if err != nil {
		return nil, explain(root, err)
	}
	rest := strings.Trim(strings.TrimPrefix(p, root), "/")
	if rest == "" {
		return os.NewFile(uintptr(fd), p), nil
	}
	for part := range strings.SplitSeq(rest, "/") {
		next, err := enter(fd, part, create)
		_ = unix.Close(fd)
		if err != nil {
			return nil, explain(p, err)
		}
		fd = next
	}
	return os.NewFile(uintptr(fd), p), nil
}

// enter opens the folder called part in dir.
func enter(dir int, part string, create bool) (int, error) {
	fd, err := resolve(dir, part, unix.O_DIRECTORY)
	if !create || !errors.Is(err, unix.ENOENT) {
		return fd, err
	}
	err = unix.Mkdirat(dir, part, 0o755)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, err
	}
	made := err == nil // else somebody else has made it
	if fd, err = resolve(dir, part, unix.O_DIRECTORY); err == nil && made {
		err = unix.Chmod(fmt.Sprintf("/proc/self/fd/%d", fd), 0o755) // independent of the umask
	}
	return fd, err
}

func open(p string) (int, error) { return resolve(unix.AT_FDCWD, p, unix.O_DIRECTORY) }

func resolve(dir int, name string, kind uint64) (int, error) {
	for {
		fd, err := unix.Openat2(dir, name, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC | kind, Resolve: unix.RESOLVE_NO_SYMLINKS})
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) { // EAGAIN: a rename at the same time
			return fd, err
		}
	}
}

func explainFile(p string, err error) error {
	switch {
	case errors.Is(err, unix.ELOOP):
		return errdefs.Preconditionf("%s on the node is a symbolic link; name the file itself", p)
	case errors.Is(err, unix.ENOENT):
		return errdefs.Preconditionf("the file %s does not exist on the node", p)
	}
	return errdefs.Preconditionf("open the file %s of the node: %w", p, err)
}

func explain(p string, err error) error {
	switch {
	case errors.Is(err, unix.ELOOP):
		return errdefs.Preconditionf("the path of the folder %s of the node has a symbolic link in it; name its real path", p)
	case errors.Is(err, unix.ENOENT):
		return errdefs.Preconditionf("the folder %s does not exist on the node", p)
	case errors.Is(err, unix.ENOTDIR):
		return errdefs.Preconditionf("%s on the node is not a folder", p)
	}
	return errdefs.Preconditionf("open the folder %s of the node: %w", p, err)
}

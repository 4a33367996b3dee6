package jail

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hostdir"
)

// Dir is an open runtime folder of a VM. Paths through it are short, however deep the folder is: the path of a unix socket is
// limited to 107 bytes. The zero Dir is closed.
type Dir struct{ f *os.File }

// OpenDir opens a runtime folder. The caller closes it.
func OpenDir(path string) (Dir, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return Dir{}, errdefs.Preconditionf("open runtime folder %s: %w", path, err)
	}
	return Dir{os.NewFile(uintptr(fd), path)}, nil
}

// Close closes the folder; that of the zero Dir does nothing.
func (d Dir) Close() error {
	if d.f == nil {
		return nil
	}
	return d.f.Close()
}

func (d Dir) fd() int { return int(d.f.Fd()) }

// short returns a short path to name, valid in this process.
func (d Dir) short(name string) string {
	return "/proc/self/fd/" + strconv.Itoa(d.fd()) + "/" + name
}

// Listen creates a listening unix socket. Only the owner of the folder can reach it, and only root may connect.
func (d Dir) Listen(name string) (*os.File, error) {
	if err := d.Remove(name); err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make socket %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	err = unix.Bind(fd, &unix.SockaddrUnix{Name: d.short(name)})
	if err == nil {
		err = unix.Fchmodat(d.fd(), name, 0o600, 0)
	}
	if err == nil {
		err = unix.Listen(fd, 4)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("listen on %s: %w", filepath.Join(d.f.Name(), name), err)
	}
	return f, nil
}

// AppendTo opens a log for appending.
func (d Dir) AppendTo(name string) (*os.File, error) {
	fd, err := unix.Openat(d.fd(), name, unix.O_WRONLY|unix.O_APPEND|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log %s: %w", filepath.Join(d.f.Name(), name), err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Remove removes entries of the folder. One that does not exist is no error.
func (d Dir) Remove(names ...string) error {
	for _, name := range names {
		if err := unix.Unlinkat(d.fd(), name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("remove %s: %w", filepath.Join(d.f.Name(), name), err)
		}
	}
	return nil
}

func removeNames(path string, names []string) error {
	dir, err := OpenDir(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Remove(names...)
}

// WriteFile replaces a file of a runtime folder by content as JSON. It does not sync: the file is for a daemon that was down. After a
// power cut there is nothing to adopt.
func WriteFile(path string, content any) error {
	b, err := json.Marshal(content)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".tmp", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// OpenData opens a disk, kernel or firmware. It refuses anything but a file or a block device before opening it: opening a pipe
// or another device may block or have side effects. root, if not "", is the folder below which path has no symbolic links.
func OpenData(path, root string, write bool) (*os.File, error) {
	if root != "" {
		return hostdir.OpenData(root, path, write)
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, errdefs.Preconditionf("open %s: %w", path, err)
	}
	if m := st.Mode(); !m.IsRegular() && m&(fs.ModeDevice|fs.ModeCharDevice) != fs.ModeDevice {
		return nil, errdefs.Preconditionf("open %s: it is neither a file nor a block device", path)
	}
	flag := os.O_RDONLY
	if write {
		flag = os.O_RDWR
	}
	file, err := os.OpenFile(path, flag, 0)
	if err != nil {
		return nil, errdefs.Preconditionf("open %s: %w", path, err)
	}
	return file, nil
}

// Duplicate returns another descriptor of f, which the caller closes.
func Duplicate(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate descriptor of %s: %w", f.Name(), err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// CloseAll closes those files that are not nil.
func CloseAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

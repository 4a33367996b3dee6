package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hostdir"
	"cocoonstack.io/cocoon/internal/hypervisor"
)

// runtimeDir is an open Plan.Dir. Paths through it are short, however deep the folder is: the path of a unix socket is limited
// to 107 bytes.
type runtimeDir struct{ f *os.File }

func openDir(path string) (runtimeDir, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return runtimeDir{}, errdefs.Preconditionf("open runtime folder %s: %w", path, err)
	}
	return runtimeDir{os.NewFile(uintptr(fd), path)}, nil
}

func (d runtimeDir) Close() error { return d.f.Close() }

func (d runtimeDir) fd() int { return int(d.f.Fd()) }

// short returns a short path to name, valid in this process.
func (d runtimeDir) short(name string) string {
	return "/proc/self/fd/" + strconv.Itoa(d.fd()) + "/" + name
}

// listen creates a listening unix socket. Only the owner of the folder can reach it, and only root may connect.
func (d runtimeDir) listen(name string) (*os.File, error) {
	if err := d.remove(name); err != nil {
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

// appendTo opens a log for appending.
func (d runtimeDir) appendTo(name string) (*os.File, error) {
	fd, err := unix.Openat(d.fd(), name, unix.O_WRONLY|unix.O_APPEND|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log %s: %w", filepath.Join(d.f.Name(), name), err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

func (d runtimeDir) remove(names ...string) error {
	for _, name := range names {
		if err := unix.Unlinkat(d.fd(), name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("remove %s: %w", filepath.Join(d.f.Name(), name), err)
		}
	}
	return nil
}

// sockets are removed when the VM has ended.
var sockets = []string{qmpSocket, consoleSocket, agentSocket, shareSocket}

// openFiles opens the files that the process inherits, in order. On error nothing stays open. memory is a guest's saved memory,
// nil for one that boots; the caller keeps owning it, and shares.
func openFiles(ctx context.Context, files []file, dir runtimeDir, p hypervisor.Plan, memory *os.File, shares servers) (_ []*os.File, err error) {
	open := make([]*os.File, len(files))
	defer func() {
		if err != nil {
			closeAll(open)
		}
	}()
	taps, err := openTaps(ctx, p.NICs)
	if err != nil {
		return nil, err
	}
	for i, f := range files {
		switch f.kind {
		case fileRead, fileWrite:
			open[i], err = openData(f)
		case fileLog:
			open[i], err = dir.appendTo(f.path)
		case fileSocket:
			open[i], err = dir.listen(f.path)
		case fileTap:
			open[i], taps[f.nic] = taps[f.nic], nil
		case fileMemory:
			open[i], err = duplicate(memory)
		case fileVSOCK:
			open[i], err = openVSOCK(f.path)
		case fileShare:
			open[i], err = duplicate(shares.of(f.path).conn)
		}
		if err != nil {
			closeAll(taps)
			return nil, err
		}
	}
	return open, nil
}

func duplicate(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate descriptor of %s: %w", f.Name(), err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// openData opens a disk, kernel or firmware. It refuses anything but a file or a block device before opening it: opening a pipe
// or another device may block or have side effects.
func openData(f file) (*os.File, error) {
	if f.root != "" {
		return hostdir.OpenData(f.root, f.path, f.kind == fileWrite)
	}
	st, err := os.Stat(f.path)
	if err != nil {
		return nil, errdefs.Preconditionf("open %s: %w", f.path, err)
	}
	if m := st.Mode(); !m.IsRegular() && m&(fs.ModeDevice|fs.ModeCharDevice) != fs.ModeDevice {
		return nil, errdefs.Preconditionf("open %s: it is neither a file nor a block device", f.path)
	}
	flag := os.O_RDONLY
	if f.kind == fileWrite {
		flag = os.O_RDWR
	}
	file, err := os.OpenFile(f.path, flag, 0)
	if err != nil {
		return nil, errdefs.Preconditionf("open %s: %w", f.path, err)
	}
	return file, nil
}

// checkReadable checks that the unprivileged process can open the files that it must open by itself.
func checkReadable(paths ...string) error {
	for _, path := range paths {
		if path == "" {
			continue
		}
		st, err := os.Stat(path)
		if err != nil {
			return errdefs.Preconditionf("open %s: %w", path, err)
		}
		if st.Mode().Perm()&0o004 == 0 {
			return errdefs.Preconditionf("%s must be readable for all users, because VM processes are unprivileged; run `chmod a+r` on it", path)
		}
	}
	return nil
}

package atomicfile

import (
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// removeLimit is how long RemoveAll empties a folder to which somebody may be adding meanwhile.
const removeLimit = time.Minute

// namesAtOnce is how many names of a folder are read at a time.
const namesAtOnce = 1024

// RemoveAll removes path and everything below it, and follows no symbolic link. It is for folders to which a process of a VM can write: it needs two descriptors,
// however deep they are. os.RemoveAll needs one per level, so such a process could use up those of the whole daemon. A missing path is no error.
func RemoveAll(path string) error {
	err := unlink(unix.AT_FDCWD, path)
	if left(err) {
		err = removeFolder(path)
	}
	if err != nil {
		return &fs.PathError{Op: "remove", Path: path, Err: err}
	}
	return nil
}

func removeFolder(path string) error {
	top, err := openFolder(unix.AT_FDCWD, path)
	if err != nil {
		return err
	}
	defer top.Close()
	r := removal{top: top, end: time.Now().Add(removeLimit)}
	for {
		if err := r.each(top, r.removeChild); err != nil {
			return err
		}
		if err := unlink(unix.AT_FDCWD, path); !left(err) {
			return err
		}
	}
}

// removal empties the folder top.
type removal struct {
	top *os.File
	end time.Time
}

// removeChild removes a name in the folder top. What is in a folder in it becomes a child of top, unless it can be removed at once.
func (r removal) removeChild(name string) error {
	top := int(r.top.Fd())
	err := unlink(top, name)
	if !left(err) {
		return err
	}
	dir, err := openFolder(top, name)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) { // somebody has replaced it
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := r.each(dir, func(name string) error { return r.lift(dir, name) }); err != nil {
		return err
	}
	if err := unlink(top, name); !left(err) {
		return err
	}
	return nil // the next round meets it again
}

// lift removes a name in the folder dir, or makes it a child of top.
func (r removal) lift(dir *os.File, name string) error {
	err := unlink(int(dir.Fd()), name)
	if !left(err) {
		return err
	}
	err = unix.Renameat(int(dir.Fd()), name, int(r.top.Fd()), rand.Text())
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// each calls do with each name in a folder.
func (r removal) each(dir *os.File, do func(name string) error) error {
	if _, err := dir.Seek(0, io.SeekStart); err != nil {
		return err
	}
	for {
		names, err := dir.Readdirnames(namesAtOnce)
		for _, name := range names {
			if err := do(name); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if time.Now().After(r.end) {
			return unix.EBUSY
		}
	}
}

// unlink removes a name in the folder dir: a file, or a folder in which nothing is. A missing one is no error.
func unlink(dir int, name string) error {
	err := unix.Unlinkat(dir, name, 0)
	if errors.Is(err, unix.EISDIR) {
		err = unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// left reports whether unlink has met a folder in which something is.
func left(err error) bool { return errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) }

func openFolder(dir int, name string) (*os.File, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

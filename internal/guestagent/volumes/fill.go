package volumes

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
)

// Names in a volume of files, the same as the kubelet uses, so that programs that watch ..data work here, too.
const (
	dataLink = "..data"
	tempLink = "..data_tmp"
)

// Modes of files and folders that a group is to use.
const (
	groupFile = 0o440
	groupDir  = 0o550 | os.ModeSetgid
)

// fill makes files the content of dir. The first part of each path is a symbolic link through ..data, which is replaced
// by renaming: readers see either all old or all new files. A failure leaves the old files.
func fill(dir *os.Root, files []vm.VolumeFile, group *int64) error {
	next, err := version(dir, group)
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := place(dir, next, f, group); err != nil {
			return errors.Join(err, dir.RemoveAll(next))
		}
	}
	if err := point(dir, next); err != nil {
		return errors.Join(err, dir.RemoveAll(next))
	}
	if err := link(dir, files); err != nil {
		return err
	}
	return sweep(dir, next, files)
}

// version makes the folder for a new content.
func version(dir *os.Root, group *int64) (string, error) {
	for {
		var b [4]byte
		_, _ = rand.Read(b[:]) // the clock of a guest may stand still or go back
		name := ".." + time.Now().UTC().Format("2006_01_02_15_04_05.") + hex.EncodeToString(b[:])
		if err := makeFolder(dir, name, group); !errors.Is(err, fs.ErrExist) {
			return name, err
		}
	}
}

func makeFolder(dir *os.Root, name string, group *int64) error {
	if err := dir.Mkdir(name, 0o755); err != nil {
		return err
	}
	mode := os.FileMode(0o755)
	if group != nil {
		mode |= groupDir
		if err := dir.Lchown(name, -1, int(*group)); err != nil {
			return err
		}
	}
	return dir.Chmod(name, mode) // independent of the umask, and after the change of group, which clears the setgid bit
}

// place writes f under the folder top.
func place(dir *os.Root, top string, f vm.VolumeFile, group *int64) error {
	parts := strings.Split(f.Path, "/")
	at := top
	for _, p := range parts[:len(parts)-1] {
		at = path.Join(at, p)
		if err := makeFolder(dir, at, group); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	name := path.Join(at, parts[len(parts)-1])
	out, err := dir.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = out.Write(f.Data)
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	uid, gid, mode := -1, -1, os.FileMode(f.Mode)
	if f.UID != nil {
		uid = int(*f.UID)
	}
	if group != nil {
		gid, mode = int(*group), mode|groupFile
	}
	if uid >= 0 || gid >= 0 {
		if err := dir.Lchown(name, uid, gid); err != nil {
			return err
		}
	}
	return dir.Chmod(name, mode)
}

// point makes ..data name the new content atomically.
func point(dir *os.Root, next string) error {
	if err := dir.Remove(tempLink); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := dir.Symlink(next, tempLink); err != nil {
		return err
	}
	return dir.Rename(tempLink, dataLink)
}

// link makes the names that programs use.
func link(dir *os.Root, files []vm.VolumeFile) error {
	for first := range firsts(files) {
		if _, err := dir.Lstat(first); err == nil {
			continue // our own from an earlier call: nobody else writes here
		}
		if err := dir.Symlink(dataLink+"/"+first, first); err != nil {
			return fmt.Errorf("link %s: %w", first, err)
		}
	}
	return nil
}

// sweep removes names that are not in files any more, and all contents except next.
func sweep(dir *os.Root, next string, files []vm.VolumeFile) error {
	entries, err := fs.ReadDir(dir.FS(), ".")
	if err != nil {
		return err
	}
	keep := firsts(files)
	keep[dataLink], keep[next] = true, true
	var errs []error
	for _, e := range entries {
		if !keep[e.Name()] {
			errs = append(errs, dir.RemoveAll(e.Name()))
		}
	}
	return errors.Join(errs...)
}

func firsts(files []vm.VolumeFile) map[string]bool {
	names := map[string]bool{}
	for _, f := range files {
		first, _, _ := strings.Cut(f.Path, "/")
		names[first] = true
	}
	return names
}

// Package tree turns a file or folder of this machine into a tar archive, and an archive that came from elsewhere into files.
//
// What is unpacked is hostile: nothing is written outside of the folder that was named, through whatever links. The package knows
// no workload and no network.
package tree

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	maxEntries = 10_000_000
	maxDepth   = 256 // folders in one another
	dirMode    = 0o755
)

// Pack writes the file or folder src, as an archive whose top entry is called name. Sockets and devices are left out. A file that
// shrinks meanwhile is an error.
func Pack(w io.Writer, src, name string) error {
	root := filepath.Clean(src)
	if strings.HasSuffix(src, "/") { // of a link to a folder, the folder
		resolved, err := filepath.EvalSymlinks(root)
		if err != nil {
			return errdefs.New(errdefs.InvalidArgument, "read %s: %w", src, err)
		}
		root = resolved
	}
	tw := tar.NewWriter(w)
	err := filepath.WalkDir(root, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			return errdefs.New(errdefs.InvalidArgument, "read %s: %w", p, err)
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return errdefs.New(errdefs.Internal, "read %s: %w", p, err)
		}
		return packOne(tw, p, path.Join(name, filepath.ToSlash(rel)))
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

func packOne(tw *tar.Writer, p, name string) error {
	info, err := os.Lstat(p)
	if err != nil {
		return errdefs.New(errdefs.InvalidArgument, "read %s: %w", p, err)
	}
	link := ""
	switch info.Mode().Type() {
	case 0, fs.ModeDir:
	case fs.ModeSymlink:
		if link, err = os.Readlink(p); err != nil {
			return errdefs.New(errdefs.InvalidArgument, "read %s: %w", p, err)
		}
	default:
		return nil
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return errdefs.New(errdefs.InvalidArgument, "pack %s: %w", p, err)
	}
	// Whose file it is here means nothing there.
	h.Name, h.Uid, h.Gid, h.Uname, h.Gname = name, 0, 0, "", ""
	if info.IsDir() {
		h.Name += "/"
	}
	if !info.Mode().IsRegular() {
		return tw.WriteHeader(h)
	}
	f, err := os.Open(p)
	if err != nil {
		return errdefs.New(errdefs.InvalidArgument, "read %s: %w", p, err)
	}
	defer f.Close()
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	n, err := io.Copy(tw, io.LimitReader(f, h.Size))
	if err == nil && n < h.Size {
		return errdefs.Conflictf("%s became shorter while it was read; copy it again", p)
	}
	return err
}

// Unpack writes the files of an archive below the folder dest, which exists. The top entry is called from in the archive, and becomes
// name. skipped is told of every entry that is not written: a link that leads out of the copy, and what is neither a file, a folder
// nor a link. It returns how many bytes of content were written.
func Unpack(r io.Reader, dest, from, name string, skipped func(entry, why string)) (int64, error) {
	root, err := os.OpenRoot(dest)
	if err != nil {
		return 0, errdefs.New(errdefs.InvalidArgument, "open the folder %s: %w", dest, err)
	}
	defer root.Close()
	u := unpacking{root: root}
	tr := tar.NewReader(r)
	for range maxEntries {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return u.written, u.folders()
		}
		if err != nil {
			return u.written, fmt.Errorf("read the archive: %w", err)
		}
		at, ok := place(h.Name, from, name)
		if !ok {
			return u.written, errdefs.Invalidf("the archive has %q, which is not below %s; nothing of it is written", h.Name, from)
		}
		if err := u.entry(tr, h, at, skipped); err != nil {
			return u.written, err
		}
	}
	return u.written, errdefs.Invalidf("the archive has more than %d entries", maxEntries)
}

// place returns where an entry goes; false if it is not the top entry or below it.
func place(entry, from, name string) (string, bool) {
	entry = strings.TrimSuffix(strings.TrimPrefix(entry, "./"), "/")
	if !fs.ValidPath(entry) || strings.Count(entry, "/") > maxDepth || strings.ContainsRune(entry, 0) {
		return "", false
	}
	if entry == from {
		return name, true
	}
	rest, ok := strings.CutPrefix(entry, from+"/")
	return path.Join(name, rest), ok
}

type unpacking struct {
	root    *os.Root
	written int64
	dirs    []dir // their modes are set at the end, so that files can be written into read-only ones
}

type dir struct {
	path string
	mode fs.FileMode
}

func (u *unpacking) entry(tr *tar.Reader, h *tar.Header, at string, skipped func(entry, why string)) error {
	fail := func(err error) error {
		if err == nil {
			return nil
		}
		return errdefs.New(errdefs.FailedPrecondition, "write %s: %w", at, err)
	}
	mode := fs.FileMode(h.Mode).Perm() //nolint:gosec // only permissions are kept: no setuid, no setgid
	switch h.Typeflag {
	case tar.TypeDir:
		u.dirs = append(u.dirs, dir{at, mode})
		return fail(u.folder(at))
	case tar.TypeReg:
		if sparse(h) { // a few bytes could fill the disk
			skipped(h.Name, "it is a sparse file")
			return nil
		}
		return u.file(tr, h, at, mode)
	case tar.TypeSymlink:
		if !inside(at, h.Linkname) {
			skipped(h.Name, "it is a link to "+strconv.Quote(h.Linkname)+", outside of what is copied")
			return nil
		}
		if err := u.clear(at); err != nil {
			return fail(err)
		}
		return fail(u.root.Symlink(h.Linkname, at))
	case tar.TypeXGlobalHeader:
		return nil
	case tar.TypeLink:
		skipped(h.Name, "it is another name of "+strconv.Quote(h.Linkname))
	default:
		skipped(h.Name, "it is neither a file, a folder nor a link")
	}
	return nil
}

func sparse(h *tar.Header) bool {
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return false
}

// inside reports whether a link at this path leads to something below the top entry. Each .. must come first: behind another link it
// would mean something else. As no entry is written through a link, at is where the link really is.
func inside(at, target string) bool {
	if target == "" || path.IsAbs(target) || strings.ContainsRune(target, 0) {
		return false
	}
	parts := strings.Split(target, "/")
	ups := 0
	for ups < len(parts) && parts[ups] == ".." {
		ups++
	}
	return !slices.Contains(parts[ups:], "..") && ups < strings.Count(at, "/")
}

// folder makes a folder. What has its name and is none is replaced.
func (u *unpacking) folder(at string) error {
	if info, err := u.root.Lstat(at); err == nil && info.IsDir() {
		return nil
	}
	if err := u.clear(at); err != nil {
		return err
	}
	return u.root.Mkdir(at, dirMode)
}

// clear makes the parents of at, and removes the file or link that is there.
func (u *unpacking) clear(at string) error {
	for i, c := range at {
		if c != '/' {
			continue
		}
		info, err := u.root.Lstat(at[:i])
		switch {
		case errors.Is(err, fs.ErrNotExist):
			err = u.root.Mkdir(at[:i], dirMode)
		case err == nil && !info.IsDir():
			err = fmt.Errorf("%s is no folder", at[:i])
		}
		if err != nil {
			return err
		}
	}
	err := u.root.Remove(at)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// file writes a new file: it never writes through a link, nor into a file that something else has open.
func (u *unpacking) file(tr *tar.Reader, h *tar.Header, at string, mode fs.FileMode) error {
	wrap := func(err error) error { return errdefs.New(errdefs.FailedPrecondition, "write %s: %w", at, err) }
	if err := u.clear(at); err != nil {
		return wrap(err)
	}
	f, err := u.root.OpenFile(at, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return wrap(err)
	}
	defer f.Close()
	n, err := io.Copy(f, tr)
	u.written += n
	if err != nil {
		return fmt.Errorf("write %s: %w", at, err) // of the network, or of the disk
	}
	if err := f.Chmod(mode); err != nil {
		return wrap(err)
	}
	if err := f.Close(); err != nil {
		return wrap(err)
	}
	if !h.ModTime.IsZero() && h.ModTime.Unix() > 0 {
		_ = u.root.Chtimes(at, h.ModTime, h.ModTime) // a time that the file system does not have is no reason to fail
	}
	return nil
}

// folders sets the modes of folders, the deepest first.
func (u *unpacking) folders() error {
	for i := len(u.dirs) - 1; i >= 0; i-- {
		d := u.dirs[i]
		if info, err := u.root.Lstat(d.path); err != nil || !info.IsDir() {
			continue // replaced by a later entry
		}
		if err := u.root.Chmod(d.path, d.mode|0o700); err != nil {
			return errdefs.New(errdefs.FailedPrecondition, "write %s: %w", d.path, err)
		}
	}
	return nil
}

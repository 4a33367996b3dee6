package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/sparse"
)

// ExportDir implements snapshot.Store. The files in dir may be hard links to the store's own files: copy them elsewhere
// or clone from them in place, but never write to them.
// Errors: InvalidArgument for a relative path, FailedPrecondition for a folder that is not empty.
func (s *Store) ExportDir(ctx context.Context, h snapshot.Held, dir string) error {
	snap := h.Snapshot()
	err := snap.Portable()
	if err == nil {
		err = exportDir(ctx, h, snap, dir)
	}
	if err != nil {
		return fmt.Errorf("export snapshot %s to %s: %w", name(snap), dir, err)
	}
	return nil
}

func exportDir(ctx context.Context, h snapshot.Held, snap snapshot.Snapshot, dir string) (err error) {
	if !filepath.IsAbs(dir) {
		return errdefs.Invalidf("an absolute path is needed")
	}
	made := false
	switch err := os.Mkdir(dir, 0o700); {
	case err == nil:
		made = true
	case !errors.Is(err, fs.ErrExist):
		return folderFault(exportFull(err))
	default:
		if there, err := os.ReadDir(dir); err != nil {
			return folderFault(err)
		} else if len(there) > 0 {
			return errdefs.Preconditionf("the folder is not empty; name another one")
		}
	}
	var files []string
	defer func() {
		if err == nil {
			return
		}
		for _, f := range files {
			_ = os.Remove(filepath.Join(dir, f))
		}
		if made {
			_ = os.Remove(dir)
		}
	}()
	whole := snap.Whole()
	for _, f := range whole.Files() {
		files = append(files, f)
		if f == snapshot.FileMemory && snap.MemoryBase != "" {
			err = unite(ctx, filepath.Join(dir, f), h)
		} else {
			err = share(ctx, filepath.Join(dir, f), filepath.Join(h.Dir(), f))
		}
		if err != nil {
			return exportFull(err)
		}
	}
	if err := syncFiles(ctx, dir, files); err != nil {
		return exportFull(err)
	}
	if whole.Summed = snap.Summed; whole.Summed {
		for _, f := range whole.Files() {
			files = append(files, f+sparse.SumSuffix)
			if err := exportSums(ctx, dir, f, h); err != nil {
				return exportFull(err)
			}
		}
	}
	if err := store(dir, whole); err != nil { // last: the record makes the folder a snapshot
		return exportFull(err)
	}
	return atomicfile.SyncDir(filepath.Dir(dir))
}

// folderFault classifies an error about a folder that the user named.
func folderFault(err error) error {
	switch {
	case errdefs.ClassOf(err) != errdefs.Internal:
	case errors.Is(err, fs.ErrNotExist):
		return errdefs.Invalidf("its parent folder does not exist; create that first (%w)", err)
	case errors.Is(err, unix.ENOTDIR):
		return errdefs.Invalidf("it is not a folder (%w)", err)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		return errdefs.Preconditionf("cocoond has no permission for that there (%w)", err)
	}
	return err
}

// exportFull is full for a folder outside the store.
func exportFull(err error) error {
	if errdefs.Is(full(err), errdefs.ResourceExhausted) {
		return errdefs.Exhaustedf("its disk is full (%w)", err)
	}
	return err
}

// share makes path a copy of src as cheaply as possible: a reflink, else a hard link, else a real copy.
func share(ctx context.Context, path, src string) error {
	in, err := openPlain(src)
	if errors.Is(err, fs.ErrNotExist) {
		return errdefs.DataLossf("the snapshot's file %s is missing", filepath.Base(src))
	}
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	err = errors.Join(sparse.Clone(out, in), out.Close())
	if !errdefs.Is(err, errdefs.Unsupported) {
		return err
	}
	if err := os.Remove(path); err != nil {
		return err
	}
	return sparse.LinkFile(ctx, path, src)
}

// unite makes path a copy of the memory of h, which is in two files.
func unite(ctx context.Context, path string, h snapshot.Held) error {
	in, err := h.Open(snapshot.FileMemory)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(sparse.CopyData(ctx, out, in), out.Close())
}

// exportSums writes the checksums of a file beside it in dir. For memory that was in two files it computes new ones.
func exportSums(ctx context.Context, dir, file string, h snapshot.Held) error {
	path := filepath.Join(dir, file+sparse.SumSuffix)
	if file == snapshot.FileMemory && h.Snapshot().MemoryBase != "" {
		return sum(ctx, filepath.Join(dir, file))
	}
	return sparse.CopyFile(ctx, path, filepath.Join(h.Dir(), file+sparse.SumSuffix))
}

// HoldDir implements snapshot.Store.
// Errors: InvalidArgument, DataLoss, and FailedPrecondition if other users could have written the folder: its content
// becomes the memory of a guest.
func (s *Store) HoldDir(ctx context.Context, dir string) (snapshot.Held, error) {
	snap, err := readDir(ctx, dir)
	if err != nil {
		return nil, fmt.Errorf("snapshot in the folder %s: %w", dir, err)
	}
	return &held{s: snap.Foreign(), store: s, dir: filepath.Clean(dir), release: func() {}}, nil
}

func readDir(ctx context.Context, dir string) (snapshot.Snapshot, error) {
	var none snapshot.Snapshot
	if err := ctx.Err(); err != nil {
		return none, err
	}
	if !filepath.IsAbs(dir) {
		return none, errdefs.Invalidf("an absolute path is needed")
	}
	dir = filepath.Clean(dir)
	if err := owned(dir, fs.ModeDir); err != nil {
		return none, err
	}
	meta := filepath.Join(dir, snapshot.FileMeta)
	if err := owned(meta, 0); errors.Is(err, fs.ErrNotExist) {
		return none, errdefs.Invalidf("it has no %s: it is not an exported snapshot, or its export did not finish", snapshot.FileMeta)
	} else if err != nil {
		return none, err
	}
	snap, err := load(dir)
	if err != nil {
		return none, err
	}
	files := snap.Files()
	if snap.Summed {
		files = withSums(files)
	}
	for _, f := range files {
		if err := owned(filepath.Join(dir, f), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return none, err
		}
	}
	return snap, checkFiles(dir, snap, nil)
}

// owned checks that path has the type and that only root or this user can write it.
func owned(path string, typ fs.FileMode) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && typ == fs.ModeDir:
		return errdefs.Invalidf("there is no such folder")
	case errors.Is(err, fs.ErrNotExist):
		return err
	case err != nil:
		return folderFault(err)
	case info.Mode().Type() != typ && typ == fs.ModeDir:
		return errdefs.Invalidf("it is not a folder")
	case info.Mode().Type() != typ:
		return errdefs.Invalidf("%s is not a regular file: refused", filepath.Base(path))
	case !trusted(info):
		return errdefs.Preconditionf("%s belongs to another user, or others may write to it; `chown root` and `chmod go-w` it if you trust it", path)
	}
	return nil
}

// ImportDir implements snapshot.Store. On the store's file system, the folder's files are hard-linked and stay where
// they are: the caller may remove the folder afterwards, but must not write to its files.
func (s *Store) ImportDir(ctx context.Context, name, description, dir string) (snapshot.Snapshot, error) {
	if err := s.Open(ctx); err != nil {
		return snapshot.Snapshot{}, err
	}
	snap, err := s.importDir(ctx, name, description, dir)
	if err != nil {
		return snapshot.Snapshot{}, fmt.Errorf("import the snapshot in the folder %s: %w", dir, full(err))
	}
	return snap, nil
}

func (s *Store) importDir(ctx context.Context, name, description, dir string) (_ snapshot.Snapshot, err error) {
	snap, err := readDir(ctx, dir)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	d, err := s.begin(ctx, &snap, name, description)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	defer func() { err = errors.Join(err, d.Discard()) }()
	files := snap.Files()
	if snap.Summed { // otherwise Commit computes them
		files = withSums(files)
	}
	for _, f := range files {
		err := sparse.LinkFile(ctx, filepath.Join(d.Dir(), f), filepath.Join(dir, f))
		if errors.Is(err, fs.ErrNotExist) {
			err = errdefs.DataLossf("its file %s is missing", f)
		}
		if err != nil {
			return snapshot.Snapshot{}, err
		}
	}
	return d.Commit(ctx, snap)
}

// Package folder keeps a registry's objects as files of one folder.
//
// It does not lock the folder against other processes; the application does.
package folder

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/objects"
)

const (
	dirMode  = 0o700 // guest memory is secret
	fileMode = 0o600
	staging  = "uploads"
)

// Store is a folder.
type Store struct {
	dir string

	syncing sync.Mutex // held while folders are synced: a second caller waits for the first one's sync
	mu      sync.Mutex
	dirty   map[string]struct{} // folders with names that are not synced yet
}

var (
	_ objects.Store   = (*Store)(nil)
	_ objects.Flusher = (*Store)(nil)
	_ objects.Tidier  = (*Store)(nil)
)

// New returns the store of dir, which it creates.
func New(dir string) (*Store, error) {
	s := &Store{dir: filepath.Clean(dir), dirty: map[string]struct{}{}}
	if err := os.MkdirAll(s.Staging(), dirMode); err != nil {
		return nil, errdefs.Preconditionf("data folder: %w", err)
	}
	return s, nil
}

// Open returns the store of an existing folder.
func Open(dir string) (*Store, error) {
	if _, err := os.Stat(filepath.Join(dir, staging)); err != nil {
		return nil, errdefs.Preconditionf("%s is not the data folder of a registry: %w", dir, err)
	}
	return New(dir)
}

// Staging returns a folder on the same file system.
func (s *Store) Staging() string { return filepath.Join(s.dir, staging) }

func (s *Store) path(key string) string { return filepath.Join(s.dir, filepath.FromSlash(key)) }

// missing classifies file system errors. A path below a file counts as missing, too.
func missing(key string, err error) error {
	if errors.Is(err, fs.ErrNotExist) || isNotDir(err) {
		return errdefs.NotFoundf("no object %s", key)
	}
	return err
}

// Stat describes a file.
func (s *Store) Stat(_ context.Context, key string) (objects.Info, error) {
	fi, err := os.Stat(s.path(key))
	if err != nil {
		return objects.Info{}, missing(key, err)
	}
	if !fi.Mode().IsRegular() {
		return objects.Info{}, errdefs.NotFoundf("no object %s", key)
	}
	return objects.Info{Size: fi.Size(), Modified: fi.ModTime()}, nil
}

// Open opens a file. The result is an *os.File, so that it can be sent without a copy.
func (s *Store) Open(_ context.Context, key string) (io.ReadSeekCloser, objects.Info, error) {
	f, err := os.Open(s.path(key))
	if err != nil {
		return nil, objects.Info{}, missing(key, err)
	}
	fi, err := f.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = errdefs.NotFoundf("no object %s", key)
	}
	if err != nil {
		f.Close()
		return nil, objects.Info{}, err
	}
	return f, objects.Info{Size: fi.Size(), Modified: fi.ModTime()}, nil
}

// Write replaces a file. An empty file is only a name, so Sync is sufficient for it.
func (s *Store) Write(_ context.Context, key string, data []byte) error {
	path := s.path(key)
	if err := s.mkdir(filepath.Dir(path)); err != nil {
		return err
	}
	if len(data) > 0 {
		return objects.DiskFull(atomicfile.WriteFile(path, data, fileMode))
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, fileMode)
	if err != nil {
		return objects.DiskFull(err)
	}
	s.touched(filepath.Dir(path))
	return objects.DiskFull(f.Close())
}

// Take renames a file.
func (s *Store) Take(_ context.Context, key, path string) error { return s.rename(path, key) }

// Flush syncs a file.
func (s *Store) Flush(_ context.Context, key string) error {
	f, err := os.Open(s.path(key))
	if err != nil {
		return missing(key, err)
	}
	defer f.Close()
	return objects.DiskFull(f.Sync())
}

// Move renames an object.
func (s *Store) Move(_ context.Context, from, to string) error {
	s.touched(filepath.Dir(s.path(from)))
	return missing(from, s.rename(s.path(from), to))
}

func (s *Store) rename(path, key string) error {
	to := s.path(key)
	if err := s.mkdir(filepath.Dir(to)); err != nil {
		return err
	}
	if err := os.Rename(path, to); err != nil {
		return objects.DiskFull(fmt.Errorf("store %s: %w", key, err))
	}
	s.touched(filepath.Dir(to))
	return nil
}

// Remove deletes a file. It leaves the folders: they are few, and removing them would race with writers.
func (s *Store) Remove(_ context.Context, key string) error {
	path := s.path(key)
	if err := os.Remove(path); err != nil {
		if errdefs.IsNotFound(missing(key, err)) {
			return nil
		}
		return fmt.Errorf("remove %s: %w", key, err)
	}
	s.touched(filepath.Dir(path))
	return nil
}

// List reads a folder. It hides temporary files.
func (s *Store) List(_ context.Context, prefix string) ([]objects.Entry, error) {
	all, err := os.ReadDir(s.path(prefix))
	if err != nil {
		if errdefs.IsNotFound(missing(prefix, err)) {
			return nil, nil
		}
		return nil, err
	}
	out := make([]objects.Entry, 0, len(all))
	for _, e := range all {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		o := objects.Entry{Name: e.Name(), Dir: e.IsDir()}
		if !o.Dir {
			fi, err := e.Info()
			if errors.Is(err, fs.ErrNotExist) {
				continue // removed concurrently
			}
			if err != nil {
				return nil, err
			}
			o.Info = objects.Info{Size: fi.Size(), Modified: fi.ModTime()}
		}
		out = append(out, o)
	}
	return out, nil
}

// Tidy removes the temporary files of atomicfile.
func (s *Store) Tidy(ctx context.Context, prefix string) error {
	err := filepath.WalkDir(s.path(prefix), func(path string, e fs.DirEntry, err error) error {
		if err != nil || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		if ours, err := filepath.Match(".*.tmp-*", e.Name()); !ours || !e.Type().IsRegular() {
			return err
		}
		return os.Remove(path)
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove leftovers of a killed process: %w", err)
	}
	return nil
}

// mkdir creates a folder and its parents; Sync syncs their names with the others.
func (s *Store) mkdir(dir string) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	for p := dir; p != s.dir; p = filepath.Dir(p) { // all paths are below s.dir
		s.touched(p)
	}
	s.touched(s.dir)
	return objects.DiskFull(os.MkdirAll(dir, dirMode))
}

func (s *Store) touched(dir string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dirty[dir] = struct{}{}
}

// Sync syncs the folders that have new names.
func (s *Store) Sync(ctx context.Context) error {
	s.syncing.Lock()
	defer s.syncing.Unlock()
	s.mu.Lock()
	dirty := s.dirty
	s.dirty = map[string]struct{}{}
	s.mu.Unlock()
	var failed error
	for dir := range dirty {
		err := ctx.Err()
		if err == nil {
			err = atomicfile.SyncDir(dir)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = err
			s.touched(dir) // the next call retries
		}
	}
	return failed
}

func isNotDir(err error) bool {
	return errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ENAMETOOLONG)
}

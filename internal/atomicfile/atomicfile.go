// Package atomicfile writes files that exist either completely or not at all, even after a power cut, and removes folders that others have filled.
//
// It does not lock: two writers of one path both succeed and the last rename wins. A writer that is killed leaves a temporary file, which
// Sweep removes.
package atomicfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// WriteFile replaces path with data and mode: it writes a temporary file in the same folder, fsyncs it, renames it and fsyncs
// the folder.
func WriteFile(path string, data []byte, mode os.FileMode) error {
	return Write(path, mode, func(w io.Writer) error {
		_, err := w.Write(data)
		return err
	})
}

// Write is WriteFile for content that fill produces. If fill fails, nothing is left behind and path is unchanged.
func Write(path string, mode os.FileMode, fill func(io.Writer) error) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), temporary(path))
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
		}
	}()
	if err = fill(f); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err = f.Chmod(mode); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err = f.Sync(); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err = f.Close(); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return Rename(f.Name(), path)
}

// temporary returns a pattern of file names: those of the temporary files of path. The last part of path may be a pattern.
func temporary(path string) string { return "." + filepath.Base(path) + ".tmp-*" }

// Sweep removes the temporary files of writers of path that were killed. The last part of path may be a pattern of filepath.Match. Nobody may
// write such a file meanwhile. A folder that is not there has none.
func Sweep(path string) error {
	dir := filepath.Dir(path)
	found, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("look for temporary files of %s: %w", path, err)
	}
	for _, f := range found {
		if is, err := filepath.Match(temporary(path), f.Name()); err != nil || !is || !f.Type().IsRegular() {
			continue
		}
		if err := os.Remove(filepath.Join(dir, f.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove a temporary file of %s: %w", path, err)
		}
	}
	return nil
}

// Rename renames from to to and makes the new name durable. Both must be in one file system. The caller must have synced the
// content of from.
func Rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return fmt.Errorf("rename to %s: %w", to, err)
	}
	return SyncDir(filepath.Dir(to))
}

// SyncDir makes the names in dir durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync folder: %w", err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync folder %s: %w", dir, err)
	}
	return nil
}

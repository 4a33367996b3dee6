// Package statecopy keeps the databases of an appliance as they were before an update, and puts them back for a system that cannot read what a newer one has left.
//
// It knows neither what is in a database nor when an update begins or ends.
package statecopy

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Database is a file with a schema.
type Database struct {
	Path string

	Copy    func(ctx context.Context, path, to string) error     // writes what the file holds now to a new file, durably; others may have it open
	Replace func(path, from string) error                        // puts a copy of from in its place, durably; it can be done again after a crash
	Newer   func(ctx context.Context, path string) (bool, error) // reports whether only a newer version can read it
}

// Store keeps one copy of some databases, whose files have different names, in a folder.
type Store struct {
	Dir       string
	Databases []Database
	Log       *slog.Logger
}

const (
	draft    = "new"      // folder of a copy that is being made
	kept     = "copy"     // folder of the copy
	manifest = "manifest" // file in it, written last
	restore  = "restore"  // file: the databases are being put back, or have not been opened since
)

// contents is the manifest of a copy.
type contents struct {
	Update string            `json:"update"`
	Sums   map[string]string `json:"sha256"` // of the files
}

// Take copies the databases as they are before an update. The copy before that is gone then. After an error, or a crash, there is the old copy or none.
func (s *Store) Take(ctx context.Context, update string) error {
	dir := filepath.Join(s.Dir, draft)
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o700)); err != nil {
		return fmt.Errorf("copy the state: %w", err)
	}
	c := contents{Update: update, Sums: map[string]string{}}
	for _, d := range s.Databases {
		name := filepath.Base(d.Path)
		if _, err := os.Lstat(d.Path); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		to := filepath.Join(dir, name)
		err := d.Copy(ctx, d.Path, to)
		if err == nil {
			c.Sums[name], err = sum(to)
		}
		if err != nil {
			return fmt.Errorf("copy the state: %w", errors.Join(err, os.RemoveAll(dir)))
		}
	}
	text, err := json.Marshal(c)
	if err == nil {
		err = atomicfile.WriteFile(filepath.Join(dir, manifest), text, 0o600)
	}
	if err == nil {
		err = s.Remove()
	}
	if err == nil {
		err = atomicfile.Rename(dir, filepath.Join(s.Dir, kept))
	}
	if err != nil {
		return fmt.Errorf("copy the state: %w", err)
	}
	return nil
}

// Remove removes the copy. Without one it does nothing.
func (s *Store) Remove() error {
	if _, err := os.Lstat(filepath.Join(s.Dir, kept)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	// A copy without its manifest is none.
	if err := os.Remove(filepath.Join(s.Dir, kept, manifest)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the copy of the state: %w", err)
	}
	if err := errors.Join(atomicfile.SyncDir(filepath.Join(s.Dir, kept)), os.RemoveAll(filepath.Join(s.Dir, kept))); err != nil {
		return fmt.Errorf("remove the copy of the state: %w", err)
	}
	return atomicfile.SyncDir(s.Dir)
}

// Restore puts all databases back as they were copied, if this version cannot read one of them. It reports whether it did; then the caller opens them, and calls
// Settle. What was there is kept beside them. A restoration that is not settled is done again.
// Preconditions: nobody has the databases open, and this system is not on trial.
// Errors: DataLoss if the copy is damaged; nothing has changed then.
func (s *Store) Restore(ctx context.Context) (bool, error) {
	marker := filepath.Join(s.Dir, restore)
	_, err := os.Lstat(marker)
	begun := err == nil
	if !begun && !s.needed(ctx) {
		return false, nil
	}
	c, err := s.read()
	if errdefs.IsNotFound(err) && !begun {
		return false, nil // opening the database says that it is newer
	}
	if err != nil {
		return false, err
	}
	if err := atomicfile.WriteFile(marker, nil, 0o600); err != nil {
		return false, fmt.Errorf("restore the state: %w", err)
	}
	for _, d := range s.Databases {
		name := filepath.Base(d.Path)
		if c.Sums[name] == "" {
			continue
		}
		if err := d.Replace(d.Path, filepath.Join(s.Dir, kept, name)); err != nil {
			return false, fmt.Errorf("restore the state: %w", err)
		}
	}
	s.Log.Warn("the state is again what it was before the update, because this version cannot read what a newer one has written; what that wrote is kept beside it", "update", c.Update)
	return true, nil
}

// Settle ends a restoration: what it has put back has been opened, and goes on from there.
func (s *Store) Settle() error {
	if err := errors.Join(os.Remove(filepath.Join(s.Dir, restore)), atomicfile.SyncDir(s.Dir)); err != nil {
		return fmt.Errorf("restore the state: %w", err)
	}
	return nil
}

func (s *Store) needed(ctx context.Context) bool {
	for _, d := range s.Databases {
		newer, err := d.Newer(ctx, d.Path)
		if err != nil {
			s.Log.Warn("the schema of a database is unknown", "path", d.Path, "err", err)
		}
		if newer {
			return true
		}
	}
	return false
}

// read verifies the copy. Errors: NotFound, DataLoss.
func (s *Store) read() (contents, error) {
	var c contents
	text, err := os.ReadFile(filepath.Join(s.Dir, kept, manifest))
	if errors.Is(err, fs.ErrNotExist) {
		return c, errdefs.NotFoundf("there is no copy of the state")
	}
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	if err != nil {
		return c, errdefs.DataLossf("the copy of the state cannot be read: %w", err)
	}
	for name, want := range c.Sums {
		got, err := sum(filepath.Join(s.Dir, kept, filepath.Base(name)))
		if err != nil || got != want {
			return c, errdefs.DataLossf("the copy of %s is damaged (%v); nothing was changed", name, err)
		}
	}
	return c, nil
}

func sum(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

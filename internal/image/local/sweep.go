package local

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/atomicfile"
)

// workdir is a temporary folder, locked as long as its owner lives.
type workdir struct {
	path string
	lock *os.File

	mu   sync.Mutex
	open []*os.File // closed with the folder
}

// keep makes Close also close f.
func (w *workdir) keep(f *os.File) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open = append(w.open, f)
}

// newWork creates a workdir. The shared lock stops the sweeper between creating and locking it.
func (s *Store) newWork() (*workdir, error) {
	unlock, err := s.lock(shared)
	if err != nil {
		return nil, err
	}
	defer unlock()
	path, err := os.MkdirTemp(s.path("tmp"), "")
	if err != nil {
		return nil, fmt.Errorf("make a temporary folder: %w", full(err))
	}
	d, err := os.Open(path)
	if err == nil {
		err = flock(d, exclusive)
	}
	if err != nil {
		_ = os.Remove(path)
		return nil, fmt.Errorf("lock a temporary folder: %w", err)
	}
	return &workdir{path: path, lock: d}, nil
}

func (w *workdir) join(name string) string { return filepath.Join(w.path, name) }

// Close removes the folder with all that is left in it.
func (w *workdir) Close() error {
	for _, f := range w.open {
		f.Close()
	}
	return errors.Join(os.RemoveAll(w.path), w.lock.Close())
}

// unclaim marks content for removal unless a name refers to it.
func (s *Store) unclaim(hex string) error {
	path := s.path("data", hex, unclaimedFile)
	return full(atomicfile.WriteFile(path, nil, 0o600))
}

func (s *Store) claim(hex string) error {
	if err := os.Remove(s.path("data", hex, unclaimedFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("claim image: %w", err)
	}
	return nil
}

// sweep removes the leftovers of dead processes: temporary folders without an owner, and content of an interrupted import
// or removal.
func (s *Store) sweep() (err error) {
	work, err := s.newWork()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	unlock, err := s.lock(exclusive)
	if err != nil {
		return err
	}
	defer unlock()
	if err := s.sweepTemporary(); err != nil {
		return err
	}
	names, err := s.names()
	if err != nil {
		return err
	}
	marked, err := filepath.Glob(s.path("data", "*", unclaimedFile))
	if err != nil {
		return err
	}
	for _, m := range marked {
		hex := filepath.Base(filepath.Dir(m))
		if !isHex(hex) {
			continue
		}
		if slices.ContainsFunc(names, func(n named) bool { return n.hex == hex }) {
			err = s.claim(hex)
		} else {
			err = s.hide(work, s.path("data", hex))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) sweepTemporary() error {
	entries, err := os.ReadDir(s.path("tmp"))
	if err != nil {
		return fmt.Errorf("list temporary folders: %w", err)
	}
	for _, e := range entries {
		path := s.path("tmp", e.Name())
		d, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("look at a temporary folder: %w", err)
		}
		err = flock(d, exclusive|unix.LOCK_NB)
		if err == nil {
			err = os.RemoveAll(path)
			s.cfg.Log.Info("leftover of a dead process removed", "op", "sweep")
		} else if errors.Is(err, unix.EWOULDBLOCK) {
			err = nil // its owner lives
		}
		d.Close()
		if err != nil {
			return fmt.Errorf("remove a leftover: %w", err)
		}
	}
	return nil
}

// pin protects the layers of the given keys from collection as long as the temporary folder exists. It also works for
// layers that do not exist yet: an import first pins what it needs and then checks which layers exist. When the records
// that name the layers are in place, they protect the layers.
func (s *Store) pin(w *workdir, keys ...string) error {
	unlock, err := s.lock(shared)
	if err != nil {
		return err
	}
	defer unlock()
	if err := os.MkdirAll(w.join(pinDir), 0o700); err != nil {
		return fmt.Errorf("pin layers: %w", full(err))
	}
	for _, k := range keys {
		if err := os.WriteFile(filepath.Join(w.join(pinDir), k), nil, 0o600); err != nil {
			return fmt.Errorf("pin layers: %w", full(err))
		}
	}
	return nil
}

const pinDir = "pins" // in a temporary folder: empty files named like the layers that its owner needs

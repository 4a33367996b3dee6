package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
)

// held implements snapshot.Held.
type held struct {
	s       snapshot.Snapshot
	store   *Store
	dir     string
	release func()
}

func (h *held) Snapshot() snapshot.Snapshot { return h.s.Clone() }
func (h *held) Dir() string                 { return h.dir }
func (h *held) Release()                    { h.release() }

// Feed implements snapshot.Held.
func (h *held) Feed() string {
	if !h.s.Arriving {
		return ""
	}
	return filepath.Join(h.dir, snapshot.FileFeed)
}

// Open implements snapshot.Held.
func (h *held) Open(name string) (*sparse.File, error) {
	f, err := openFile(h.dir, h.s, name)
	if err != nil {
		return nil, fmt.Errorf("open %s of snapshot %s: %w", name, h.s.Name, err)
	}
	return f, nil
}

// openFile opens a file of the snapshot in dir; memory together with its base.
func openFile(dir string, s snapshot.Snapshot, name string) (*sparse.File, error) {
	base := ""
	if name == snapshot.FileMemory && s.MemoryBase != "" {
		base = filepath.Join(dir, snapshot.FileBase)
	}
	f, err := sparse.Open(openPlain, filepath.Join(dir, name), base, s.Summed)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.DataLossf("its file %s is missing", name)
	}
	return f, err
}

// Hold implements snapshot.Store. It counts as a use and sets Snapshot.UsedAt.
// Errors: NotFound, DataLoss when files are missing.
func (s *Store) Hold(ctx context.Context, ref string) (snapshot.Held, error) {
	if err := s.Open(ctx); err != nil {
		return nil, err
	}
	return s.hold(ctx, ref, false)
}

// HoldArriving implements snapshot.Store.
func (s *Store) HoldArriving(ctx context.Context, ref string) (snapshot.Held, error) {
	if err := s.Open(ctx); err != nil {
		return nil, err
	}
	return s.hold(ctx, ref, true)
}

// hold waits for a snapshot that arrives, unless early says that it may be used before.
func (s *Store) hold(ctx context.Context, ref string, early bool) (snapshot.Held, error) {
	if err := s.await(ctx, ref, early); err != nil {
		return nil, err
	}
	h, err := s.keep(vm.Behalf(ctx), ref, true)
	if errors.Is(err, errFinishing) { // since then
		return s.hold(ctx, ref, early)
	}
	if err != nil {
		return nil, err
	}
	known := map[string]bool{}
	for _, f := range h.s.Files() {
		known[f] = true
	}
	if err := checkFiles(h.dir, h.s, known); err != nil {
		h.Release()
		return nil, err
	}
	return h, nil
}

// keep is Hold without a check of the files. used tells whether it counts as a use.
func (s *Store) keep(who vm.Owner, ref string, used bool) (*held, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, err := s.find(who, ref)
	if err != nil {
		return nil, err
	}
	if e.bad != nil {
		return nil, e.bad
	}
	if e.s.Arriving && !used {
		return nil, errdefs.NotFoundf("the memory of snapshot %s is still arriving", name(e.s))
	}
	if e.s.Arriving && e.finishing {
		return nil, errFinishing
	}
	e.holds++
	if used {
		e.s.UsedAt = time.Now().UTC()
		s.touch(e.s.ID, e.s.UsedAt)
	}
	release := sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if e.holds--; e.holds == 0 && e.unheld != nil {
			close(e.unheld)
			e.unheld = nil
		}
	})
	return &held{s: e.s.Clone(), store: s, dir: s.path(e.s.ID), release: release}, nil
}

// touch records the time of a use. Losing one in a power cut is harmless, so it syncs nothing.
func (s *Store) touch(id string, at time.Time) {
	path := s.path("used", id)
	err := os.Chtimes(path, at, at)
	if errors.Is(err, fs.ErrNotExist) {
		// A new file gets the kernel's coarse clock, which may be one tick behind ours.
		err = errors.Join(os.WriteFile(path, nil, 0o600), os.Chtimes(path, at, at))
	}
	if err != nil {
		s.cfg.Log.Warn("last use of a snapshot not recorded", "snapshot", id, "err", err)
	}
}

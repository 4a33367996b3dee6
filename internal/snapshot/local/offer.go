package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// A snapshot that arrives has its folder at its final place, so that its paths stay, but no snapshot.json. The socket in it tells it from one that has lost its record. With the
// process of the store it is gone: whoever opens the store next removes the folder.

// Offer implements snapshot.Draft.
func (d *draft) Offer(ctx context.Context, s snapshot.Snapshot) (snapshot.Snapshot, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s = d.own(s)
	if d.done || d.offer != nil || !s.Live || s.MemoryBase != "" {
		return snapshot.Snapshot{}, errdefs.Preconditionf("snapshot %s cannot be offered: it is finished, offered already, or has no whole memory", d.name)
	}
	s, err := d.offerAs(ctx, s)
	if err != nil {
		return snapshot.Snapshot{}, fmt.Errorf("offer snapshot %s: %w", d.name, full(err))
	}
	return s.Clone(), nil
}

func (d *draft) offerAs(ctx context.Context, s snapshot.Snapshot) (snapshot.Snapshot, error) {
	if err := check(s); err != nil {
		return s, err
	}
	if err := checkFiles(d.Dir(), s, d.linked); err != nil {
		return s, err
	}
	if info, err := os.Lstat(filepath.Join(d.Dir(), snapshot.FileFeed)); err != nil || info.Mode().Type() != fs.ModeSocket {
		return s, errors.Join(err, errdefs.New(errdefs.Internal, "nobody writes its memory"))
	}
	rest := slices.DeleteFunc(s.Files(), func(f string) bool { return f == snapshot.FileMemory })
	if err := onlyThese(d.Dir(), append(withSums(rest), snapshot.FileMemory, snapshot.FileFeed)); err != nil {
		return s, err
	}
	if err := d.seal(ctx, rest); err != nil {
		return s, err
	}
	s = d.cleansed(s)
	s.Summed, s.Arriving = true, true
	e := &entry{s: s, arrived: make(chan struct{})}
	if err := os.Rename(d.Dir(), d.store.path(d.id)); err != nil {
		return s, err
	}
	d.offer = e
	d.store.mu.Lock()
	defer d.store.mu.Unlock()
	d.store.all[d.id] = e
	return s, nil
}

// arrive is commit for what was offered: its memory is whole now.
func (d *draft) arrive(ctx context.Context, s snapshot.Snapshot) (snapshot.Snapshot, error) {
	e, st := d.offer, d.store
	if err := checkFiles(d.Dir(), s, d.linked); err != nil {
		return s, err
	}
	s = d.cleansed(s)
	s.Summed, s.Arriving = true, false
	if err := d.seal(ctx, s.Files()); err != nil {
		return s, err
	}
	if err := d.unused(ctx); err != nil {
		return s, err
	}
	var err error
	if s.Size, err = occupied(d.Dir()); err != nil {
		return s, err
	}
	if err := store(d.Dir(), s); err != nil { // from here it is a snapshot
		return s, err
	}
	if err := errors.Join(atomicfile.SyncDir(st.path(d.id)), atomicfile.SyncDir(st.path())); err != nil {
		return s, errors.Join(err, os.Remove(filepath.Join(d.Dir(), snapshot.FileMeta)))
	}
	if err := os.Remove(filepath.Join(d.Dir(), snapshot.FileFeed)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		st.cfg.Log.Warn("socket of an arrived snapshot is left until the next start", "snapshot", d.id, "err", err)
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	s.UsedAt = e.s.UsedAt
	e.s = s
	close(e.arrived)
	return s, nil
}

// unused waits until nobody holds what arrived, and lets nobody else: a clone that has just begun still asks for its memory.
func (d *draft) unused(ctx context.Context) error {
	for {
		d.store.mu.Lock()
		if d.offer.holds == 0 {
			d.offer.finishing = true
			d.store.mu.Unlock()
			return nil
		}
		if d.offer.unheld == nil {
			d.offer.unheld = make(chan struct{})
		}
		unheld := d.offer.unheld
		d.store.mu.Unlock()
		select {
		case <-unheld:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// retract removes what was offered. Who holds it finds its files gone.
func (d *draft) retract() error {
	st, gone := d.store, d.store.path("tmp", d.id+goneSuffix)
	st.mu.Lock()
	d.offer.gone = true
	delete(st.all, d.id)
	close(d.offer.arrived)
	st.mu.Unlock()
	err := os.Rename(d.Dir(), gone)
	if err == nil {
		err = atomicfile.RemoveAll(gone)
	}
	d.free()
	if err != nil {
		return fmt.Errorf("discard snapshot %s: %w", d.name, err)
	}
	return nil
}

// errFinishing means that a snapshot that arrives is about to be whole.
var errFinishing = errors.New("it is about to be whole")

// await waits until the snapshot that ref names has arrived, if it is arriving and cannot be used before.
func (s *Store) await(ctx context.Context, ref string, early bool) error {
	s.mu.Lock()
	e, err := s.find(vm.Behalf(ctx), ref)
	wait := err == nil && e.s.Arriving && (!early || e.finishing)
	s.mu.Unlock()
	if !wait {
		return nil // whoever holds it reports the error
	}
	select {
	case <-e.arrived:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// sweepOffers removes what a killed process has offered and never finished. What it cannot remove it logs: the store opens without that.
func (s *Store) sweepOffers() error {
	entries, err := os.ReadDir(s.path())
	if err != nil {
		return err
	}
	for _, e := range entries {
		feed := s.path(e.Name(), snapshot.FileFeed)
		if !e.IsDir() || !vm.ID(e.Name()).Valid() {
			continue
		}
		if info, err := os.Lstat(feed); err != nil || info.Mode().Type() != fs.ModeSocket {
			continue
		}
		if _, err := os.Lstat(s.path(e.Name(), snapshot.FileMeta)); err == nil { // it was finished
			if err := os.Remove(feed); err != nil {
				return err
			}
			continue
		}
		gone := s.path("tmp", e.Name()+goneSuffix)
		if err := errors.Join(os.Rename(s.path(e.Name()), gone), atomicfile.RemoveAll(gone)); err != nil {
			s.cfg.Log.Error("leftover of a dead process not removed", "op", "sweep", "snapshot", e.Name(), "err", err)
			continue
		}
		s.cfg.Log.Info("snapshot removed that had not arrived when its process died", "op", "sweep", "snapshot", e.Name())
	}
	return nil
}

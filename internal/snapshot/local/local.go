// Package local is the snapshot store of one host: one folder per snapshot, with plain files that nobody writes to any
// more.
//
// Only one process has the store open. The store saves and starts no guest, and does not know which VM uses a snapshot:
// VMs have their own links to the files they need.
package local

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

var _ snapshot.Store = (*Store)(nil)

// Config configures the store.
type Config struct {
	Dir string       // absolute, on the file system of the VMs' folders; created when missing, mode 0700
	Log *slog.Logger // nil discards

	// OwnerOf derives, from its labels, the owner of a snapshot that was saved before snapshots had owners; nil: the
	// operator.
	OwnerOf func(labels map[string]string) vm.Owner
}

// Store implements snapshot.Store. Its folder:
//
//	lock             held by the process that has the store open
//	<id>/            one snapshot: snapshot.json, vmstate, memory-ranges, memory-base if that is a delta, and the layers of
//	                 its disks, each with its checksums beside it; mode 0700, files 0600
//	sums/            checksums of layers, by inode, size and mtime: a layer can be in many snapshots, but is read only once
//	used/<id>        empty; its mtime is the time of the last use
//	tmp/<id>/        a draft, or, as tmp/<id>.gone/, a snapshot that is being removed
//
// Snapshot.Size is the disk space that the files of its folder occupy, each file counted once. Files shared with
// another snapshot or a VM by hard links count fully for each of them, so removing one of them frees less.
type Store struct {
	cfg Config

	mu    sync.Mutex
	lock  *os.File // nil: not open
	all   map[string]*entry
	names map[string]string // ids by the owner's name (see key); drafts too

	layers scrub
}

// entry is one snapshot in the index.
type entry struct {
	update sync.Mutex // held while the record is written

	// Guarded by Store.mu:
	s     snapshot.Snapshot
	bad   error // its record cannot be read; s has only the id
	holds int
	gone  bool // being removed

	arrived   chan struct{} // closed when the snapshot is whole, or will never be; nil: it was never offered
	finishing bool          // nobody holds it before it has arrived any more
	unheld    chan struct{} // closed when holds becomes 0; nil: nobody waits for that
}

// New validates cfg. It does not touch the folder; Open or the first use does.
func New(cfg Config) (*Store, error) {
	if !filepath.IsAbs(cfg.Dir) {
		return nil, errdefs.Invalidf("the snapshot folder %q must be an absolute path", cfg.Dir)
	}
	cfg.Dir = filepath.Clean(cfg.Dir)
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	return &Store{cfg: cfg}, nil
}

// Open locks the store's folder, removes what a killed process left unfinished, and reads the record of each snapshot.
// Every method calls it; a call at start only does the work earlier.
// Errors: FailedPrecondition when another process has the store open.
func (s *Store) Open(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lock != nil {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	for _, d := range []string{s.path(), s.path("used"), s.path("tmp"), s.path("sums")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return fmt.Errorf("open the snapshot store: %w", full(err))
		}
	}
	lock, err := takeLock(ctx, s.path("lock"))
	if err != nil {
		return fmt.Errorf("open the snapshot store %s: %w", s.cfg.Dir, err)
	}
	if err := errors.Join(s.sweep(), s.sweepOffers(), s.index(), s.forgetSums()); err != nil {
		lock.Close()
		return fmt.Errorf("open the snapshot store %s: %w", s.cfg.Dir, err)
	}
	s.lock = lock
	return nil
}

// Close unlocks the store's folder for other processes. The store must not be used afterwards.
func (s *Store) Close() error {
	s.layers.end()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lock == nil {
		return nil
	}
	err := s.lock.Close()
	s.lock = nil
	return err
}

func (s *Store) path(elem ...string) string {
	return filepath.Join(append([]string{s.cfg.Dir}, elem...)...)
}

const goneSuffix = ".gone"

// sweep removes drafts and half-removed snapshots. It does not touch entries with names that are not ours. What it cannot remove it logs: a VM may have filled a
// draft, and must not keep the store from opening.
func (s *Store) sweep() error {
	entries, err := os.ReadDir(s.path("tmp"))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !vm.ID(strings.TrimSuffix(e.Name(), goneSuffix)).Valid() || !e.IsDir() {
			s.cfg.Log.Warn("unknown entry in the snapshot store ignored", "path", s.path("tmp", e.Name()))
			continue
		}
		id := strings.TrimSuffix(e.Name(), goneSuffix)
		if err := atomicfile.RemoveAll(s.path("tmp", e.Name())); err != nil {
			s.cfg.Log.Error("leftover of a dead process not removed", "op", "sweep", "snapshot", id, "err", err)
			continue
		}
		s.cfg.Log.Info("leftover of a dead process removed", "op", "sweep", "snapshot", id)
	}
	return nil
}

// index reads the record of every snapshot. It logs an unreadable one and leaves it in place: that snapshot can still
// be queried and removed by its id, and the others are not affected.
func (s *Store) index() error {
	entries, err := os.ReadDir(s.path())
	if err != nil {
		return err
	}
	s.all, s.names = map[string]*entry{}, map[string]string{}
	unsummed := 0
	for _, f := range entries {
		id := f.Name()
		if !f.IsDir() || !vm.ID(id).Valid() {
			continue
		}
		snap, err := load(s.path(id))
		if err == nil && snap.ID != id {
			err = errdefs.DataLossf("its record belongs to %q", snap.ID)
		}
		if err == nil && snap.Owner.Operator() && s.cfg.OwnerOf != nil {
			snap.Owner = s.cfg.OwnerOf(snap.Labels)
		}
		if err == nil && s.names[key(snap)] != "" {
			err = errdefs.DataLossf("another snapshot is called %s too", key(snap))
		}
		if err != nil {
			s.cfg.Log.Error("damaged snapshot ignored", "snapshot", id, "err", err)
			s.all[id] = &entry{s: snapshot.Snapshot{ID: id}, bad: errdefs.DataLossf("snapshot %s is damaged; `cocoon snapshot rm %s` removes it: %w", id, id, err)}
			continue
		}
		if info, err := os.Stat(s.path("used", id)); err == nil && info.ModTime().After(snap.UsedAt) {
			snap.UsedAt = info.ModTime().UTC()
		}
		s.all[id], s.names[key(snap)] = &entry{s: snap}, id
		if !snap.Summed {
			unsummed++
		}
	}
	if unsummed > 0 {
		s.cfg.Log.Info("snapshots of earlier releases have no checksums and are not verified; save or pull them again", "count", unsummed)
	}
	return s.forgetUses()
}

// forgetUses removes the use times of removed snapshots.
func (s *Store) forgetUses() error {
	entries, err := os.ReadDir(s.path("used"))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if vm.ID(e.Name()).Valid() && s.all[e.Name()] == nil {
			if err := os.Remove(s.path("used", e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// Get implements snapshot.Store.
func (s *Store) Get(ctx context.Context, ref string) (snapshot.Snapshot, error) {
	if err := s.Open(ctx); err != nil {
		return snapshot.Snapshot{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e, err := s.find(vm.Behalf(ctx), ref)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	return e.s.Clone(), e.bad
}

// key is the store-wide unique name of s.
func key(s snapshot.Snapshot) string { return s.Owner.Qualify(s.Name) }

// named returns what references to e are matched against. A damaged snapshot is the operator's: its owner is unknown.
func (e *entry) named() vm.Named {
	return vm.Named{ID: vm.ID(e.s.ID), Name: e.s.Name, Owner: e.s.Owner, Shared: e.s.Published}
}

// find resolves a reference on behalf of who; see vm.Kind.Match.
// Preconditions: s.mu is held.
func (s *Store) find(who vm.Owner, ref string) (*entry, error) {
	if e := s.all[s.names[who.Qualify(ref)]]; e != nil && !e.gone {
		return e, nil
	}
	id, err := vm.Snapshots.Match(who, ref, func(yield func(vm.Named) bool) {
		for _, e := range s.all {
			if !e.gone && !yield(e.named()) {
				return
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return s.all[string(id)], nil
}

// findOwn is find for a change: it refuses snapshots that the operator publishes to others.
// Preconditions: s.mu is held.
func (s *Store) findOwn(who vm.Owner, ref string) (*entry, error) {
	e, err := s.find(who, ref)
	if err == nil && !who.Reaches(e.s.Owner) {
		return nil, errdefs.Preconditionf("snapshot %s belongs to the operator, who published it; only the operator can change it", name(e.s))
	}
	return e, err
}

// List implements snapshot.Store. It leaves out damaged snapshots.
func (s *Store) List(ctx context.Context) ([]snapshot.Snapshot, error) {
	if err := s.Open(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]snapshot.Snapshot, 0, len(s.all))
	for _, e := range s.all {
		if e.bad == nil && !e.gone && e.named().VisibleTo(vm.Behalf(ctx)) {
			out = append(out, e.s.Clone())
		}
	}
	slices.SortFunc(out, func(a, b snapshot.Snapshot) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Owner.Namespace, b.Owner.Namespace))
	})
	return out, nil
}

// Remove implements snapshot.Store.
func (s *Store) Remove(ctx context.Context, ref string) error {
	if err := s.Open(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	e, err := s.findOwn(vm.Behalf(ctx), ref)
	if err == nil && e.s.Arriving {
		err = errdefs.Preconditionf("the memory of snapshot %s is still arriving; try again when it is here", name(e.s))
	}
	if err == nil && e.holds > 0 {
		err = errdefs.Preconditionf("snapshot %s is in use by %d other operations, such as an export or a starting clone; try again when they are done", name(e.s), e.holds)
	}
	if err != nil {
		s.mu.Unlock()
		return err
	}
	e.gone = true // from here on nobody else finds it; its name stays taken
	s.mu.Unlock()

	e.update.Lock() // a record that is just being written must be stored before the folder is removed
	defer e.update.Unlock()
	id := e.s.ID
	gone := s.path("tmp", id+goneSuffix)
	err = os.Rename(s.path(id), gone)
	s.mu.Lock()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		e.gone = false
		s.mu.Unlock()
		return fmt.Errorf("remove snapshot %s: %w", name(e.s), full(err))
	}
	delete(s.all, id)
	if s.names[key(e.s)] == id {
		delete(s.names, key(e.s))
	}
	s.mu.Unlock()
	// If a crash undoes the rename, the snapshot comes back, and it must be whole. So the rename becomes durable before
	// any file is removed.
	if err := errors.Join(atomicfile.SyncDir(s.path()), atomicfile.SyncDir(s.path("tmp"))); err != nil {
		return err
	}
	_ = os.Remove(s.path("used", id))
	if err := atomicfile.RemoveAll(gone); err != nil {
		s.cfg.Log.Warn("files of a removed snapshot are left until the next start", "snapshot", id, "err", err)
	}
	return nil
}

// name is the user-visible name of a snapshot.
func name(s snapshot.Snapshot) string { return cmp.Or(s.Name, s.ID) }

// Update implements snapshot.Store. ID, Live, MemoryBase, Summed, Disks and Size cannot change; a new name must be
// free.
func (s *Store) Update(ctx context.Context, ref string, change func(*snapshot.Snapshot)) (snapshot.Snapshot, error) {
	if err := s.Open(ctx); err != nil {
		return snapshot.Snapshot{}, err
	}
	s.mu.Lock()
	e, err := s.findOwn(vm.Behalf(ctx), ref)
	s.mu.Unlock()
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	e.update.Lock()
	defer e.update.Unlock()
	s.mu.Lock()
	old, err := e.s.Clone(), e.bad
	if e.gone {
		err = vm.Snapshots.Missing(vm.Behalf(ctx), ref)
	} else if e.s.Arriving {
		err = errdefs.Preconditionf("the memory of snapshot %s is still arriving; try again when it is here", name(e.s))
	}
	s.mu.Unlock()
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	next := old.Clone()
	change(&next)
	next.ID, next.Live, next.Disks, next.Size, next.MemoryBase, next.Summed = old.ID, old.Live, old.Clone().Disks, old.Size, old.MemoryBase, old.Summed
	if key(next) != key(old) {
		if err := s.reserve(next.Owner, next.Name, next.ID); err != nil {
			return snapshot.Snapshot{}, err
		}
	}
	err = store(s.path(next.ID), next)
	s.mu.Lock()
	defer s.mu.Unlock()
	if key(next) != key(old) {
		forget := key(old)
		if err != nil {
			forget = key(next)
		}
		delete(s.names, forget)
	}
	if err != nil {
		return snapshot.Snapshot{}, fmt.Errorf("update snapshot %s: %w", old.Name, full(err))
	}
	if next.UsedAt.Before(e.s.UsedAt) && next.UsedAt.Equal(old.UsedAt) {
		next.UsedAt = e.s.UsedAt // used concurrently
	}
	e.s = next
	return next.Clone(), nil
}

// reserve takes a name in owner's namespace for the snapshot or draft id.
func (s *Store) reserve(owner vm.Owner, name, id string) error {
	if err := checkName(name); err != nil {
		return err
	}
	name = owner.Qualify(name)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.names[name] != "" {
		return vm.Snapshots.Taken(name)
	}
	s.names[name] = id
	return nil
}

// load reads the record from the folder of a snapshot.
func load(dir string) (snapshot.Snapshot, error) {
	data, err := readBounded(filepath.Join(dir, snapshot.FileMeta), maxRecord)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	return parse(data)
}

// store writes the record into the folder of a snapshot.
func store(dir string, s snapshot.Snapshot) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("write the record of snapshot %s: %w", s.Name, err)
	}
	return atomicfile.WriteFile(filepath.Join(dir, snapshot.FileMeta), append(data, '\n'), 0o600)
}

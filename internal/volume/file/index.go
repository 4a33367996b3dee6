package file

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/keylock"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume/record"
)

// Names in the folder of an index and of one object.
const (
	draftPrefix = ".draft-"
	gonePrefix  = ".gone-"
	dataFile    = "data"
	tempInfix   = ".tmp-" // .NAME.tmp-*: what is about to replace NAME; atomicfile uses the same form
)

// object is the record of a volume or a snapshot.
type object[R any] interface {
	Named() vm.Named
	Clone() R
}

// index has all objects of one kind, on disk and in memory.
type index[R object[R]] struct {
	kind  vm.Kind
	dir   string // has one folder for each object
	file  string // the name of the record in such a folder
	log   *slog.Logger
	parse func(text []byte, kind string) (R, error)
	fit   func(rec *R, size int64) error // checks the size of the data, or adapts the record to it

	locks keylock.Locks[vm.ID] // of objects that are being changed

	mu    sync.Mutex
	all   map[vm.ID]*entry[R]
	names map[string]vm.ID // ids by name with owner; drafts too
}

// entry is one object in the index.
type entry[R object[R]] struct {
	id   vm.ID
	bad  error    // it is damaged
	head vm.Named // of one that is damaged: what is known

	// Written under index.mu and the lock of the object, so that one of the two is enough to read it.
	rec R

	// Guarded by index.mu:
	gone  bool // being removed: nobody finds it, but its name is still taken
	reads int  // operations that read the data
}

func (e *entry[R]) named() vm.Named {
	if e.bad != nil {
		return e.head
	}
	return e.rec.Named()
}

func newIndex[R object[R]](kind vm.Kind, dir, file string, log *slog.Logger, parse func([]byte, string) (R, error), fit func(*R, int64) error) *index[R] {
	return &index[R]{kind: kind, dir: dir, file: file, log: log, parse: parse, fit: fit, all: map[vm.ID]*entry[R]{}, names: map[string]vm.ID{}}
}

// path returns a path in the folder of an object, or that folder.
func (x *index[R]) path(id vm.ID, elem ...string) string {
	return filepath.Join(append([]string{x.dir, string(id)}, elem...)...)
}

// data returns the path of the bytes of an object.
func (x *index[R]) data(id vm.ID) string { return x.path(id, dataFile) }

func key(n vm.Named) string { return n.Owner.Qualify(n.Name) }

// scan reads all objects from the disk, and removes drafts and what is half removed.
func (x *index[R]) scan() error {
	entries, err := os.ReadDir(x.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(x.dir, e.Name())
		switch {
		case e.IsDir() && leftover(e.Name()):
			if err := os.RemoveAll(path); err != nil {
				return fmt.Errorf("remove the leftover %s: %w", path, err)
			}
			x.log.Info("leftover of a dead process removed", "op", "open", "path", path)
		case !vm.ID(e.Name()).Valid():
			x.log.Warn("unknown entry in the volume store ignored", "path", path)
		default:
			x.add(vm.ID(e.Name()), e.IsDir())
		}
	}
	return nil
}

func leftover(name string) bool {
	for _, prefix := range []string{draftPrefix, gonePrefix} {
		if id, ok := strings.CutPrefix(name, prefix); ok && vm.ID(id).Valid() {
			return true
		}
	}
	return false
}

// add reads one object from the disk. It leaves a damaged one in place and keeps its name taken.
func (x *index[R]) add(id vm.ID, isDir bool) {
	e := &entry[R]{id: id}
	x.all[id] = e
	rec, err := x.load(id, isDir)
	e.rec, e.head = rec, vm.Named{ID: id}
	if n := rec.Named(); n.ID == id && x.kind.ValidateName(n.Name) == nil {
		other, taken := x.names[key(n)]
		if e.head.Owner = n.Owner; taken {
			err = errors.Join(err, errdefs.DataLossf("%s has the name %s too", other, key(n)))
		} else {
			e.head.Name, x.names[key(n)] = n.Name, id
		}
	}
	if err != nil {
		x.log.Warn("damaged object in the volume store ignored", "op", "open", "kind", x.kind.Noun, "path", x.path(id), "err", err)
		e.bad = errdefs.DataLossf("%s %s is damaged: %w; repair the files in %s, or move that folder away, and restart cocoond", x.kind.Noun, cmp.Or(e.head.Name, string(id)), err, x.path(id))
	}
}

// load reads and checks the record of an object. With an error it may return the record too.
func (x *index[R]) load(id vm.ID, isDir bool) (rec R, err error) {
	if !isDir {
		return rec, errdefs.DataLossf("%s is not a folder", x.path(id))
	}
	text, err := record.Read(x.path(id, x.file))
	if err != nil {
		return rec, err
	}
	if rec, err = x.parse(text, Kind); err != nil {
		return rec, err
	}
	if rec.Named().ID != id {
		return rec, errdefs.DataLossf("its record is that of %s", rec.Named().ID)
	}
	f, err := record.OpenPlain(x.data(id), os.O_RDONLY)
	if err != nil {
		return rec, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return rec, err
	}
	if err := x.fit(&rec, info.Size()); err != nil {
		return rec, err
	}
	return rec, x.tidy(id)
}

// tidy removes what a killed process was about to replace a file by.
func (x *index[R]) tidy(id vm.ID) error {
	entries, err := os.ReadDir(x.path(id))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Type().IsRegular() && (strings.HasPrefix(e.Name(), "."+x.file+tempInfix) || strings.HasPrefix(e.Name(), "."+dataFile+tempInfix)) {
			if err := os.Remove(x.path(id, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// find resolves a reference; see vm.Kind.Match. Preconditions: x.mu is held.
func (x *index[R]) find(who vm.Owner, ref string) (*entry[R], error) {
	id, err := x.kind.Match(who, ref, func(yield func(vm.Named) bool) {
		for _, e := range x.all {
			if !e.gone && !yield(e.named()) {
				return
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return x.all[id], x.all[id].bad
}

func (x *index[R]) get(ctx context.Context, ref string) (R, error) {
	var none R
	if err := ctx.Err(); err != nil {
		return none, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	e, err := x.find(vm.Behalf(ctx), ref)
	if err != nil {
		return none, err
	}
	return e.rec.Clone(), nil
}

// list returns all objects that are fit for use, sorted by owner and name.
func (x *index[R]) list(ctx context.Context) ([]R, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	x.mu.Lock()
	out := make([]R, 0, len(x.all))
	for _, e := range x.all {
		if e.bad == nil && !e.gone && e.named().VisibleTo(vm.Behalf(ctx)) {
			out = append(out, e.rec.Clone())
		}
	}
	x.mu.Unlock()
	slices.SortFunc(out, func(a, b R) int { return a.Named().Compare(b.Named()) })
	return out, nil
}

// lock finds an object and keeps others from changing it until unlock.
func (x *index[R]) lock(ctx context.Context, ref string) (e *entry[R], unlock func(), err error) {
	who := vm.Behalf(ctx)
	x.mu.Lock()
	e, err = x.find(who, ref)
	x.mu.Unlock()
	if err != nil {
		return nil, nil, err
	}
	unlock, err = x.locks.Lock(ctx, e.id)
	if err != nil {
		return nil, nil, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if e.gone {
		unlock()
		return nil, nil, x.kind.Missing(who, ref)
	}
	return e, unlock, nil
}

// change edits the record of an object, on disk and in memory.
func (x *index[R]) change(ctx context.Context, ref string, edit func(*R) error) (R, error) {
	var none R
	e, unlock, err := x.lock(ctx, ref)
	if err != nil {
		return none, err
	}
	defer unlock()
	next := e.rec.Clone()
	if err := edit(&next); err != nil {
		return none, err
	}
	if reflect.DeepEqual(next, e.rec) {
		return next, nil
	}
	if err := x.save(e, next); err != nil {
		return none, err
	}
	return next.Clone(), nil
}

// save replaces the record of e. Preconditions: the lock of e is held.
func (x *index[R]) save(e *entry[R], next R) (err error) {
	old, name := key(e.named()), key(next.Named())
	if name != old {
		if err := x.reserve(name, e.id); err != nil {
			return err
		}
	}
	path := x.path(e.id, x.file)
	if err = record.Write(path, next); err != nil {
		_ = record.Write(path, e.rec) // the new one may be on the disk; without room, the old one still is
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if err != nil {
		old, name, next = name, old, e.rec
	}
	if name != old {
		delete(x.names, old)
	}
	e.rec = next
	return err
}

// reserve takes a name, given with its owner, for an object. Errors: AlreadyExists.
func (x *index[R]) reserve(name string, id vm.ID) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	by, taken := x.names[name]
	if !taken {
		x.names[name] = id
		return nil
	}
	if e := x.all[by]; e != nil && e.bad != nil {
		return errdefs.Existsf("the name is taken: %w", e.bad)
	}
	return x.kind.Taken(name)
}

// remove removes an object, unless check fails.
func (x *index[R]) remove(ctx context.Context, ref string, check func(R) error) error {
	e, unlock, err := x.lock(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	if err := check(e.rec); err != nil {
		return err
	}
	x.mu.Lock()
	e.gone = true
	x.mu.Unlock()
	gone := filepath.Join(x.dir, gonePrefix+string(e.id))
	err = os.Rename(x.path(e.id), gone)
	x.mu.Lock()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		e.gone = false
		x.mu.Unlock()
		return err
	}
	delete(x.all, e.id)
	delete(x.names, key(e.named()))
	x.mu.Unlock()
	// If a power cut undoes the rename, the object must come back whole. So no file is removed before the rename is durable.
	if err := atomicfile.SyncDir(x.dir); err != nil {
		return err
	}
	if err := os.RemoveAll(gone); err != nil {
		x.log.Warn("removed files are left until the next start", "kind", x.kind.Noun, "path", gone, "err", err)
	}
	return nil
}

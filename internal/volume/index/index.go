// Package index has the objects of a volume store in memory: volumes or snapshots. It finds them by name or id for an owner, keeps names
// unique, lets one caller at a time change an object, and replaces its record. It does not know what a record says about the bytes, nor
// makes or removes any.
package index

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/keylock"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume/record"
)

// Record is the record of an object.
type Record[R any] interface {
	Named() vm.Named
	Clone() R
}

// Index has all objects of one kind.
type Index[R Record[R], X any] struct {
	kind  vm.Kind
	file  func(vm.ID) string // the path of a record
	locks keylock.Locks[vm.ID]

	mu    sync.Mutex
	all   map[vm.ID]*Entry[R, X]
	names map[string]vm.ID // ids by name with owner, also of objects that are being made
}

// Entry is one object. Only the methods of its Index change it.
type Entry[R Record[R], X any] struct {
	ID vm.ID

	// Written under the mutex of the Index and the lock of the object, so that one of the two is enough to read them.
	Rec R
	Bad error // why the object is damaged; nil: it is not
	Own X     // what the store keeps with the object

	// Guarded by the mutex of the Index; see Index.Locked.
	Hidden bool // nobody finds the object: it is being made or removed
	Reads  int  // operations that read its bytes

	head vm.Named // what is known of a damaged object
}

// New returns an empty index. file is where the record of an object is.
func New[R Record[R], X any](kind vm.Kind, file func(vm.ID) string) *Index[R, X] {
	return &Index[R, X]{kind: kind, file: file, all: map[vm.ID]*Entry[R, X]{}, names: map[string]vm.ID{}}
}

func key(n vm.Named) string { return n.Owner.Qualify(n.Name) }

func (e *Entry[R, X]) named() vm.Named {
	if e.Bad != nil {
		return e.head
	}
	return e.Rec.Named()
}

// Add adds an object whose record was read with the error err, if any. An object with an error, or with a name that another one has, is
// damaged: its name stays taken if it is known. remedy says what a person can do about that.
func (x *Index[R, X]) Add(id vm.ID, rec R, err error, remedy string) *Entry[R, X] {
	x.mu.Lock()
	defer x.mu.Unlock()
	e := &Entry[R, X]{ID: id, Rec: rec, head: vm.Named{ID: id}}
	x.all[id] = e
	if n := rec.Named(); n.ID == id && x.kind.ValidateName(n.Name) == nil {
		other, taken := x.names[key(n)]
		if e.head.Owner = n.Owner; taken {
			err = errors.Join(err, errdefs.DataLossf("%s has the name %s too", other, key(n)))
		} else {
			e.head.Name, x.names[key(n)] = n.Name, id
		}
	}
	if err != nil {
		x.damage(e, err, remedy)
	}
	return e
}

// Damage marks an object as damaged. Preconditions: the lock of the object is held, or nobody else has the index.
func (x *Index[R, X]) Damage(e *Entry[R, X], why error, remedy string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.damage(e, why, remedy)
}

func (x *Index[R, X]) damage(e *Entry[R, X], why error, remedy string) {
	e.Bad = errdefs.DataLossf("%s %s is damaged: %w; %s", x.kind.Noun, cmp.Or(e.head.Name, string(e.ID)), why, remedy)
}

// Put adds an object. hidden: nobody finds it until Show. Preconditions: its name, if it has one, is reserved.
func (x *Index[R, X]) Put(id vm.ID, rec R, hidden bool) *Entry[R, X] {
	x.mu.Lock()
	defer x.mu.Unlock()
	e := &Entry[R, X]{ID: id, Rec: rec, Hidden: hidden}
	x.all[id], e.head = e, headOf(id, rec.Named())
	return e
}

func headOf(id vm.ID, n vm.Named) vm.Named { return vm.Named{ID: id, Name: n.Name, Owner: n.Owner} }

// Entries returns all objects, also those that are hidden.
func (x *Index[R, X]) Entries() []*Entry[R, X] {
	x.mu.Lock()
	defer x.mu.Unlock()
	out := make([]*Entry[R, X], 0, len(x.all))
	for _, e := range x.all {
		out = append(out, e)
	}
	return out
}

// find resolves a reference; see vm.Kind.Match. Preconditions: x.mu is held.
func (x *Index[R, X]) find(who vm.Owner, ref string) (*Entry[R, X], error) {
	id, err := x.kind.Match(who, ref, func(yield func(vm.Named) bool) {
		for _, e := range x.all {
			if !e.Hidden && !yield(e.named()) {
				return
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return x.all[id], x.all[id].Bad
}

// Get returns the record of the object ref. Errors: NotFound, InvalidArgument if ref is ambiguous, DataLoss.
func (x *Index[R, X]) Get(ctx context.Context, ref string) (R, error) {
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
	return e.Rec.Clone(), nil
}

// List returns the records of all objects that are fit for use, sorted by owner and name.
func (x *Index[R, X]) List(ctx context.Context) ([]R, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	x.mu.Lock()
	out := make([]R, 0, len(x.all))
	for _, e := range x.all {
		if e.Bad == nil && !e.Hidden && e.named().VisibleTo(vm.Behalf(ctx)) {
			out = append(out, e.Rec.Clone())
		}
	}
	x.mu.Unlock()
	slices.SortFunc(out, func(a, b R) int { return a.Named().Compare(b.Named()) })
	return out, nil
}

// Lock finds an object and keeps others from changing it until release. Errors: as Get.
func (x *Index[R, X]) Lock(ctx context.Context, ref string) (e *Entry[R, X], release func(), err error) {
	who := vm.Behalf(ctx)
	x.mu.Lock()
	e, err = x.find(who, ref)
	x.mu.Unlock()
	if err != nil {
		return nil, nil, err
	}
	if release, err = x.LockID(ctx, e.ID); err != nil {
		return nil, nil, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if err = e.Bad; e.Hidden {
		err = x.kind.Missing(who, ref)
	}
	if err != nil {
		release()
		return nil, nil, err
	}
	return e, release, nil
}

// LockID keeps others from changing the object id, which may be hidden or damaged, until release.
func (x *Index[R, X]) LockID(ctx context.Context, id vm.ID) (release func(), err error) {
	return x.locks.Lock(ctx, id)
}

// Save replaces the record of an object. Preconditions: the lock of the object is held. Errors: AlreadyExists if its name is new and taken.
func (x *Index[R, X]) Save(e *Entry[R, X], next R) (err error) {
	old, name := key(e.named()), key(next.Named())
	if name != old {
		if err := x.reserve(name, e.ID); err != nil {
			return err
		}
	}
	if err = record.Write(x.file(e.ID), next); err != nil {
		_ = record.Write(x.file(e.ID), e.Rec) // the new one may be on the disk; without room, the old one still is
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if err != nil {
		old, name, next = name, old, e.Rec
	}
	if name != old {
		delete(x.names, old)
	}
	e.Rec, e.head = next.Clone(), headOf(e.ID, next.Named())
	return err
}

// Reserve takes a name for a new object of owner, and returns the id that the object is to have. name may be "": the index chooses one.
// Errors: AlreadyExists.
func (x *Index[R, X]) Reserve(owner vm.Owner, name string) (id vm.ID, as string, err error) {
	id = vm.NewID()
	if as = name; as == "" {
		as = strings.ReplaceAll(x.kind.Noun, " ", "-") + "-" + string(id[:10])
	}
	return id, as, x.reserve(owner.Qualify(as), id)
}

func (x *Index[R, X]) reserve(name string, id vm.ID) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	by, taken := x.names[name]
	if !taken {
		x.names[name] = id
		return nil
	}
	if e := x.all[by]; e != nil && e.Bad != nil {
		return errdefs.Existsf("the name is taken: %w", e.Bad)
	}
	return x.kind.Taken(name)
}

// Free ends a reservation.
func (x *Index[R, X]) Free(owner vm.Owner, name string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.names, owner.Qualify(name))
}

// Hide lets nobody find an object any more, or finds it again. Its name stays taken. Preconditions: the lock of the object is held.
func (x *Index[R, X]) Hide(e *Entry[R, X], hidden bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e.Hidden = hidden
}

// Show makes a new object visible, with its record. Preconditions: the lock of the object is held, and its name is reserved.
func (x *Index[R, X]) Show(e *Entry[R, X], rec R) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e.Rec, e.head, e.Hidden = rec.Clone(), headOf(e.ID, rec.Named()), false
}

// Empty frees the name of a hidden object that is being removed, and gives it a record without a name. Preconditions: the lock of the
// object is held.
func (x *Index[R, X]) Empty(e *Entry[R, X], rec R) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.free(e)
	e.Rec, e.head = rec, vm.Named{ID: e.ID}
}

// Forget removes an object and frees its name.
func (x *Index[R, X]) Forget(e *Entry[R, X]) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.free(e)
	delete(x.all, e.ID)
}

func (x *Index[R, X]) free(e *Entry[R, X]) {
	if name := key(e.named()); x.names[name] == e.ID {
		delete(x.names, name)
	}
}

// Has reports whether the index still has e.
func (x *Index[R, X]) Has(e *Entry[R, X]) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.all[e.ID] == e
}

// Reading counts operations that read the bytes of an object.
func (x *Index[R, X]) Reading(e *Entry[R, X], n int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e.Reads += n
}

// Readers returns how many operations read the bytes of an object.
func (x *Index[R, X]) Readers(e *Entry[R, X]) int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return e.Reads
}

// Locked calls f under the mutex of the index. f may read and change Own, and read everything else of an Entry.
func (x *Index[R, X]) Locked(f func()) {
	x.mu.Lock()
	defer x.mu.Unlock()
	f()
}

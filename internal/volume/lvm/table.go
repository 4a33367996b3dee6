package lvm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/keylock"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume/record"
)

const (
	suffix = ".json"   // of the file of a record
	prefix = "cocoon-" // of the names of our logical volumes; the rest is an id
	tag    = "cocoon"  // of our logical volumes
)

// object is the record of a volume or a snapshot.
type object[R any] interface {
	Named() vm.Named
	Clone() R
}

// recorded is what is kept of one volume or snapshot.
type recorded[R object[R]] struct {
	Object R `json:"object"`
	state
}

// state says where the bytes of an object are.
type state struct {
	LV        string   `json:"lv"`             // the logical volume with the bytes; "" while the object is made or removed
	Gone      []string `json:"gone,omitempty"` // logical volumes that are being made or removed: the next New removes them
	Allocated int64    `json:"allocated"`      // bytes in the pool, when it was last known; the kernel knows better while there is a device
}

func (r recorded[R]) clone() recorded[R] {
	r.Object, r.Gone = r.Object.Clone(), slices.Clone(r.Gone)
	return r
}

// table has all objects of one kind, on disk and in memory.
type table[R object[R]] struct {
	kind  vm.Kind
	dir   string // has one file for each object
	parse func(text []byte, kind string) (R, error)

	locks keylock.Locks[vm.ID] // of objects that are being changed

	mu    sync.Mutex
	all   map[vm.ID]*entry[R]
	names map[string]vm.ID // ids by name with owner, also of objects that are being made
}

// entry is one object.
type entry[R object[R]] struct {
	id   vm.ID
	head vm.Named // of one that is damaged: what is known

	// Written under table.mu and the lock of the object, so that one of the two is enough to read them.
	rec    recorded[R]
	bad    error    // it is damaged
	device *os.File // open exclusively; nil: it has no device, as far as the store knows

	// Guarded by table.mu:
	gone  bool // being removed: nobody finds it, but its name is still taken
	reads int  // operations that read the bytes
	idle  time.Time
}

func (e *entry[R]) named() vm.Named {
	if e.bad != nil {
		return e.head
	}
	return e.rec.Object.Named()
}

func newTable[R object[R]](kind vm.Kind, dir string, parse func([]byte, string) (R, error)) *table[R] {
	return &table[R]{kind: kind, dir: dir, parse: parse, all: map[vm.ID]*entry[R]{}, names: map[string]vm.ID{}}
}

func (x *table[R]) file(id vm.ID) string { return filepath.Join(x.dir, string(id)+suffix) }

func key(n vm.Named) string { return n.Owner.Qualify(n.Name) }

// entries returns all objects.
func (x *table[R]) entries() []*entry[R] {
	x.mu.Lock()
	defer x.mu.Unlock()
	out := make([]*entry[R], 0, len(x.all))
	for _, e := range x.all {
		out = append(out, e)
	}
	return out
}

// load reads all records. A damaged one stays where it is, and its name stays taken.
func (x *table[R]) load(log *slog.Logger) error {
	files, err := os.ReadDir(x.dir)
	if err != nil {
		return err
	}
	for _, f := range files {
		id, isRecord := strings.CutSuffix(f.Name(), suffix)
		path := filepath.Join(x.dir, f.Name())
		switch {
		case strings.HasPrefix(f.Name(), ".") && strings.Contains(f.Name(), suffix+".tmp-"): // what was about to replace a record
			if err := os.Remove(path); err != nil {
				return err
			}
		case !isRecord || !vm.ID(id).Valid():
			log.Warn("unknown entry in the store of logical volumes ignored", "path", path)
		default:
			x.add(vm.ID(id), log)
		}
	}
	return nil
}

func (x *table[R]) add(id vm.ID, log *slog.Logger) {
	e := &entry[R]{id: id, head: vm.Named{ID: id}}
	x.all[id] = e
	rec, err := x.read(id)
	e.rec = rec
	if rec.LV == "" && err == nil { // settle removes it
		e.gone = true
		return
	}
	if n := rec.Object.Named(); n.ID == id && x.kind.ValidateName(n.Name) == nil {
		other, taken := x.names[key(n)]
		if e.head.Owner = n.Owner; taken {
			err = errors.Join(err, errdefs.DataLossf("%s has the name %s too", other, key(n)))
		} else {
			e.head.Name, x.names[key(n)] = n.Name, id
		}
	}
	if err != nil {
		x.damage(e, err, log)
	}
}

// damage marks e as damaged. Preconditions: the lock of e is held, or nobody else has the table.
func (x *table[R]) damage(e *entry[R], why error, log *slog.Logger) {
	log.Warn("damaged object in the store of logical volumes ignored", "op", "open", "kind", x.kind.Noun, "path", x.file(e.id), "err", why)
	x.mu.Lock()
	defer x.mu.Unlock()
	if e.bad == nil && e.head.Name == "" {
		e.head = e.rec.Object.Named()
		e.head.ID = e.id
	}
	e.bad = errdefs.DataLossf("%s %s is damaged: %w; repair it, or move %s away, and restart cocoond", x.kind.Noun, cmp.Or(e.head.Name, string(e.id)), why, x.file(e.id))
}

// read reads and checks one record. With an error it may return the record too. A record of an object that is being made or removed
// has no more than the names of logical volumes.
func (x *table[R]) read(id vm.ID) (rec recorded[R], err error) {
	text, err := record.Read(x.file(id))
	if err != nil {
		return rec, err
	}
	return x.decode(text, id)
}

func (x *table[R]) decode(text []byte, id vm.ID) (rec recorded[R], err error) {
	var raw struct {
		Object json.RawMessage `json:"object"`
		state
	}
	if err := json.Unmarshal(text, &raw); err != nil {
		return rec, errdefs.DataLossf("its record cannot be read (%w)", err)
	}
	for _, lv := range append(slices.Clone(raw.Gone), raw.LV) {
		if lv != "" && !ours(lv) {
			return rec, errdefs.DataLossf("its record names the logical volume %.100q, which is not one of Cocoon's", lv)
		}
	}
	if raw.Allocated < 0 || slices.Contains(raw.Gone, raw.LV) || slices.Contains(raw.Gone, "") {
		return rec, errdefs.DataLossf("its record contradicts itself")
	}
	if raw.LV == "" {
		return recorded[R]{state: raw.state}, nil
	}
	if rec.Object, err = x.parse(raw.Object, Kind); err != nil {
		return rec, err
	}
	if got := rec.Object.Named().ID; got != id {
		return rec, errdefs.DataLossf("its record is that of %s", got)
	}
	rec.state = raw.state
	return rec, nil
}

// ours reports whether lv can be the name of one of our logical volumes.
func ours(lv string) bool {
	id, ok := strings.CutPrefix(lv, prefix)
	return ok && vm.ID(id).Valid()
}

// find resolves a reference; see vm.Kind.Match. Preconditions: x.mu is held.
func (x *table[R]) find(who vm.Owner, ref string) (*entry[R], error) {
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

func (x *table[R]) get(ctx context.Context, ref string) (R, error) {
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
	return e.rec.Object.Clone(), nil
}

// list returns what is recorded of all objects that are fit for use, sorted by owner and name.
func (x *table[R]) list(ctx context.Context) ([]recorded[R], error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	x.mu.Lock()
	out := make([]recorded[R], 0, len(x.all))
	for _, e := range x.all {
		if e.bad == nil && !e.gone && e.named().VisibleTo(vm.Behalf(ctx)) {
			out = append(out, e.rec.clone())
		}
	}
	x.mu.Unlock()
	slices.SortFunc(out, func(a, b recorded[R]) int { return a.Object.Named().Compare(b.Object.Named()) })
	return out, nil
}

// hold finds an object and keeps others from changing it until release.
func (x *table[R]) hold(ctx context.Context, ref string) (e *entry[R], release func(), err error) {
	who := vm.Behalf(ctx)
	x.mu.Lock()
	e, err = x.find(who, ref)
	x.mu.Unlock()
	if err != nil {
		return nil, nil, err
	}
	release, err = x.locks.Lock(ctx, e.id)
	if err != nil {
		return nil, nil, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if err = e.bad; e.gone {
		err = x.kind.Missing(who, ref)
	}
	if err != nil {
		release()
		return nil, nil, err
	}
	return e, release, nil
}

// save replaces the record of e. Preconditions: the lock of e is held. Errors: AlreadyExists if its name is new and taken.
func (x *table[R]) save(e *entry[R], next recorded[R]) (err error) {
	old, name := key(e.rec.Object.Named()), key(next.Object.Named())
	if name != old {
		if err := x.reserve(name, e.id); err != nil {
			return err
		}
	}
	if err = record.Write(x.file(e.id), next); err != nil {
		_ = record.Write(x.file(e.id), e.rec) // the new one may be on the disk; without room, the old one still is
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if err != nil {
		old, name, next = name, old, e.rec
	}
	if name != old {
		delete(x.names, old)
	}
	e.rec = next.clone()
	return err
}

// reserve takes a name, given with its owner, for an object. Errors: AlreadyExists.
func (x *table[R]) reserve(name string, id vm.ID) error {
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

func (x *table[R]) free(name string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.names, name)
}

// put makes e known, and take forgets it.
func (x *table[R]) put(e *entry[R]) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.all[e.id] = e
}

func (x *table[R]) take(e *entry[R]) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.all, e.id)
	if name := key(e.named()); x.names[name] == e.id {
		delete(x.names, name)
	}
}

// mark sets whether e is being removed.
func (x *table[R]) mark(e *entry[R], gone bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e.gone = gone
}

// reading counts the operations that read the bytes of e.
func (x *table[R]) reading(e *entry[R], n int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e.reads += n
	e.idle = time.Now()
}

func (x *table[R]) readers(e *entry[R]) int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return e.reads
}

// keep sets the open device of e. Preconditions: the lock of e is held.
func (x *table[R]) keep(e *entry[R], device *os.File) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e.device, e.idle = device, time.Now()
}

// unfinished reports whether there are logical volumes of e that are still to be removed, if no operation is about to.
func (x *table[R]) unfinished(e *entry[R]) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.all[e.id] == e && e.bad == nil && len(e.rec.Gone) > 0
}

// drop removes the file of a record durably. It is no error if there is none.
func (x *table[R]) drop(id vm.ID) error {
	if err := os.Remove(x.file(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return atomicfile.SyncDir(x.dir)
}

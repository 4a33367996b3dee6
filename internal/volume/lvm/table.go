package lvm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume/index"
	"cocoonstack.io/cocoon/internal/volume/record"
)

const (
	suffix = ".json"   // of the file of a record
	prefix = "cocoon-" // of the names of our logical volumes; the rest is an id
	tag    = "cocoon"  // of our logical volumes
)

// recorded is what is kept of one volume or snapshot.
type recorded[R index.Record[R]] struct {
	Object R `json:"object"`
	state
}

// state says where the bytes of an object are.
type state struct {
	LV        string   `json:"lv"`             // the logical volume with the bytes; "" while the object is made or removed
	Gone      []string `json:"gone,omitempty"` // logical volumes that are being made or removed: the next New removes them
	Allocated int64    `json:"allocated"`      // bytes in the pool, when it was last known; the kernel knows better while there is a device
}

// Named implements index.Record.
func (r recorded[R]) Named() vm.Named { return r.Object.Named() }

// Clone implements index.Record.
func (r recorded[R]) Clone() recorded[R] {
	r.Object, r.Gone = r.Object.Clone(), slices.Clone(r.Gone)
	return r
}

// device is that of an object's logical volume.
type device struct {
	file *os.File  // open exclusively; nil: there is none, as far as the store knows
	idle time.Time // when it was last used
}

// table has all objects of one kind: one file for each.
type table[R index.Record[R]] struct {
	*index.Index[recorded[R], device]
	kind  vm.Kind
	dir   string
	parse func(text []byte, kind string) (R, error)
}

// entry is one object. One with an empty LV is hidden: it is being made or removed.
type entry[R index.Record[R]] = index.Entry[recorded[R], device]

func newTable[R index.Record[R]](kind vm.Kind, dir string, parse func([]byte, string) (R, error)) *table[R] {
	x := &table[R]{kind: kind, dir: dir, parse: parse}
	x.Index = index.New[recorded[R], device](kind, x.file)
	return x
}

func (x *table[R]) file(id vm.ID) string { return filepath.Join(x.dir, string(id)+suffix) }

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
	rec, err := x.read(id)
	if rec.LV == "" && err == nil { // settle removes it
		x.Put(id, rec, true)
		return
	}
	if e := x.Add(id, rec, err, x.remedy(id)); e.Bad != nil {
		x.tell(e, log)
	}
}

// damage marks e as damaged. Preconditions: the lock of e is held.
func (x *table[R]) damage(e *entry[R], why error, log *slog.Logger) {
	x.Damage(e, why, x.remedy(e.ID))
	x.tell(e, log)
}

func (x *table[R]) remedy(id vm.ID) string {
	return fmt.Sprintf("repair it, or move %s away, and restart cocoond", x.file(id))
}

func (x *table[R]) tell(e *entry[R], log *slog.Logger) {
	log.Warn("damaged object in the store of logical volumes ignored", "op", "open", "kind", x.kind.Noun, "path", x.file(e.ID), "err", e.Bad)
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

// reading counts the operations that read the bytes of e, and keeps its device for a while after them.
func (x *table[R]) reading(e *entry[R], n int) {
	x.Reading(e, n)
	x.Locked(func() { e.Own.idle = time.Now() })
}

// keep sets the open device of e, which has just been used. Preconditions: the lock of e is held.
func (x *table[R]) keep(e *entry[R], file *os.File) {
	x.Locked(func() { e.Own = device{file, time.Now()} })
}

// unfinished reports whether there are logical volumes of e that are still to be removed, if no operation is about to.
func (x *table[R]) unfinished(e *entry[R]) bool {
	var left bool
	x.Locked(func() { left = e.Bad == nil && len(e.Rec.Gone) > 0 })
	return left && x.Has(e)
}

// drop removes the file of a record durably. It is no error if there is none.
func (x *table[R]) drop(id vm.ID) error {
	if err := os.Remove(x.file(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return atomicfile.SyncDir(x.dir)
}

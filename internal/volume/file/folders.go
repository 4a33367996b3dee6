package file

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume/index"
	"cocoonstack.io/cocoon/internal/volume/record"
)

// Names in the folder of all objects and of one.
const (
	draftPrefix = ".draft-"
	gonePrefix  = ".gone-"
	dataFile    = "data"
	tempInfix   = ".tmp-" // .NAME.tmp-*: what is about to replace NAME; atomicfile uses the same form
)

// folders has all objects of one kind: one folder for each.
type folders[R index.Record[R]] struct {
	*index.Index[R, struct{}]
	kind  vm.Kind
	dir   string
	file  string // the name of the record in such a folder
	log   *slog.Logger
	parse func(text []byte, kind string) (R, error)
	fit   func(rec *R, size int64) error // checks the size of the data, or adapts the record to it
}

func newFolders[R index.Record[R]](kind vm.Kind, dir, file string, log *slog.Logger, parse func([]byte, string) (R, error), fit func(*R, int64) error) *folders[R] {
	x := &folders[R]{kind: kind, dir: dir, file: file, log: log, parse: parse, fit: fit}
	x.Index = index.New[R, struct{}](kind, func(id vm.ID) string { return x.path(id, file) })
	return x
}

// path returns a path in the folder of an object, or that folder.
func (x *folders[R]) path(id vm.ID, elem ...string) string {
	return filepath.Join(append([]string{x.dir, string(id)}, elem...)...)
}

// data returns the path of the bytes of an object.
func (x *folders[R]) data(id vm.ID) string { return x.path(id, dataFile) }

// scan reads all objects from the disk, and removes drafts and what is half removed.
func (x *folders[R]) scan() error {
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

// add reads one object from the disk. It leaves a damaged one in place.
func (x *folders[R]) add(id vm.ID, isDir bool) {
	rec, err := x.load(id, isDir)
	e := x.Add(id, rec, err, fmt.Sprintf("repair the files in %s, or move that folder away, and restart cocoond", x.path(id)))
	if e.Bad != nil {
		x.log.Warn("damaged object in the volume store ignored", "op", "open", "kind", x.kind.Noun, "path", x.path(id), "err", e.Bad)
	}
}

// load reads and checks the record of an object. With an error it may return the record too.
func (x *folders[R]) load(id vm.ID, isDir bool) (rec R, err error) {
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
func (x *folders[R]) tidy(id vm.ID) error {
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

// change edits the record of an object, on disk and in memory.
func (x *folders[R]) change(ctx context.Context, ref string, edit func(*R) error) (R, error) {
	var none R
	e, unlock, err := x.Lock(ctx, ref)
	if err != nil {
		return none, err
	}
	defer unlock()
	next := e.Rec.Clone()
	if err := edit(&next); err != nil {
		return none, err
	}
	if reflect.DeepEqual(next, e.Rec) {
		return next, nil
	}
	if err := x.Save(e, next); err != nil {
		return none, err
	}
	return next.Clone(), nil
}

// remove removes an object, unless check fails.
func (x *folders[R]) remove(ctx context.Context, ref string, check func(R) error) error {
	e, unlock, err := x.Lock(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	if err := check(e.Rec); err != nil {
		return err
	}
	x.Hide(e, true)
	gone := filepath.Join(x.dir, gonePrefix+string(e.ID))
	if err := os.Rename(x.path(e.ID), gone); err != nil && !errors.Is(err, fs.ErrNotExist) {
		x.Hide(e, false)
		return err
	}
	x.Forget(e)
	// If a power cut undoes the rename, the object must come back whole. So no file is removed before the rename is durable.
	if err := atomicfile.SyncDir(x.dir); err != nil {
		return err
	}
	if err := os.RemoveAll(gone); err != nil {
		x.log.Warn("removed files are left until the next start", "kind", x.kind.Noun, "path", gone, "err", err)
	}
	return nil
}

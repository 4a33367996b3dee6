package sqlite

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// Rebuilt is the result of Rebuild.
type Rebuilt struct {
	Rows  int             // in the new journal
	Left  map[vm.ID]error // rows that were not inserted, such as a second VM with the same name
	Aside string          // folder with the files of the old journal; "" if it had none
}

// Rebuild replaces the journal at cfg.Path with a new one made from rows; it keeps the old files in a folder beside it.
// The new journal is complete and durable before it is moved into place. A crash before that leaves the old one, or no
// journal, which Open refuses.
// Errors: FailedPrecondition when another process has the journal open.
func Rebuild(ctx context.Context, cfg Config, rows []journal.Row) (out Rebuilt, err error) {
	lock, err := lockFile(ctx, cfg.Path+".lock")
	if err != nil {
		return out, fmt.Errorf("rebuild journal %s: %w", cfg.Path, err)
	}
	defer lock.Close()
	out.Left = map[vm.ID]error{}
	next := cfg.Path + ".rebuilt"
	if err := errors.Join(remove(next), remove(next+"-wal"), remove(next+"-shm"), remove(markPath(next))); err != nil {
		return out, fmt.Errorf("rebuild journal %s: %w", cfg.Path, err)
	}
	reached, _ := readMark(cfg.Path) // ignore an unreadable mark
	for _, row := range rows {
		reached = max(reached, row.Record.Revision)
	}
	if err := fill(ctx, Config{Path: next, History: cfg.History}, reached, rows, &out); err != nil {
		return out, fmt.Errorf("rebuild journal %s: %w", cfg.Path, err)
	}
	if out.Aside, err = setAside(cfg.Path); err != nil {
		return out, fmt.Errorf("keep the old journal: %w", err)
	}
	// Move the mark first: it makes Open refuse a missing journal, and it is right for the new one.
	err = errors.Join(os.Rename(markPath(next), markPath(cfg.Path)), atomicfile.Rename(next, cfg.Path), remove(next+".lock"))
	if err != nil {
		return out, fmt.Errorf("put the rebuilt journal in place: %w", err)
	}
	return out, nil
}

func fill(ctx context.Context, cfg Config, reached int64, rows []journal.Row, out *Rebuilt) (err error) {
	j, err := Open(ctx, cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, j.Close()) }()
	if err := j.leap(ctx, reached+jump); err != nil {
		return err
	}
	for _, row := range rows {
		err := j.insert(ctx, row)
		if errdefs.Is(err, errdefs.AlreadyExists) {
			out.Left[row.Record.ID] = err
			continue
		}
		if err != nil {
			return err
		}
		out.Rows++
	}
	return j.Sync(ctx)
}

// insert stores a row unchanged.
func (j *Journal) insert(ctx context.Context, row journal.Row) error {
	in := row.Intent
	if in == nil {
		in = &journal.Intent{ID: row.Record.ID, Op: "rebuild", Began: row.Record.UpdatedAt}
	}
	r, err := j.Begin(ctx, *in, row.Record)
	if err == nil && row.Intent == nil {
		_, err = j.Settle(ctx, r)
	}
	return err
}

// setAside moves the files of the journal at path into a folder beside it, and returns that folder.
func setAside(path string) (string, error) {
	dir := path + ".replaced-" + time.Now().UTC().Format("20060102T150405.000")
	moved := false
	for _, suffix := range []string{"", "-wal", "-shm"} {
		if _, err := os.Lstat(path + suffix); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return "", err
		}
		if err := os.Rename(path+suffix, filepath.Join(dir, filepath.Base(path)+suffix)); err != nil {
			return "", err
		}
		moved = true
	}
	if !moved {
		return "", nil
	}
	return dir, errors.Join(atomicfile.SyncDir(dir), atomicfile.SyncDir(filepath.Dir(path)))
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

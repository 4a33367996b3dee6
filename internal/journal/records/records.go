// Package records keeps a copy of each VM's journal row in the VM's own folder. The journal can be rebuilt from these
// copies, and a journal that is older than the copies is refused.
//
// A copy is written only after its change survives a power cut: by Sync, so before an operation returns, or by Run a
// moment later. So a copy that is newer than the journal always proves that the journal is stale, also after a power
// cut. Run syncs the copy itself. The package creates and removes no folder.
package records

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
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// File is the name of a copy. It contains environment variables, as the journal does: mode 0600.
const File = "record.json"

const version = 1

// file is the content of a copy.
type file struct {
	Version int `json:"version"`
	journal.Row
}

// syncEvery is the longest time that a copy stays unwritten or unsynced while Run keeps up.
const syncEvery = time.Second

// Config configures the copies.
type Config struct {
	Dir   string       // has one folder per VM, named by id
	Older bool         // accept a journal that is older than the copies, or empty while copies exist
	Log   *slog.Logger // nil discards
}

// Keeper is a journal that keeps copies. Its methods are those of the underlying journal.
type Keeper struct {
	journal.Journal
	cfg Config

	mu      sync.Mutex
	intents map[vm.ID]journal.Intent
	pending map[vm.ID]journal.Row // not written
	dirty   map[vm.ID]bool        // not synced

	writing sync.Mutex // held while copies are written, so that none is replaced by an older one
}

var _ journal.Journal = (*Keeper)(nil)

// New returns a keeper over j.
func New(cfg Config, j journal.Journal) *Keeper {
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	return &Keeper{Journal: j, cfg: cfg, intents: map[vm.ID]journal.Intent{}, pending: map[vm.ID]journal.Row{}, dirty: map[vm.ID]bool{}}
}

// Load implements journal.Journal, and updates the copies from it: a killed process may not have written them.
// Errors: DataLoss for a journal that is older than a copy, or empty while folders of VMs exist.
func (k *Keeper) Load(ctx context.Context) ([]vm.Record, []journal.Intent, error) {
	rs, ins, err := k.Journal.Load(ctx)
	if err != nil {
		return nil, nil, err
	}
	if err := k.check(); err != nil {
		return nil, nil, err
	}
	k.mu.Lock()
	for _, in := range ins {
		k.intents[in.ID] = in
	}
	k.mu.Unlock()
	for _, r := range rs {
		row := k.row(r)
		if old, err := k.Kept(r.ID); err == nil && old.Record.Revision == r.Revision && (old.Intent == nil) == (row.Intent == nil) {
			continue
		}
		k.owe(row)
	}
	return rs, ins, k.Sync(ctx)
}

// check refuses a journal if the copies prove that it is stale.
func (k *Keeper) check() error {
	if k.cfg.Older {
		return nil
	}
	rows, rest, err := Scan(k.cfg.Dir)
	if err != nil {
		return err
	}
	revision := k.Revision()
	for _, row := range rows {
		if row.Record.Revision > revision {
			return journal.Refuse("the journal is at revision %d, but VM %s (%s) has a record of revision %d", revision, row.Record.Spec.Name, row.Record.ID, row.Record.Revision)
		}
	}
	if revision == 0 && len(rest) > 0 {
		return journal.Refuse("the journal is empty, but there are %d folders of VMs, such as %s", len(rest), rest[0])
	}
	return nil
}

// Kept reads the copy of a VM's row. NotFound if it does not exist, DataLoss if it is invalid.
func (k *Keeper) Kept(id vm.ID) (journal.Row, error) { return read(k.cfg.Dir, id) }

func read(dir string, id vm.ID) (journal.Row, error) {
	text, err := os.ReadFile(filepath.Join(dir, string(id), File))
	if errors.Is(err, fs.ErrNotExist) {
		return journal.Row{}, errdefs.NotFoundf("vm %s has no record in its folder", id)
	}
	if err != nil {
		return journal.Row{}, fmt.Errorf("read the record of vm %s: %w", id, err)
	}
	var f file
	if err := json.Unmarshal(text, &f); err != nil {
		return journal.Row{}, errdefs.New(errdefs.DataLoss, "the record in the folder of vm %s is damaged: %w", id, err)
	}
	if f.Version != version || f.Record.ID != id || f.Intent != nil && f.Intent.ID != id {
		return journal.Row{}, errdefs.DataLossf("the record in the folder of vm %s is that of %q, version %d", id, f.Record.ID, f.Version)
	}
	return f.Row, nil
}

// Scan reads the copies in dir. rest are the ids of other non-empty folders.
func Scan(dir string) (rows []journal.Row, rest []vm.ID, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("look for records of VMs: %w", err)
	}
	for _, e := range entries {
		id := vm.ID(e.Name())
		if !id.Valid() || !e.IsDir() {
			continue
		}
		if row, err := read(dir, id); err == nil {
			rows = append(rows, row)
			continue
		}
		if inside, err := os.ReadDir(filepath.Join(dir, e.Name())); err != nil || len(inside) > 0 {
			rest = append(rest, id)
		}
	}
	return rows, rest, nil
}

// Begin implements journal.Journal.
func (k *Keeper) Begin(ctx context.Context, in journal.Intent, r vm.Record) (vm.Record, error) {
	r, err := k.Journal.Begin(ctx, in, r)
	if err == nil {
		k.note(r.ID, &in)
		k.owe(k.row(r))
	}
	return r, err
}

// Step implements journal.Journal.
func (k *Keeper) Step(ctx context.Context, id vm.ID, step string, r vm.Record) (vm.Record, error) {
	r, err := k.Journal.Step(ctx, id, step, r)
	if err == nil {
		k.mu.Lock()
		in := k.intents[id]
		k.mu.Unlock()
		in.Step = step
		k.note(id, &in)
		k.owe(k.row(r))
	}
	return r, err
}

// Settle implements journal.Journal.
func (k *Keeper) Settle(ctx context.Context, r vm.Record) (vm.Record, error) {
	r, err := k.Journal.Settle(ctx, r)
	if err == nil {
		k.note(r.ID, nil)
		k.owe(k.row(r))
	}
	return r, err
}

// Update implements journal.Journal.
func (k *Keeper) Update(ctx context.Context, r vm.Record) (vm.Record, error) {
	r, err := k.Journal.Update(ctx, r)
	if err == nil {
		k.owe(k.row(r))
	}
	return r, err
}

// Forget implements journal.Journal. The copy is removed with the folder; a leftover copy is not a VM of the journal
// any more.
func (k *Keeper) Forget(ctx context.Context, id vm.ID) error {
	err := k.Journal.Forget(ctx, id)
	if err == nil {
		k.note(id, nil)
		k.mu.Lock()
		delete(k.pending, id)
		k.mu.Unlock()
	}
	return err
}

// Sync implements journal.Journal: earlier changes survive a power cut, and their copies are written.
func (k *Keeper) Sync(ctx context.Context) error {
	revision := k.Revision()
	if err := k.Journal.Sync(ctx); err != nil {
		return err
	}
	k.writing.Lock() // also waits for goroutines that are about to write earlier changes
	defer k.writing.Unlock()
	for _, row := range k.due(revision) {
		k.write(row)
	}
	return nil
}

// Close implements journal.Journal.
func (k *Keeper) Close() error {
	err := k.Sync(context.Background())
	return errors.Join(err, k.Journal.Close())
}

// owe queues a row whose copy must be written.
func (k *Keeper) owe(row journal.Row) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pending[row.Record.ID] = row
}

// due removes and returns the queued rows up to revision.
func (k *Keeper) due(revision int64) []journal.Row {
	k.mu.Lock()
	defer k.mu.Unlock()
	var rows []journal.Row
	for id, row := range k.pending {
		if row.Record.Revision <= revision {
			rows = append(rows, row)
			delete(k.pending, id)
		}
	}
	return rows
}

func (k *Keeper) path(id vm.ID) string { return filepath.Join(k.cfg.Dir, string(id), File) }

// note records the intent of a VM; nil: no intent.
func (k *Keeper) note(id vm.ID, in *journal.Intent) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if in == nil {
		delete(k.intents, id)
		return
	}
	k.intents[id] = *in
}

func (k *Keeper) row(r vm.Record) journal.Row {
	k.mu.Lock()
	defer k.mu.Unlock()
	row := journal.Row{Record: r}
	if in, ok := k.intents[r.ID]; ok {
		row.Intent = &in
	}
	return row
}

// write replaces the copy of a row atomically. A VM without a folder has no copy yet. Errors are only logged, as the
// change is in the journal already; the next change or the next start retries.
func (k *Keeper) write(row journal.Row) {
	id := row.Record.ID
	text, err := json.Marshal(file{version, row})
	if err == nil {
		tmp := k.path(id) + ".new"
		if err = os.WriteFile(tmp, append(text, '\n'), 0o600); err == nil {
			err = os.Rename(tmp, k.path(id))
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		k.cfg.Log.Warn("record not copied into the folder of vm", "vm", id, "err", err)
		return
	}
	k.mu.Lock()
	k.dirty[id] = true
	k.mu.Unlock()
}

// Run writes and syncs copies until ctx ends, and once more at the end.
func (k *Keeper) Run(ctx context.Context) error {
	t := time.NewTicker(syncEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			k.flush(context.WithoutCancel(ctx))
			return nil
		case <-t.C:
			k.flush(ctx)
		}
	}
}

func (k *Keeper) flush(ctx context.Context) {
	k.mu.Lock()
	owed := len(k.pending) > 0
	k.mu.Unlock()
	if owed {
		if err := k.Sync(ctx); err != nil && ctx.Err() == nil {
			k.cfg.Log.Warn("records of VMs not copied into their folders", "err", err)
		}
	}
	k.mu.Lock()
	todo := k.dirty
	k.dirty = map[vm.ID]bool{}
	k.mu.Unlock()
	for id := range todo {
		if err := syncFile(k.path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			k.cfg.Log.Warn("record in the folder of vm not synced", "vm", id, "err", err)
		}
	}
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return err
	}
	return atomicfile.SyncDir(filepath.Dir(path))
}

package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/vm"
)

// Load returns all records and unsettled intents.
func (j *Journal) Load(ctx context.Context) ([]vm.Record, []journal.Intent, error) {
	rows, err := j.read.QueryContext(ctx, `SELECT id, record, op, step, args, began FROM vms ORDER BY began, rowid`)
	if err != nil {
		return nil, nil, fmt.Errorf("load journal: %w", classify(err))
	}
	defer rows.Close()
	var records []vm.Record
	var intents []journal.Intent
	for rows.Next() {
		var id string
		var data, args []byte
		var op, step sql.NullString
		var began sql.NullInt64
		if err := rows.Scan(&id, &data, &op, &step, &args, &began); err != nil {
			return nil, nil, fmt.Errorf("load journal: %w", classify(err))
		}
		r, err := decode(data)
		if err != nil {
			return nil, nil, fmt.Errorf("load vm %s: %w", id, err)
		}
		records = append(records, r)
		if op.Valid {
			intents = append(intents, journal.Intent{
				ID: vm.ID(id), Op: op.String, Step: step.String, Args: args, Began: time.Unix(0, began.Int64),
			})
		}
	}
	if err := rows.Err(); err != nil {
		return nil, nil, fmt.Errorf("load journal: %w", classify(err))
	}
	return records, intents, nil
}

// Begin stores an intent with its record.
func (j *Journal) Begin(ctx context.Context, in journal.Intent, r vm.Record) (vm.Record, error) {
	if in.ID != r.ID || in.ID == "" || in.Op == "" {
		return r, errdefs.Invalidf("begin %q of vm %q: the record belongs to vm %q", in.Op, in.ID, r.ID)
	}
	err := j.submit(ctx, func(t *transaction) error {
		exists, busy, err := t.find(r.ID)
		if err != nil {
			return err
		}
		if busy {
			return refusal{errdefs.Conflictf("vm %s has an unfinished operation", r.Spec.Name)}
		}
		if err := t.nameFree(r); err != nil {
			return err
		}
		kind, put := vm.EventModified, t.st.update
		if !exists {
			kind, put = vm.EventAdded, t.st.insert
		}
		return t.write(kind, &r, func(data []byte) error {
			return exec(t.ctx, put, string(r.ID), key(r), data, in.Op, in.Step, []byte(in.Args), in.Began.UnixNano())
		})
	})
	return r, wrap("begin "+in.Op, r.ID, err)
}

// Step records the current step of an intent.
func (j *Journal) Step(ctx context.Context, id vm.ID, step string, r vm.Record) (vm.Record, error) {
	err := j.submit(ctx, func(t *transaction) error {
		exists, busy, err := t.find(id)
		switch {
		case err != nil:
			return err
		case !exists:
			return refusal{errdefs.NotFoundf("no such vm")}
		case !busy:
			return refusal{errdefs.Preconditionf("no operation is in progress")}
		}
		return t.write(vm.EventModified, &r, func(data []byte) error {
			return exec(t.ctx, t.st.step, string(id), data, step)
		})
	})
	return r, wrap("step "+step, id, err)
}

// Settle ends an intent.
func (j *Journal) Settle(ctx context.Context, r vm.Record) (vm.Record, error) {
	return j.put(ctx, "settle", r, func(t *transaction) *sql.Stmt { return t.st.settle })
}

// Update stores an observation.
func (j *Journal) Update(ctx context.Context, r vm.Record) (vm.Record, error) {
	return j.put(ctx, "update", r, func(t *transaction) *sql.Stmt { return t.st.observe })
}

func (j *Journal) put(ctx context.Context, what string, r vm.Record, with func(*transaction) *sql.Stmt) (vm.Record, error) {
	err := j.submit(ctx, func(t *transaction) error {
		exists, _, err := t.find(r.ID)
		switch {
		case err != nil:
			return err
		case !exists:
			return refusal{errdefs.NotFoundf("no such vm")}
		}
		return t.write(vm.EventModified, &r, func(data []byte) error {
			return exec(t.ctx, with(t), string(r.ID), data)
		})
	})
	return r, wrap(what, r.ID, err)
}

// Forget removes a record with its intent.
func (j *Journal) Forget(ctx context.Context, id vm.ID) error {
	err := j.submit(ctx, func(t *transaction) error {
		var data []byte
		err := t.st.record.QueryRowContext(t.ctx, string(id)).Scan(&data)
		if errors.Is(err, sql.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		r, err := decode(data)
		if err != nil {
			return refusal{err}
		}
		if err := exec(t.ctx, t.st.forget, string(id)); err != nil {
			return err
		}
		return t.event(vm.EventDeleted, r, data)
	})
	return wrap("forget", id, err)
}

// Events returns the changes after a revision.
func (j *Journal) Events(ctx context.Context, after int64, limit int) ([]vm.Event, error) {
	if limit <= 0 {
		limit = -1 // no limit, for SQLite
	}
	if after > j.written.Load() {
		return nil, gone(after)
	}
	if out, ok := j.recall(after, limit); ok {
		return out, ctx.Err()
	}
	rows, err := j.events.QueryContext(ctx, after, limit)
	if err != nil {
		return nil, fmt.Errorf("read events: %w", classify(err))
	}
	defer rows.Close()
	var out []vm.Event
	for rows.Next() {
		var e vm.Event
		var data []byte
		if err := rows.Scan(&e.Revision, &e.Type, &data); err != nil {
			return nil, fmt.Errorf("read events: %w", classify(err))
		}
		if e.Record, err = decode(data); err != nil {
			return nil, fmt.Errorf("read event %d: %w", e.Revision, err)
		}
		out = append(out, e)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read events: %w", classify(err))
	}
	// Checked last: the bound was raised before any row was pruned during our read.
	if after < j.oldest.Load()-1 {
		return nil, gone(after)
	}
	return out, nil
}

// recall is Events from memory; ok is false if memory does not reach back far enough.
func (j *Journal) recall(after int64, limit int) (out []vm.Event, ok bool) {
	j.mu.Lock()
	events, ok := j.recent.after(after)
	j.mu.Unlock()
	if limit > 0 && len(events) > limit {
		events = events[:limit]
	}
	for _, e := range events {
		e.Record = e.Record.Clone()
		out = append(out, e)
	}
	return out, ok && after >= j.oldest.Load()-1
}

func gone(after int64) error {
	return errdefs.Preconditionf("the history does not hold revision %d; list the VMs and watch from there", after)
}

// Changed returns a channel that the next change closes.
func (j *Journal) Changed() <-chan struct{} {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.changed
}

// Revision returns the revision of the last change.
func (j *Journal) Revision() int64 { return j.revision.Load() }

// find returns whether id exists, and whether it has an unsettled intent.
func (t *transaction) find(id vm.ID) (exists, busy bool, err error) {
	err = t.st.find.QueryRowContext(t.ctx, string(id)).Scan(&busy)
	if errors.Is(err, sql.ErrNoRows) {
		return false, false, nil
	}
	return err == nil, busy, err
}

// key is the unique value of the column name for r. Rows from before owners existed hold only the name, until their
// next operation.
func key(r vm.Record) string { return r.Owner.Qualify(r.Spec.Name) }

func (t *transaction) nameFree(r vm.Record) error {
	var id string
	err := t.st.name.QueryRowContext(t.ctx, key(r)).Scan(&id)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err == nil && id != string(r.ID) {
		return refusal{vm.VMs.Taken(key(r))}
	}
	return err
}

// write gives r the next revision, stores it with put and records the event.
func (t *transaction) write(kind vm.EventType, r *vm.Record, put func(data []byte) error) error {
	r.Revision = t.revision + 1
	data, err := json.Marshal(r)
	if err != nil {
		return refusal{fmt.Errorf("encode record: %w", err)}
	}
	if err := put(data); err != nil {
		return err
	}
	return t.event(kind, *r, data)
}

// event records a change. data is the encoded r.
func (t *transaction) event(kind vm.EventType, r vm.Record, data []byte) error {
	t.revision++
	t.events = append(t.events, vm.Event{Type: kind, Revision: t.revision, Record: r.Clone()}) // the caller continues to use r
	return exec(t.ctx, t.st.event, t.revision, string(kind), data)
}

func exec(ctx context.Context, st *sql.Stmt, args ...any) error {
	_, err := st.ExecContext(ctx, args...)
	return err
}

func decode(data []byte) (vm.Record, error) {
	var r vm.Record
	if err := json.Unmarshal(data, &r); err != nil {
		return r, errdefs.New(errdefs.DataLoss, "decode record: %w", err)
	}
	return r, nil
}

func wrap(what string, id vm.ID, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("journal: %s vm %s: %w", what, id, err)
}

// keepRecent is the minimum number of events kept in memory, once that many exist.
const keepRecent = 256

// recent holds the last events, so that watchers that keep up need not read and decode them from the file. Its elements
// never change, so a slice of it may be read while events are added.
type recent struct{ events []vm.Event }

// add appends events, whose revisions directly follow those in r.
func (r *recent) add(events []vm.Event) {
	if len(r.events) >= 2*keepRecent {
		r.events = slices.Clone(r.events[len(r.events)-keepRecent:])
	}
	r.events = append(r.events, events...)
}

// after returns the events after revision. ok is false if r does not reach back to it.
func (r *recent) after(revision int64) (events []vm.Event, ok bool) {
	if len(r.events) == 0 {
		return nil, false
	}
	at := revision + 1 - r.events[0].Revision
	if at < 0 || at > int64(len(r.events)) {
		return nil, false
	}
	return slices.Clip(r.events[at:]), true
}

package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// pruneEvery is the number of revisions between two prunings of the history.
const pruneEvery = 64

// change is one atomic change that waits for a transaction.
type change struct {
	// apply validates and writes. It returns a refusal before it has written anything; any other error rolls back the
	// batch.
	apply func(t *transaction) error
	err   error
}

// transaction is the one that is being filled.
type transaction struct {
	ctx      context.Context
	st       *statements
	revision int64 // of the last change in it
	events   []vm.Event
}

// refusal marks an error that occurred before anything was written.
type refusal struct{ err error }

func (r refusal) Error() string { return r.err.Error() }
func (r refusal) Unwrap() error { return r.err }

// submit runs apply in a transaction together with all waiting changes. One of the callers commits them, so the journal needs
// no goroutine of its own.
func (j *Journal) submit(ctx context.Context, apply func(t *transaction) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if j.closed.Load() {
		return errdefs.Unavailablef("the journal is closed")
	}
	c := &change{apply: apply}
	ctx = context.WithoutCancel(ctx) // cancelling one caller must not undo the changes of others
	j.queue.Do(c, func(todo []*change) { j.commit(ctx, todo) })
	return c.err
}

// commit writes todo in one transaction and sets the error of each. All changes that were not refused are stored, or
// none.
func (j *Journal) commit(ctx context.Context, todo []*change) {
	t := &transaction{ctx: ctx, st: &j.st, revision: j.revision.Load()}
	before := t.revision
	err := j.fill(t, todo)
	if err == nil && t.revision > before {
		err = j.prune(t, before)
	}
	if err == nil {
		j.written.Store(t.revision)
		_, err = j.st.commit.ExecContext(ctx)
	}
	if err != nil {
		_, _ = j.st.rollback.ExecContext(ctx) // fails if SQLite has already rolled back by itself
		err = classify(err)
		for _, c := range todo {
			if c.err == nil {
				c.err = err
			}
		}
		return
	}
	if t.revision == before {
		return
	}
	j.revision.Store(t.revision)
	j.mu.Lock()
	j.recent.add(t.events)
	close(j.changed)
	j.changed = make(chan struct{})
	j.mu.Unlock()
}

func (j *Journal) fill(t *transaction, todo []*change) error {
	if _, err := j.st.begin.ExecContext(t.ctx); err != nil {
		return err
	}
	for _, c := range todo {
		err := c.apply(t)
		if r, ok := errors.AsType[refusal](err); ok {
			c.err = r.err
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// prune drops events older than the history, from time to time, in the transaction that exceeded it. Readers see the
// new bound before the rows are deleted, so they never mistake a gap for complete history.
func (j *Journal) prune(t *transaction, before int64) error {
	if t.revision/pruneEvery == before/pruneEvery {
		return nil
	}
	keep := t.revision - j.history + 1
	if keep <= j.oldest.Load() {
		return nil
	}
	j.oldest.Store(keep)
	_, err := j.st.prune.ExecContext(t.ctx, keep)
	return err
}

// statements are prepared once, on the writer's connection.
type statements struct {
	begin, commit, rollback *sql.Stmt
	find, record, name      *sql.Stmt
	insert, update, step    *sql.Stmt
	settle, observe, forget *sql.Stmt
	event, prune            *sql.Stmt
	all                     []*sql.Stmt
}

func (s *statements) prepare(ctx context.Context, c *sql.Conn) error {
	for _, p := range []struct {
		to  **sql.Stmt
		sql string
	}{
		{&s.begin, `BEGIN IMMEDIATE`},
		{&s.commit, `COMMIT`},
		{&s.rollback, `ROLLBACK`},
		{&s.find, `SELECT op IS NOT NULL FROM vms WHERE id = ?`},
		{&s.record, `SELECT record FROM vms WHERE id = ?`},
		{&s.name, `SELECT id FROM vms WHERE name = ?`},
		{&s.insert, `INSERT INTO vms (id, name, record, op, step, args, began) VALUES (?, ?, ?, ?, ?, ?, ?)`},
		{&s.update, `UPDATE vms SET name = ?2, record = ?3, op = ?4, step = ?5, args = ?6, began = ?7 WHERE id = ?1`},
		{&s.step, `UPDATE vms SET record = ?2, step = ?3 WHERE id = ?1`},
		{&s.settle, `UPDATE vms SET record = ?2, op = NULL, step = NULL, args = NULL, began = NULL WHERE id = ?1`},
		{&s.observe, `UPDATE vms SET record = ?2 WHERE id = ?1`},
		{&s.forget, `DELETE FROM vms WHERE id = ?`},
		{&s.event, `INSERT INTO events (revision, type, record) VALUES (?, ?, ?)`},
		{&s.prune, `DELETE FROM events WHERE revision < ?`},
	} {
		st, err := c.PrepareContext(ctx, p.sql) //nolint:sqlclosecheck // closed by close, with the journal
		if err != nil {
			return fmt.Errorf("prepare %q: %w", p.sql, err)
		}
		*p.to = st
		s.all = append(s.all, st)
	}
	return nil
}

func (s *statements) close() error {
	var errs []error
	for _, st := range s.all {
		errs = append(errs, st.Close())
	}
	return errors.Join(errs...)
}

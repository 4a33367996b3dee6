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
	apply func(t *batch) error
	err   error
	turn  chan bool // receives once: true: lead the next batch; false: this change is done
}

// batch is the transaction that is being filled.
type batch struct {
	ctx      context.Context
	st       *statements
	revision int64 // of the last change in it
	events   []vm.Event
}

// refusal marks an error that occurred before anything was written.
type refusal struct{ err error }

func (r refusal) Error() string { return r.err.Error() }
func (r refusal) Unwrap() error { return r.err }

// submit runs apply in a transaction together with all waiting changes. The first caller leads: it commits the batch
// and then passes the lead to a caller that arrived in the meantime. So the journal needs no goroutine of its own.
func (j *Journal) submit(ctx context.Context, apply func(t *batch) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c := &change{apply: apply}
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return errdefs.Unavailablef("the journal is closed")
	}
	j.queue = append(j.queue, c)
	if j.leading {
		c.turn = make(chan bool, 1)
		j.mu.Unlock()
		if !<-c.turn {
			return c.err
		}
		j.mu.Lock()
	}
	j.leading = true
	todo := j.queue
	j.queue = nil
	j.mu.Unlock()

	j.commit(context.WithoutCancel(ctx), todo) // cancelling one caller must not undo the changes of others

	j.mu.Lock()
	if len(j.queue) > 0 {
		j.queue[0].turn <- true
	} else {
		j.leading = false
	}
	j.mu.Unlock()
	for _, other := range todo {
		if other != c {
			other.turn <- false
		}
	}
	return c.err
}

// commit writes todo in one transaction and sets the error of each. All changes that were not refused are stored, or
// none.
func (j *Journal) commit(ctx context.Context, todo []*change) {
	t := &batch{ctx: ctx, st: &j.st, revision: j.revision.Load()}
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

func (j *Journal) fill(t *batch, todo []*change) error {
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
func (j *Journal) prune(t *batch, before int64) error {
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

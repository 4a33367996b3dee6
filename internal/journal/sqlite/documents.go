package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
)

// Documents is a journal.Documents in a file of its own. A change is a transaction that is synced before it returns. There are few
// changes, so none of them waits for others.
type Documents struct {
	path string
	lock *os.File
	db   *sql.DB // one connection
	has  map[journal.Table]bool
}

// Option changes how documents are opened.
type Option func(*options)

type options struct{ frozen bool }

// Frozen leaves the schema of a file that exists as it is, so that the Cocoon before this one can still read it: for a system on trial. This
// version has to get along with the schema of the version before; tables that are missing are empty and cannot be written to.
func Frozen(yes bool) Option { return func(o *options) { o.frozen = yes } }

var _ journal.Documents = (*Documents)(nil)

// OpenDocuments opens the documents at path, and creates or migrates the file if needed. Its folder must exist. Only its owner can read
// the file: documents contain keys.
// Errors: FailedPrecondition when another process has it open or a newer Cocoon wrote it, DataLoss when it is damaged.
func OpenDocuments(ctx context.Context, path string, with ...Option) (_ *Documents, err error) {
	d := &Documents{path: path, has: map[journal.Table]bool{}}
	var o options
	for _, w := range with {
		w(&o)
	}
	defer func() {
		if err != nil {
			_ = d.Close()
		}
	}()
	if d.lock, err = lockFile(ctx, path+".lock"); err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	if err = private(path); err == nil {
		d.db, err = openDB(path, 1, "journal_mode(WAL)", "synchronous(FULL)")
	}
	if err == nil {
		err = d.prepare(ctx, o)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, d.classify(err))
	}
	return d, nil
}

func (d *Documents) prepare(ctx context.Context, o options) error {
	c, err := d.db.Conn(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	var found string
	if err := c.QueryRowContext(ctx, `PRAGMA quick_check(1)`).Scan(&found); err != nil {
		return err
	}
	if found != "ok" {
		return errdefs.New(errdefs.DataLoss, "%w (%s)", d.damaged(), found)
	}
	if err := migrate(ctx, c, documentMigrations(), o.frozen); err != nil {
		return err
	}
	for _, t := range journal.Tables() {
		var n int
		if err := c.QueryRowContext(ctx, `SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = ?`, string(t)).Scan(&n); err != nil {
			return err
		}
		d.has[t] = n > 0
	}
	return nil
}

// documentMigrations returns the steps that upgrade a file from version i to i+1. A released step never changes.
func documentMigrations() []string {
	var ddl strings.Builder
	for _, t := range []journal.Table{journal.Workloads, journal.Volumes, journal.OSState, journal.Identity, journal.Keys, journal.Audit, journal.Events} {
		fmt.Fprintf(&ddl, "CREATE TABLE %s (name TEXT PRIMARY KEY, spec BLOB NOT NULL) WITHOUT ROWID;", t)
	}
	return []string{ddl.String()}
}

func (d *Documents) damaged() error {
	return errdefs.DataLossf("the file is damaged, and nothing in it was changed; put a backup in its place, or move it away to begin anew")
}

func (d *Documents) classify(err error) error { return classified(err, d.damaged()) }

// Get implements journal.Documents.
func (d *Documents) Get(ctx context.Context, t journal.Table, name string) ([]byte, error) {
	var data []byte
	if !d.has[t] {
		return nil, errdefs.NotFoundf("there is no %q in %s", name, t)
	}
	err := d.db.QueryRowContext(ctx, `SELECT spec FROM `+string(t)+` WHERE name = ?`, name).Scan(&data)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil, errdefs.NotFoundf("there is no %q in %s", name, t)
	case err != nil:
		return nil, fmt.Errorf("read %q in %s: %w", name, t, d.classify(err))
	}
	return data, nil
}

// List implements journal.Documents.
func (d *Documents) List(ctx context.Context, t journal.Table) ([]journal.Document, error) {
	if !d.has[t] {
		return nil, nil
	}
	rows, err := d.db.QueryContext(ctx, `SELECT name, spec FROM `+string(t)+` ORDER BY name`)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", t, d.classify(err))
	}
	defer rows.Close()
	var all []journal.Document
	for rows.Next() {
		var x journal.Document
		if err := rows.Scan(&x.Name, &x.Data); err != nil {
			return nil, fmt.Errorf("list %s: %w", t, d.classify(err))
		}
		all = append(all, x)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("list %s: %w", t, d.classify(err))
	}
	return all, nil
}

// Write implements journal.Documents.
func (d *Documents) Write(ctx context.Context, changes ...journal.Change) error {
	tx, err := d.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("write to %s: %w", d.path, d.classify(err))
	}
	defer func() { _ = tx.Rollback() }() // no effect after a commit
	for _, c := range changes {
		if err := d.change(ctx, tx, c); err != nil {
			return fmt.Errorf("write %q to %s: %w", c.Name, c.Table, d.classify(err))
		}
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("write to %s: %w", d.path, d.classify(err))
	}
	return nil
}

func (d *Documents) change(ctx context.Context, tx *sql.Tx, c journal.Change) error {
	table := string(c.Table)
	if !d.has[c.Table] {
		return errdefs.Preconditionf("the file has no %s while this version is on trial; confirm the update first", table)
	}
	if c.Data == nil {
		_, err := tx.ExecContext(ctx, `DELETE FROM `+table+` WHERE name = ?`, c.Name)
		return err
	}
	clash := ` ON CONFLICT (name) DO UPDATE SET spec = excluded.spec`
	if c.New {
		clash = ` ON CONFLICT (name) DO NOTHING`
	}
	done, err := tx.ExecContext(ctx, `INSERT INTO `+table+` (name, spec) VALUES (?, ?)`+clash, c.Name, c.Data)
	if err != nil {
		return err
	}
	if n, err := done.RowsAffected(); err != nil || n == 1 {
		return err
	}
	return errdefs.Existsf("it exists already")
}

// Close closes the file. It must not be called while other methods run.
func (d *Documents) Close() error {
	var errs []error
	if d.db != nil {
		errs = append(errs, d.db.Close())
	}
	if d.lock != nil {
		errs = append(errs, d.lock.Close())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close %s: %w", d.path, err)
	}
	return nil
}

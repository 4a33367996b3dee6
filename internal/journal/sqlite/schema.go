package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// migrations returns the steps that upgrade a file from version i to i+1. A released step never changes.
func migrations() []string {
	return []string{
		// The intent is in the row of its VM: a VM has at most one, and one statement writes both.
		`CREATE TABLE vms (
			id     TEXT PRIMARY KEY,
			name   TEXT NOT NULL UNIQUE,
			record BLOB NOT NULL, -- JSON of vm.Record
			op     TEXT,          -- of the unsettled intent; NULL when there is none
			step   TEXT,
			args   BLOB,
			began  INTEGER        -- nanoseconds since 1970
		);
		CREATE TABLE events (
			revision INTEGER PRIMARY KEY, -- dense: every change makes exactly one event
			type     TEXT NOT NULL,
			record   BLOB NOT NULL
		);`,
	}
}

// migrate upgrades the schema to the newest version; each step is one transaction, together with its version number.
func migrate(ctx context.Context, c *sql.Conn) error {
	if _, err := c.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS schema (version INTEGER NOT NULL)`); err != nil {
		return err
	}
	version := 0
	err := c.QueryRowContext(ctx, `SELECT version FROM schema`).Scan(&version)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	steps := migrations()
	if version > len(steps) {
		return errdefs.Preconditionf("a newer Cocoon wrote it (schema %d, this version knows %d); use the newer Cocoon", version, len(steps))
	}
	for ; version < len(steps); version++ {
		if err := step(ctx, c, steps[version], version+1); err != nil {
			return fmt.Errorf("migrate schema to version %d: %w", version+1, err)
		}
	}
	return nil
}

func step(ctx context.Context, c *sql.Conn, ddl string, version int) error {
	tx, err := c.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }() // no effect after a commit
	if _, err := tx.ExecContext(ctx, ddl); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, `DELETE FROM schema`); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, `INSERT INTO schema (version) VALUES (?)`, version); err != nil {
		return err
	}
	return tx.Commit()
}

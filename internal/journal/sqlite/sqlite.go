// Package sqlite keeps the engine's journal in one SQLite file (pure Go, write-ahead log).
//
// Only one process writes; a lock file excludes a second one. Changes that arrive together share a transaction (group
// commit); each is atomic for its caller. The package does not interpret records and starts no goroutine.
//
// Durability: a committed change survives kill -9 of the daemon at any point, because it is in the kernel's page cache.
// It survives a power cut once Sync returns, which syncs the write-ahead log once for all waiting callers (ADR 10). A
// mark beside the file records the revision that the journal has reached at least: an older file, such as a backup or
// one whose log is damaged, is refused.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"cocoonstack.io/cocoon/internal/batch"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filelock"
	"cocoonstack.io/cocoon/internal/journal"
)

// Config configures the location and the history of the journal.
type Config struct {
	Path    string // of the database file; its folder must exist
	History int    // events kept for watchers that reconnect; 0 is DefaultHistory
	Older   bool   // accept a file that is older than the mark
	Frozen  bool   // do not upgrade the schema of a file that exists; see Frozen

	// Synced, if not nil, is called after each sync, before the waiting callers continue.
	Synced func()
}

// DefaultHistory is the default number of events kept.
const DefaultHistory = 10_000

// Journal is a journal.Journal in a file.
type Journal struct {
	history int64
	lock    *os.File
	write   *sql.DB // one connection
	read    *sql.DB // for Events: a slow reader must not block the writer
	conn    *sql.Conn
	st      statements
	events  *sql.Stmt

	revision atomic.Int64 // of the last committed change
	written  atomic.Int64 // highest revision that a reader of the file may have seen; set just before a commit
	oldest   atomic.Int64 // of the oldest event kept; revision+1 if there are none

	syncs  syncs
	synced func()

	queue  batch.Queue[*change]
	closed atomic.Bool

	mu      sync.Mutex
	changed chan struct{}
	recent  recent
}

var _ journal.Journal = (*Journal)(nil)

// Open opens the journal at cfg.Path and creates or migrates it if needed. Only its owner can read the file: records
// hold the environment of processes, which contains secrets.
// Errors: FailedPrecondition when another process has it open or a newer Cocoon wrote it, DataLoss when it is damaged.
func Open(ctx context.Context, cfg Config) (_ *Journal, err error) {
	j := &Journal{history: int64(cfg.History), changed: make(chan struct{}), synced: cfg.Synced}
	if j.history <= 0 {
		j.history = DefaultHistory
	}
	defer func() {
		if err != nil {
			_ = j.Close()
		}
	}()
	if j.lock, err = lockFile(ctx, cfg.Path+".lock"); err != nil {
		return nil, fmt.Errorf("open journal %s: %w", cfg.Path, err)
	}
	if err = private(cfg.Path); err != nil {
		return nil, fmt.Errorf("open journal %s: %w", cfg.Path, err)
	}
	if err = j.connect(ctx, cfg); err == nil {
		err = j.verify(ctx, cfg)
	}
	if err != nil {
		return nil, fmt.Errorf("open journal %s: %w", cfg.Path, classify(err))
	}
	return j, nil
}

func (j *Journal) connect(ctx context.Context, cfg Config) (err error) {
	path := cfg.Path
	// 4096 pages between checkpoints: a checkpoint's fsync is the only slow operation on the hot path.
	if j.write, err = openDB(path, 1, "journal_mode(WAL)", "synchronous(NORMAL)", "wal_autocheckpoint(4096)", "journal_size_limit(67108864)"); err != nil {
		return err
	}
	if j.conn, err = j.write.Conn(ctx); err != nil {
		return err
	}
	if err = migrate(ctx, j.conn, migrations(), cfg.Frozen); err != nil {
		return err
	}
	if err = j.st.prepare(ctx, j.conn); err != nil {
		return err
	}
	if j.read, err = openDB(path, 4, "query_only(1)"); err != nil {
		return err
	}
	if j.events, err = j.read.PrepareContext(ctx, `SELECT revision, type, record FROM events WHERE revision > ? ORDER BY revision LIMIT ?`); err != nil {
		return err
	}
	var last, first sql.NullInt64
	if err = j.conn.QueryRowContext(ctx, `SELECT max(revision), min(revision) FROM events`).Scan(&last, &first); err != nil {
		return err
	}
	j.revision.Store(last.Int64)
	j.written.Store(last.Int64)
	j.oldest.Store(max(first.Int64, 1))
	return j.syncs.open(path)
}

func openDB(path string, conns int, pragmas ...string) (*sql.DB, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	q := url.Values{"_pragma": append([]string{"busy_timeout(10000)"}, pragmas...)}
	db, err := sql.Open("sqlite", (&url.URL{Scheme: "file", Path: abs, RawQuery: q.Encode()}).String())
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	return db, nil
}

// lockFile takes the lock that excludes a second writer.
func lockFile(ctx context.Context, path string) (*os.File, error) {
	f, err := filelock.Take(ctx, path)
	if errors.Is(err, filelock.ErrTaken) {
		return nil, errdefs.Preconditionf("another cocoond uses this state folder; stop it first")
	}
	return f, err
}

// private makes sure that path exists and that only its owner can access it; SQLite gives its companion files the same
// mode.
func private(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Chmod(0o600)
}

// Close closes the journal. It must not be called while other methods run.
func (j *Journal) Close() error {
	j.closed.Store(true)
	var errs []error
	if j.events != nil {
		errs = append(errs, j.events.Close())
	}
	if j.read != nil {
		errs = append(errs, j.read.Close())
	}
	errs = append(errs, j.st.close())
	if j.conn != nil {
		errs = append(errs, j.conn.Close())
	}
	if j.write != nil {
		errs = append(errs, j.write.Close()) // moves the log into the file, and syncs the file
	}
	errs = append(errs, j.syncs.close(j.revision.Load(), errors.Join(errs...) == nil))
	if j.lock != nil {
		errs = append(errs, j.lock.Close())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close journal: %w", err)
	}
	return nil
}

// classify classifies SQLite errors of a journal and adds a remedy.
func classify(err error) error { return classified(err, journal.Refuse("the file is damaged")) }

// classified classifies SQLite errors and adds a remedy. damaged is the error of a damaged file.
func classified(err, damaged error) error {
	var e *sqlite.Error
	if !errors.As(err, &e) {
		return err
	}
	switch e.Code() & 0xff { // the primary code; the rest is detail
	case sqlite3.SQLITE_FULL:
		return errdefs.New(errdefs.ResourceExhausted, "the disk of the state folder is full; make room and try again: %w", err)
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return errdefs.New(errdefs.DataLoss, "%w (%w)", damaged, err)
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
		return errdefs.New(errdefs.Unavailable, "another program holds the file: %w", err)
	case sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN:
		return errdefs.New(errdefs.FailedPrecondition, "the state folder is not writable: %w", err)
	}
	return err
}

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

// migrate upgrades the schema to the newest version, by those of steps that are missing. Each step is one transaction, together with
// its version number. If frozen, the schema of a file that has one stays.
func migrate(ctx context.Context, c *sql.Conn, steps []string, frozen bool) error {
	if _, err := c.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS schema (version INTEGER NOT NULL)`); err != nil {
		return err
	}
	version := 0
	err := c.QueryRowContext(ctx, `SELECT version FROM schema`).Scan(&version)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	if version > len(steps) {
		return errdefs.Preconditionf("a newer Cocoon wrote it (schema %d, this version knows %d); use the newer Cocoon", version, len(steps))
	}
	if frozen && version > 0 {
		return nil
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

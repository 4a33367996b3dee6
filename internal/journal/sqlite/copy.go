package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Copy writes what the file at path holds now to the new file to, durably but for its name. Another process, or this one, may have it open and write to it. The copy has no log beside it.
// Errors: AlreadyExists if to exists, ResourceExhausted, DataLoss.
func Copy(ctx context.Context, path, to string) error {
	if _, err := os.Lstat(to); err == nil {
		return errdefs.Existsf("copy %s: %s exists", path, to)
	}
	if err := private(to); err != nil { // SQLite fills an empty file
		return fmt.Errorf("copy %s: %w", path, err)
	}
	db, err := openDB(path, 1)
	if err != nil {
		return fmt.Errorf("copy %s: %w", path, err)
	}
	defer db.Close()
	if _, err := db.ExecContext(ctx, `VACUUM INTO ?`, to); err != nil {
		return fmt.Errorf("copy %s: %w", path, classified(err, errdefs.DataLossf("the file is damaged")))
	}
	if err := syncFile(to); err != nil {
		return fmt.Errorf("copy %s: %w", path, err)
	}
	return nil
}

// Replace puts a copy of the file from in the place of the file at path. Files that were there are kept in a folder beside it. After a crash, it can be done again: path is what it was, missing, or
// the copy.
// Preconditions: nobody has the file at path open.
func Replace(path, from string) error {
	next := path + ".restored"
	if err := errors.Join(remove(next), duplicate(from, next)); err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	if _, err := setAside(path); err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	if err := atomicfile.Rename(next, path); err != nil {
		return fmt.Errorf("replace %s: %w", path, err)
	}
	return nil
}

func duplicate(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := private(to); err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Sync(), out.Close())
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// NewerDocuments reports whether only a newer Cocoon can read the documents at path.
func NewerDocuments(ctx context.Context, path string) (bool, error) {
	return newer(ctx, path, len(documentMigrations()))
}

// NewerJournal reports whether only a newer Cocoon can read the journal at path.
func NewerJournal(ctx context.Context, path string) (bool, error) {
	return newer(ctx, path, len(migrations()))
}

// newer reports whether the file has a schema after known. A file that is missing has none.
func newer(ctx context.Context, path string, known int) (bool, error) {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	db, err := openDB(path, 1)
	if err != nil {
		return false, err
	}
	defer db.Close()
	var version int
	err = db.QueryRowContext(ctx, `SELECT version FROM schema`).Scan(&version)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the schema of %s: %w", path, err)
	}
	return version > known, nil
}

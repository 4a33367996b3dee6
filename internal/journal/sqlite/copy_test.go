package sqlite

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
)

// A copy has what was written before it, also while the file is open, and replaces the file later.
func TestCopyAndReplace(t *testing.T) {
	dir := t.TempDir()
	path, copied := filepath.Join(dir, "state.db"), filepath.Join(dir, "copy.db")
	put := func(d *Documents, data string) {
		t.Helper()
		if err := d.Write(t.Context(), journal.Change{Table: journal.Workloads, Name: "a", Data: []byte(data)}); err != nil {
			t.Fatal(err)
		}
	}
	d := openDocuments(t, path)
	put(d, "before")
	if err := Copy(t.Context(), path, copied); err != nil {
		t.Fatal(err)
	}
	if err := Copy(t.Context(), path, copied); !errdefs.Is(err, errdefs.AlreadyExists) {
		t.Errorf("a second copy: %v", err)
	}
	put(d, "after")
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 { // as after a crash
		if err := Replace(path, copied); err != nil {
			t.Fatal(err)
		}
	}
	d = openDocuments(t, path)
	defer d.Close()
	if data, err := d.Get(t.Context(), journal.Workloads, "a"); err != nil || string(data) != "before" {
		t.Errorf("%q, %v", data, err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	kept, err := filepath.Glob(path + ".replaced-*/state.db")
	if err != nil || len(kept) != 2 {
		t.Errorf("kept %q, %v", kept, err)
	}
}

// The schema of a frozen file stays, so that the version before can still read it. One that is newer is known as such.
func TestFrozen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	open := func(steps []string, frozen bool) int {
		t.Helper()
		if err := private(path); err != nil {
			t.Fatal(err)
		}
		db, err := openDB(path, 1)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		c, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if err := migrate(t.Context(), c, steps, frozen); err != nil {
			t.Fatal(err)
		}
		var version int
		if err := c.QueryRowContext(t.Context(), `SELECT version FROM schema`).Scan(&version); err != nil {
			t.Fatal(err)
		}
		return version
	}
	steps := []string{`CREATE TABLE a (x)`, `CREATE TABLE b (x)`}
	if v := open(steps[:1], true); v != 1 { // a new file
		t.Errorf("a new file has schema %d", v)
	}
	if v := open(steps, true); v != 1 {
		t.Errorf("a frozen file has schema %d", v)
	}
	isNewer := func(known int) bool {
		t.Helper()
		n, err := newer(t.Context(), path, known)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if isNewer(1) {
		t.Error("the frozen file is newer")
	}
	if v := open(steps, false); v != 2 || !isNewer(1) || isNewer(2) {
		t.Errorf("schema %d", v)
	}
	if n, err := NewerDocuments(context.Background(), path+".none"); n || err != nil {
		t.Errorf("a missing file: %v, %v", n, err)
	}
}

// A table that a frozen file lacks is empty.
func TestFrozenLacksATable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	d := openDocuments(t, path)
	if _, err := d.db.ExecContext(t.Context(), `DROP TABLE events`); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	d, err := OpenDocuments(t.Context(), path, Frozen(true))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if _, err := d.Get(t.Context(), journal.Events, "a"); !errdefs.IsNotFound(err) {
		t.Errorf("get: %v", err)
	}
	if all, err := d.List(t.Context(), journal.Events); err != nil || len(all) != 0 {
		t.Errorf("list: %v, %v", all, err)
	}
	if err := d.Write(t.Context(), journal.Change{Table: journal.Events, Name: "a", Data: []byte("x")}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("write: %v", err)
	}
	if err := d.Write(t.Context(), journal.Change{Table: journal.Workloads, Name: "a", Data: []byte("x")}); err != nil {
		t.Errorf("write to another: %v", err)
	}
}

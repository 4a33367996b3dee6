package records_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/journal/journaltest"
	"cocoonstack.io/cocoon/internal/journal/records"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func open(t *testing.T, dir string, history int) *records.Keeper {
	t.Helper()
	j, err := sqlite.Open(t.Context(), sqlite.Config{Path: filepath.Join(dir, "journal.db"), History: history})
	if err != nil {
		t.Fatal(err)
	}
	return records.New(records.Config{Dir: filepath.Join(dir, "vms")}, j)
}

func TestContract(t *testing.T) {
	journaltest.Run(t, func(t *testing.T, dir string, history int) journal.Journal { return open(t, dir, history) })
}

// TestCopies goes through the life of a VM: after each sync of the journal, the copy equals the VM's row.
func TestCopies(t *testing.T) {
	dir := t.TempDir()
	k := open(t, dir, 0)
	r := journaltest.Record("web")
	in := journal.Intent{ID: r.ID, Op: "launch", Step: "disks", Args: []byte(`{"a":1}`), Began: r.CreatedAt}
	r, err := k.Begin(t.Context(), in, r)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.Kept(r.ID); !errdefs.IsNotFound(err) {
		t.Errorf("a VM without a folder: %v", err)
	}
	folder := filepath.Join(dir, "vms", string(r.ID))
	if err := os.MkdirAll(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	holds := func(what, step string) {
		t.Helper()
		if err := k.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		row, err := k.Kept(r.ID)
		if d := diff.Of(r, row.Record); err != nil || d != "" {
			t.Errorf("%s: the copy: %v, %s", what, err, d)
		}
		if got := row.Intent; (got == nil) != (step == "") || got != nil && (got.Op != "launch" || got.Step != step || string(got.Args) != `{"a":1}`) {
			t.Errorf("%s: the copy has the intent %+v", what, got)
		}
	}
	r.Message = "begun"
	if r, err = k.Step(t.Context(), r.ID, "launch", r); err != nil {
		t.Fatal(err)
	}
	holds("step", "launch")
	if r, err = k.Update(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	holds("update", "launch")
	if r, err = k.Settle(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	holds("settle", "")
	info, err := os.Stat(filepath.Join(folder, records.File))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("its mode is %v, %v", info.Mode(), err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.Run(ctx); err != nil { // syncs the rest
		t.Error(err)
	}

	if err := os.Remove(filepath.Join(folder, records.File)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := k.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	holds("load", "")
	if err := os.WriteFile(filepath.Join(folder, records.File), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Kept(r.ID); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("a damaged copy: %v", err)
	}
	if rows, rest, err := records.Scan(filepath.Join(dir, "vms")); err != nil || len(rows) != 0 || len(rest) != 1 {
		t.Errorf("scan: %v, %v, %v", rows, rest, err)
	}
	if err := k.Forget(t.Context(), r.ID); err != nil {
		t.Fatal(err)
	}
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestRefuses opens journals that do not belong to the folders.
func TestRefuses(t *testing.T) {
	for name, prepare := range map[string]func(t *testing.T, dir string){
		"a newer record": func(t *testing.T, dir string) {
			k := open(t, dir, 0)
			defer k.Close()
			r := journaltest.Record("web")
			if err := os.MkdirAll(filepath.Join(dir, "vms", string(r.ID)), 0o700); err != nil {
				t.Fatal(err)
			}
			if _, err := k.Begin(t.Context(), journal.Intent{ID: r.ID, Op: "create"}, r); err != nil {
				t.Fatal(err)
			}
			if err := k.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
		},
		"a folder without a record": func(t *testing.T, dir string) {
			folder := filepath.Join(dir, "vms", string(vm.NewID()))
			if err := os.MkdirAll(folder, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(folder, "cow"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			prepare(t, dir)
			for _, suffix := range []string{"", "-wal", "-shm", ".mark"} {
				_ = os.Remove(filepath.Join(dir, "journal.db"+suffix))
			}
			k := open(t, dir, 0)
			defer k.Close()
			if _, _, err := k.Load(t.Context()); !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), "recover --rebuild") {
				t.Errorf("got %v", err)
			}
		})
	}
}

// TestPowerCut removes what was not synced of the journal and keeps everything else, as a power cut may do: the
// remaining journal is never older than a copy.
func TestPowerCut(t *testing.T) {
	dir, synced := t.TempDir(), t.TempDir()
	carry := func(from, to string) {
		t.Helper()
		for _, suffix := range []string{"", "-wal"} {
			text, err := os.ReadFile(filepath.Join(from, "journal.db"+suffix))
			if err == nil {
				err = os.WriteFile(filepath.Join(to, "journal.db"+suffix), text, 0o600)
			}
			if err != nil {
				t.Error(err)
			}
		}
	}
	j, err := sqlite.Open(t.Context(), sqlite.Config{Path: filepath.Join(dir, "journal.db"), Synced: func() { carry(dir, synced) }})
	if err != nil {
		t.Fatal(err)
	}
	k := records.New(records.Config{Dir: filepath.Join(dir, "vms")}, j)
	defer k.Close()
	if _, _, err := k.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	cut := func(when string, wantMessage string) {
		t.Helper()
		left := t.TempDir()
		carry(synced, left)
		if err := os.CopyFS(filepath.Join(left, "vms"), os.DirFS(filepath.Join(dir, "vms"))); err != nil {
			t.Fatal(err)
		}
		after := open(t, left, 0)
		defer after.Close()
		rs, _, err := after.Load(t.Context())
		if err != nil || len(rs) != 1 || rs[0].Message != wantMessage {
			t.Errorf("a power cut %s: %+v, %v", when, rs, err)
			return
		}
		if row, err := after.Kept(rs[0].ID); err != nil || row.Record.Message != wantMessage {
			t.Errorf("a power cut %s: the copy is %+v, %v", when, row.Record, err)
		}
	}
	r := journaltest.Record("web")
	if err := os.MkdirAll(filepath.Join(dir, "vms", string(r.ID)), 0o700); err != nil {
		t.Fatal(err)
	}
	r.Message = "answered"
	if r, err = k.Begin(t.Context(), journal.Intent{ID: r.ID, Op: "create"}, r); err != nil {
		t.Fatal(err)
	}
	if r, err = k.Settle(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	if err := k.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	cut("after the answer", "answered")
	r.Message = "told to nobody"
	if _, err = k.Update(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	cut("after a change that nobody waits for", "answered")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.Run(ctx); err != nil {
		t.Fatal(err)
	}
	cut("when its copy was written", "told to nobody")
}

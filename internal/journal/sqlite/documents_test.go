package sqlite

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
)

func openDocuments(t *testing.T, path string) *Documents {
	t.Helper()
	d, err := OpenDocuments(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDocuments(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	d := openDocuments(t, path)
	defer func() { _ = d.Close() }()
	put := func(name, data string) journal.Change {
		return journal.Change{Table: journal.Workloads, Name: name, Data: []byte(data)}
	}
	write := func(want errdefs.Class, changes ...journal.Change) {
		t.Helper()
		if err := d.Write(t.Context(), changes...); err == nil && want != 0 || err != nil && errdefs.ClassOf(err) != want {
			t.Fatalf("write: %v, want %v", err, want)
		}
	}
	write(0, put("b", "1"), put("a", "2"), journal.Change{Table: journal.Keys, Name: "a", Data: []byte("key")})
	write(0, put("b", "3"))
	isNew := put("b", "4")
	isNew.New = true
	write(errdefs.AlreadyExists, put("c", "5"), isNew) // all or nothing
	if _, err := d.Get(t.Context(), journal.Workloads, "c"); !errdefs.IsNotFound(err) {
		t.Errorf("c: %v", err)
	}
	write(0, journal.Change{Table: journal.Workloads, Name: "none"})
	if _, err := OpenDocuments(t.Context(), path); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("opened twice: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}

	d = openDocuments(t, path)
	got, err := d.List(t.Context(), journal.Workloads)
	if want := []journal.Document{{Name: "a", Data: []byte("2")}, {Name: "b", Data: []byte("3")}}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%s, %v", got, err)
	}
	write(0, journal.Change{Table: journal.Workloads, Name: "a"})
	if _, err := d.Get(t.Context(), journal.Workloads, "a"); !errdefs.IsNotFound(err) {
		t.Errorf("a: %v", err)
	}
	for _, table := range journal.Tables() {
		if _, err := d.List(t.Context(), table); err != nil {
			t.Error(err)
		}
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
}

// A damaged file is refused, and stays as it is.
func TestDocumentsDamaged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	d := openDocuments(t, path)
	big := make([]byte, 200_000)
	if err := d.Write(t.Context(), journal.Change{Table: journal.Workloads, Name: "a", Data: big}); err != nil {
		t.Fatal(err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range []int{0, 4096, 8 * 4096} {
		damaged := append([]byte(nil), text...)
		for i := range 4096 {
			damaged[at+i] = 0xa5
		}
		if err := os.WriteFile(path, damaged, 0o600); err != nil {
			t.Fatal(err)
		}
		if d, err := OpenDocuments(t.Context(), path); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("damaged at %d: %v", at, err)
			if err == nil {
				_ = d.Close()
			}
		}
		if now, err := os.ReadFile(path); err != nil || string(now) != string(damaged) {
			t.Errorf("damaged at %d: the file has changed: %v", at, err)
		}
	}
}

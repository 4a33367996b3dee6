package statecopy

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

var errCrash = errors.New("the machine stopped")

// box has two databases, which are files. Their schema is their first letter; this version knows a.
type box struct {
	t     *testing.T
	s     *Store
	left  int // steps until the machine stops; -1: never
	calls int
}

func newBox(t *testing.T) *box {
	b := &box{t: t, left: -1}
	dir := t.TempDir()
	step := func() error {
		b.calls++
		if b.left == 0 {
			return errCrash
		}
		b.left--
		return nil
	}
	database := func(name string) Database {
		return Database{
			Path: filepath.Join(dir, name),
			Copy: func(_ context.Context, path, to string) error {
				text, err := os.ReadFile(path)
				return errors.Join(err, step(), os.WriteFile(to, text, 0o600))
			},
			Replace: func(path, from string) error {
				if err := step(); err != nil {
					return err
				}
				text, err := os.ReadFile(from)
				return errors.Join(err, os.WriteFile(path, text, 0o600), step())
			},
			Newer: func(_ context.Context, path string) (bool, error) {
				text, err := os.ReadFile(path)
				return strings.HasPrefix(string(text), "b"), err
			},
		}
	}
	b.s = &Store{Dir: filepath.Join(dir, "update"), Databases: []Database{database("one"), database("two")}, Log: slog.New(slog.DiscardHandler)}
	b.set("a1", "a2")
	return b
}

func (b *box) set(texts ...string) {
	b.t.Helper()
	for i, text := range texts {
		if err := os.WriteFile(b.s.Databases[i].Path, []byte(text), 0o600); err != nil {
			b.t.Fatal(err)
		}
	}
}

func (b *box) are(want string) {
	b.t.Helper()
	var got []string
	for _, d := range b.s.Databases {
		text, err := os.ReadFile(d.Path)
		if err != nil {
			b.t.Fatal(err)
		}
		got = append(got, string(text))
	}
	if s := strings.Join(got, " "); s != want {
		b.t.Errorf("the databases are %q, want %q", s, want)
	}
}

func (b *box) restore(want bool) {
	b.t.Helper()
	did, err := b.s.Restore(b.t.Context())
	if did != want || err != nil {
		b.t.Errorf("restored: %v, %v", did, err)
	}
	if did {
		err = b.s.Settle()
	}
	if err != nil {
		b.t.Error(err)
	}
}

// A machine that stops before anybody opens the databases puts them back again at its next start.
func TestRestoreIsNotSettled(t *testing.T) {
	b := newBox(t)
	if err := b.s.Take(t.Context(), "u1"); err != nil {
		t.Fatal(err)
	}
	b.set("b1", "b2")
	if did, err := b.s.Restore(t.Context()); !did || err != nil {
		t.Fatalf("restored: %v, %v", did, err)
	}
	b.are("a1 a2")
	b.restore(true)
	b.restore(false)
	b.are("a1 a2")
}

// All databases go back, and only if one of them is newer.
func TestRestore(t *testing.T) {
	b := newBox(t)
	b.restore(false)
	b.set("b1", "a2+") // a newer one without a copy is not touched
	b.restore(false)
	b.are("b1 a2+")
	b.set("a1", "a2")
	if err := b.s.Take(t.Context(), "u1"); err != nil {
		t.Fatal(err)
	}
	b.set("a1+", "a2+")
	b.restore(false)
	b.are("a1+ a2+")
	b.set("b1", "a2+")
	b.restore(true)
	b.are("a1 a2")
	b.restore(false)
	if err := errors.Join(b.s.Remove(), b.s.Remove()); err != nil {
		t.Fatal(err)
	}
	b.set("b1", "a2+")
	b.restore(false)
	b.are("b1 a2+")
}

// A machine that stops at any step of a restoration goes on with it.
func TestRestoreIsInterrupted(t *testing.T) {
	for at := range 5 {
		b := newBox(t)
		if err := b.s.Take(t.Context(), "u1"); err != nil {
			t.Fatal(err)
		}
		b.set("b1", "b2")
		b.left = at
		if _, err := b.s.Restore(t.Context()); at < 4 && !errors.Is(err, errCrash) {
			t.Fatalf("%d: %v", at, err)
		}
		b.left = -1
		b.restore(true)
		b.are("a1 a2")
		b.restore(false)
	}
}

// A machine that stops while it copies has the copy of before, or none, and never half of one.
func TestTakeIsInterrupted(t *testing.T) {
	for at := range 2 {
		b := newBox(t)
		if err := b.s.Take(t.Context(), "u1"); err != nil {
			t.Fatal(err)
		}
		b.set("a1+", "a2+")
		b.left = at
		if err := b.s.Take(t.Context(), "u2"); !errors.Is(err, errCrash) {
			t.Fatalf("%d: %v", at, err)
		}
		b.left = -1
		b.set("b1", "b2")
		b.restore(true)
		b.are("a1 a2")
	}
}

// A copy that is damaged is not used.
func TestDamaged(t *testing.T) {
	b := newBox(t)
	if err := b.s.Take(t.Context(), "u1"); err != nil {
		t.Fatal(err)
	}
	b.set("b1", "b2")
	if err := os.WriteFile(filepath.Join(b.s.Dir, kept, "two"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := b.s.Restore(t.Context()); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("restored: %v", err)
	}
	b.are("b1 b2")
}

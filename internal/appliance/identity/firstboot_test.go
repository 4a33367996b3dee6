package identity

import (
	"context"
	"crypto/ed25519"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/journal/journaltest"
)

// sealed writes a seal for an operator's key, and returns it with its path.
func sealed(t *testing.T) (Seal, ed25519.PublicKey, string) {
	t.Helper()
	public, _, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewSeal()
	if err != nil {
		t.Fatal(err)
	}
	if s, _, err = s.For(public, "ann"); err != nil {
		t.Fatal(err)
	}
	text, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "firstboot.json")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return s, public, path
}

func open(t *testing.T, docs journal.Documents) *Keeper {
	t.Helper()
	k, err := Open(t.Context(), Config{Documents: docs, Age: func() time.Duration { return 0 }, Now: time.Now, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// flaky stops at a write, before or after it is made.
type flaky struct {
	journal.Documents
	before, after bool
}

var errCut = errors.New("the power is cut")

func (f *flaky) Write(ctx context.Context, changes ...journal.Change) error {
	if f.before {
		return errCut
	}
	if err := f.Documents.Write(ctx, changes...); err != nil {
		return err
	}
	if f.after {
		return errCut
	}
	return nil
}

// A machine is the one of its seal, once, wherever its first start is cut off; and its operator is the one who installed it.
func TestUnseal(t *testing.T) {
	for name, cut := range map[string]flaky{"at once": {}, "cut before it is stored": {before: true}, "cut before the file goes": {after: true}} {
		t.Run(name, func(t *testing.T) {
			s, public, path := sealed(t)
			docs := journaltest.NewDocuments()
			cut.Documents = docs
			unseal := func(d journal.Documents) error {
				return Unseal(t.Context(), d, path, time.Now(), slog.New(slog.DiscardHandler))
			}
			if err := unseal(&cut); errors.Is(err, errCut) != (cut.before || cut.after) {
				t.Fatal(err)
			}
			for range 2 {
				if err := unseal(docs); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the seal is still there: %v", err)
			}
			k := open(t, docs)
			c, err := s.TLS()
			if err != nil {
				t.Fatal(err)
			}
			if keys := k.Keys(); k.ID() != s.ID || k.ShortID() != s.ShortID || !k.Certificate().Leaf.Equal(c.Leaf) || !k.Adopted() || len(keys) != 1 ||
				!keys[0].Public.Equal(public) || keys[0].Name != "ann" {
				t.Errorf("the machine is %s, with the keys %+v", k.ID(), keys)
			}
			if _, err := k.Adopt(t.Context(), make([]byte, ed25519.PublicKeySize), "eve"); !errdefs.IsFailedPrecondition(err) {
				t.Errorf("somebody else adopted it: %v", err)
			}
		})
	}
}

// A machine that has another identity keeps it. A seal that is damaged, or that others could have written, gives the machine to nobody.
func TestUnsealRefuses(t *testing.T) {
	_, _, path := sealed(t)
	docs := journaltest.NewDocuments()
	was := open(t, docs).ID()
	if err := Unseal(t.Context(), docs, path, time.Now(), slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	if k := open(t, docs); k.ID() != was || k.Adopted() {
		t.Errorf("the machine became %s", k.ID())
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("a seal that was not used is gone: %v", err)
	}
	for name, spoil := range map[string]func(path string) error{
		"half of it":       func(p string) error { return os.Truncate(p, 100) },
		"nothing":          func(p string) error { return os.Truncate(p, 0) },
		"others may read":  func(p string) error { return os.Chmod(p, 0o640) },
		"too large":        func(p string) error { return os.WriteFile(p, []byte(strings.Repeat(" ", maxSeal+1)), 0o600) },
		"a folder":         func(p string) error { return errors.Join(os.Remove(p), os.Mkdir(p, 0o700)) },
		"a symbolic link":  func(p string) error { return errors.Join(os.Rename(p, p+"x"), os.Symlink(p+"x", p)) },
		"more behind it":   func(p string) error { return add(p, "{}") },
		"an unknown field": func(p string) error { return replace(p, `{"capsule_id"`, `{"role":"admin","capsule_id"`) },
		"another short id": func(p string) error { return replace(p, `"short_id":"capsule-`, `"short_id":"capsule-x`) },
		"no operator":      func(p string) error { return replace(p, `"operator_pubkey":"`, `"operator_pubkey":"AAAA`) },
		"another key":      func(p string) error { return replace(p, `BEGIN PRIVATE KEY`, `BEGIN CERTIFICATE`) },
	} {
		_, _, path := sealed(t)
		if err := spoil(path); err != nil {
			t.Fatal(err)
		}
		docs := journaltest.NewDocuments()
		if err := Unseal(t.Context(), docs, path, time.Now(), slog.New(slog.DiscardHandler)); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s: %v", name, err)
		}
		if all, err := docs.List(t.Context(), journal.Identity); err != nil || len(all) != 0 {
			t.Errorf("%s: stored %v, %v", name, all, err)
		}
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("%s: the file is gone: %v", name, err)
		}
	}
}

func add(path, text string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

func replace(path, old, with string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	now := strings.Replace(string(text), old, with, 1)
	if now == string(text) {
		return errors.New("nothing to replace: " + old)
	}
	return os.WriteFile(path, []byte(now), 0o600)
}

// FuzzSeal reads any text: what it takes for a seal has an identity whose certificate can be shown, and an operator; written again, it is the same.
func FuzzSeal(f *testing.F) {
	s, err := NewSeal()
	if err != nil {
		f.Fatal(err)
	}
	if s, _, err = s.For(make([]byte, ed25519.PublicKeySize), "ann"); err != nil {
		f.Fatal(err)
	}
	text, err := s.Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"capsule_id":"x"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ParseSeal(b)
		if err != nil {
			if !errdefs.Is(err, errdefs.DataLoss) {
				t.Errorf("%v", err)
			}
			return
		}
		if _, err := s.TLS(); err != nil || len(s.Operator) != ed25519.PublicKeySize || s.OperatorName == "" || !strings.HasPrefix(s.ShortID, "capsule-") {
			t.Errorf("%+v, %v", s, err)
		}
		again, err := s.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if back, err := ParseSeal(again); err != nil || back.ID != s.ID || back.Certificate != s.Certificate || string(back.Operator) != string(s.Operator) {
			t.Errorf("it became %+v, %v", back, err)
		}
	})
}

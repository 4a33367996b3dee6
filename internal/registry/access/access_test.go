package access

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func TestPlainLineMayDoEverything(t *testing.T) {
	tokens, err := Parse(strings.NewReader("# who\n\n  s3cret  # mine\n"))
	if err != nil {
		t.Fatal(err)
	}
	id, err := tokens.Check("s3cret", now)
	if err != nil || !id.Everything() || !id.Allows(Delete, "a/b") {
		t.Fatalf("%+v, %v", id, err)
	}
	for _, bad := range []string{"", "s3cre", "s3cret ", "#", "who"} {
		if _, err := tokens.Check(bad, now); !errors.Is(err, ErrUnknown) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestNewTokenIsAcceptedFromItsLine(t *testing.T) {
	secret, line, err := New("ci", []Scope{{Push, "team"}, {Pull, ""}}, now.Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(line, secret) {
		t.Fatal("the line tells the token")
	}
	tokens, err := Parse(strings.NewReader(line))
	if err != nil {
		t.Fatal(err)
	}
	id, err := tokens.Check(secret, now)
	if err != nil || id.Name != "ci" || id.Everything() {
		t.Fatalf("%+v, %v", id, err)
	}
	if _, err := tokens.Check(secret, now.Add(time.Hour)); !errors.Is(err, ErrExpired) {
		t.Errorf("after its time: %v", err)
	}
	if _, err := tokens.Check(line, now); !errors.Is(err, ErrUnknown) {
		t.Errorf("the line as a token: %v", err)
	}
}

func TestScopes(t *testing.T) {
	for _, c := range []struct {
		scope  string
		action Action
		repo   string
		ok     bool
	}{
		{"pull:team", Pull, "team", true},
		{"pull:team", Pull, "team/app", true},
		{"pull:team", Pull, "teams", false},
		{"pull:team/", Pull, "team/app", true},
		{"pull:team/", Pull, "team", false},
		{"pull:team", Push, "team", false},
		{"push:team", Pull, "team", true},
		{"push:team", Delete, "team", false},
		{"*:team", Delete, "team/x", true},
		{"*:team", Pull, "other", false},
		{"*", Delete, "any", true},
		{"pull", Pull, "any", true},
		{"pull:*", Pull, "any", true},
	} {
		s, err := ParseScope(c.scope)
		if err != nil {
			t.Fatal(err)
		}
		if got := (Identity{Scopes: []Scope{s}}).Allows(c.action, c.repo); got != c.ok {
			t.Errorf("%s: %s of %s: %v", c.scope, c.action, c.repo, got)
		}
		if again, err := ParseScope(s.String()); err != nil || again != s {
			t.Errorf("%s is written as %s", c.scope, s)
		}
	}
}

func TestBadLinesAreRefusedWithoutBeingShown(t *testing.T) {
	for _, bad := range []string{
		"name hunter2", "name sha256:zz", "sha256:" + strings.Repeat("0", 64), "name sha256:" + strings.Repeat("0", 64) + " hunter2",
		"n sha256:" + strings.Repeat("0", 64) + " scope=write:x", "n sha256:" + strings.Repeat("0", 64) + " scope=pull:a*",
		"n sha256:" + strings.Repeat("0", 64) + " expires=tomorrow",
	} {
		_, err := Parse(strings.NewReader(bad))
		if !errdefs.IsInvalid(err) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestFileIsReadAgainWhenItChanges(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens")
	write := func(text string, mode os.FileMode) {
		t.Helper()
		if err := os.WriteFile(path+".new", []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	write("one\n", 0o644)
	log := slog.New(slog.DiscardHandler)
	if _, err := Open(path, "", log); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "chmod 600") {
		t.Fatalf("a file for everybody: %v", err)
	}
	write("one\n", 0o600)
	f, err := Open(path, "static", log)
	if err != nil {
		t.Fatal(err)
	}
	at := now
	check := func(secret string, ok bool) {
		t.Helper()
		at = at.Add(2 * lookEvery)
		if _, err := f.Check(secret, at); (err == nil) != ok {
			t.Errorf("%s: %v", secret, err)
		}
	}
	check("one", true)
	check("static", true)
	write("two\n", 0o600)
	check("one", false)
	check("two", true)
	write("three bad\n", 0o600)
	check("two", true)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	check("two", true)
	check("static", true)
}

func FuzzParse(f *testing.F) {
	f.Add("token\n# c\nn sha256:" + strings.Repeat("ab", 32) + " scope=pull:x expires=2030-01-01T00:00:00Z")
	f.Add("\x00 \xff sha256:")
	f.Fuzz(func(t *testing.T, text string) {
		tokens, err := Parse(strings.NewReader(text))
		if err != nil {
			return
		}
		if id, err := tokens.Check("", now); err == nil {
			t.Fatalf("nothing is the token of %+v", id)
		}
	})
}

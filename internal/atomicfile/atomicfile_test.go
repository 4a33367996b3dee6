package atomicfile

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
)

func TestWriteFileReplacesContentAndMode(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	for _, want := range []string{"one", "two"} {
		if err := WriteFile(path, []byte(want), 0o640); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != want {
			t.Fatalf("read %q, %v; want %q", got, err, want)
		}
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o640 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
}

func TestFailedFillLeavesTheOldFileAndNothingElse(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	if err := WriteFile(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	boom := errors.New("boom")
	err := Write(path, 0o600, func(w io.Writer) error {
		if _, err := io.WriteString(w, "half"); err != nil {
			return err
		}
		return boom
	})
	if !errors.Is(err, boom) {
		t.Errorf("error %v does not wrap its cause", err)
	}
	if got, _ := os.ReadFile(path); string(got) != "old" {
		t.Errorf("file holds %q", got)
	}
	if names, _ := os.ReadDir(dir); len(names) != 1 {
		t.Errorf("%d files left, want 1", len(names))
	}
}

func TestMissingFolder(t *testing.T) {
	err := WriteFile(filepath.Join(t.TempDir(), "no", "f"), nil, 0o600)
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

// What a writer leaves that is killed goes, and nothing else.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	err := Write(path("f"), 0o600, func(io.Writer) error {
		names, err := os.ReadDir(dir)
		if err != nil || len(names) != 1 {
			t.Fatal(names, err)
		}
		return errors.Join(os.Link(path(names[0].Name()), path(names[0].Name()+"9")), os.Link(path(names[0].Name()), path(".g.json.tmp-123")))
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"f.tmp-1", ".f.tmp", ".fg.tmp-1"} {
		if err := os.WriteFile(path(name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		path string
		left int
	}{{"none", 6}, {"f", 5}, {"*.json", 4}, {"f", 4}, {"none/f", 4}} {
		if err := Sweep(path(c.path)); err != nil {
			t.Fatal(err)
		}
		if names, err := os.ReadDir(dir); err != nil || len(names) != c.left {
			t.Errorf("after a sweep of %s there are %v, %v", c.path, names, err)
		}
	}
}

package crilog_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/cri/crilog"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/need"
)

var noon = time.Date(2026, 11, 27, 12, 0, 0, 5, time.UTC)

func open(t *testing.T, path string) *crilog.File {
	t.Helper()
	l, err := crilog.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestLines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pod", "c", "0.log")
	l := open(t, path)
	long := strings.Repeat("x", 16<<10)
	for _, w := range []struct{ stream, text string }{
		{"stdout", "one\ntwo\n"}, {"stderr", "half"}, {"stderr", " a line\n"}, {"stdout", "\n"}, {"stdout", long + "yz\n"},
	} {
		if err := l.Write(noon, w.stream, []byte(w.text)); err != nil {
			t.Fatal(err)
		}
	}
	const at = "2026-11-27T12:00:00.000000005Z "
	want := at + "stdout F one\n" + at + "stdout F two\n" + at + "stderr P half\n" + at + "stderr F  a line\n" + at + "stdout F \n" +
		at + "stdout P " + long + "\n" + at + "stdout F yz\n"
	if d := diff.Of(want, read(t, path)); d != "" {
		t.Error(d)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o640 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
}

func TestReopen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	l := open(t, path)
	write := func(text string, at time.Time) {
		t.Helper()
		if err := l.Write(at, "stdout", []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	write("old\n", noon)
	old := path + ".20261127-120000"
	if err := os.Rename(path, old); err != nil {
		t.Fatal(err)
	}
	if err := l.Reopen(); err != nil {
		t.Fatal(err)
	}
	if at, err := l.Last(); err != nil || !at.Equal(noon) {
		t.Errorf("last is %v, %v; want that of the renamed file", at, err)
	}
	write("new\n", noon.Add(time.Second))
	if !strings.HasSuffix(read(t, path), " new\n") || !strings.HasSuffix(read(t, old), " old\n") {
		t.Errorf("%q and %q", read(t, path), read(t, old))
	}
	if at, err := l.Last(); err != nil || !at.Equal(noon.Add(time.Second)) {
		t.Errorf("last is %v, %v", at, err)
	}
}

// TestInterruptedWrite: what a crash left of a line is removed, and Last names the line before.
func TestInterruptedWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	l := open(t, path)
	if err := l.Write(noon, "stdout", []byte("whole\n")); err != nil {
		t.Fatal(err)
	}
	whole := read(t, path)
	if err := os.WriteFile(path, []byte(whole+"2026-11-27T12:00:01Z std"), 0o600); err != nil {
		t.Fatal(err)
	}
	l = open(t, path)
	if at, err := l.Last(); err != nil || !at.Equal(noon) {
		t.Errorf("last is %v, %v", at, err)
	}
	if got := read(t, path); got != whole {
		t.Errorf("got %q, want %q", got, whole)
	}
}

// TestNoLink: the log is never written through a symbolic link.
func TestNoLink(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink(filepath.Join(dir, "precious"), filepath.Join(dir, "0.log")); err != nil {
		t.Fatal(err)
	}
	if _, err := crilog.Open(filepath.Join(dir, "0.log")); err == nil {
		t.Error("it was opened")
	}
}

// TestMark: how far a source was read is known after a restart, also if the log was renamed just before.
func TestMark(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	f := open(t, path)
	if at := f.Mark(); at != 0 {
		t.Errorf("a new log has the mark %d", at)
	}
	for _, at := range []int64{7, 1 << 40} {
		if err := f.SetMark(at); err != nil {
			t.Fatal(err)
		}
	}
	if f.Mark() == 0 {
		need.Missing(t, "a folder for temporary files on a file system with extended attributes, such as ext4")
	}
	if at := open(t, path).Mark(); at != 1<<40 {
		t.Errorf("after a restart the mark is %d", at)
	}
	if err := os.Rename(path, path+".20261128-120000"); err != nil {
		t.Fatal(err)
	}
	if at := open(t, path).Mark(); at != 1<<40 {
		t.Errorf("after the log was renamed, the mark is %d", at)
	}
}

package capsulectl_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestVolumeCopies(t *testing.T) {
	m := newMachine(t)
	o := adopted(t, m)
	has(t, o.ok("volume", "snapshot", "create", "data", "before"), "before", "32M")
	has(t, o.ok("volume", "snapshot", "list"), "before", "data")
	has(t, o.ok("volume", "snapshot", "delete", "before"), "before")
	o.fails(3, "no snapshot other", "volume", "snapshot", "delete", "other")
	has(t, o.ok("volume", "clone", "data", "copy", "--size", "64MiB"), "copy", "64M")
	o.ok("volume", "clone", "--snapshot", "before", "copy")
	o.ok("volume", "rollback", "data", "before")
	if want := []string{"snapshot data before", "clone data/ copy", "clone /before copy", "rollback data before"}; !slices.Equal(m.calls, want) {
		t.Errorf("%q", m.calls)
	}
}

// A file has its name when it is complete, and nothing is left of one that is not.
func TestVolumeExport(t *testing.T) {
	m := newMachine(t)
	o := adopted(t, m)
	dir := t.TempDir()
	path := filepath.Join(dir, "data.raw")
	o.ok("volume", "export", "--raw", "data", path)
	if fi, err := os.Stat(path); err != nil || fi.Size() != 3000 || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
	if out := o.ok("volume", "export", "data", "-"); len(out) != 3000 {
		t.Errorf("%d bytes", len(out))
	}
	o.fails(1, "the disk failed", "volume", "export", "--raw", "cut", filepath.Join(dir, "cut"))
	o.fails(9, "2000 bytes", "volume", "export", "--raw", "short", filepath.Join(dir, "short"))
	o.fails(3, "no volume none", "volume", "export", "none", path)
	o.fails(5, "write", "volume", "export", "data", filepath.Join(dir, "missing", "x"))
	o.fails(5, "write", "volume", "export", "data", dir)
	if all, _ := os.ReadDir(dir); len(all) != 1 {
		t.Errorf("left: %v", all)
	}
	if fi, err := os.Stat(path); err != nil || fi.Size() != 3000 {
		t.Errorf("a failed export changed the file: %v, %v", fi, err)
	}
}

func TestVolumeImport(t *testing.T) {
	m := newMachine(t)
	o := adopted(t, m)
	path := filepath.Join(t.TempDir(), "data.raw")
	if err := os.WriteFile(path, make([]byte, 3<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	has(t, o.ok("volume", "import", "data", path), "data", "32M")
	if m.pushed != 3<<20 {
		t.Errorf("%d bytes have arrived", m.pushed)
	}
	o.stdin = "content"
	has(t, o.ok("volume", "import", "--size", "1GiB", "data", "-"), "1G")
	if m.pushed != len("content") {
		t.Errorf("%d bytes have arrived", m.pushed)
	}
	o.fails(2, "read", "volume", "import", "data", "missing")
	o.fails(2, "", "volume", "import", "--size", "x", "data", path)
}

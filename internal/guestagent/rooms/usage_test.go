package rooms

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

func TestSize(t *testing.T) {
	dir := t.TempDir()
	if bytes, inodes := size(filepath.Join(dir, "none")); bytes != 0 || inodes != 0 {
		t.Errorf("of nothing: %d, %d", bytes, inodes)
	}
	if err := os.MkdirAll(filepath.Join(dir, "a", "b"), 0o755); err != nil {
		t.Fatal(err)
	}
	before, folders := size(dir)
	if folders != 3 {
		t.Errorf("%d folders, want 3", folders)
	}
	file := filepath.Join(dir, "a", "b", "file")
	if err := os.WriteFile(file, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(file, filepath.Join(dir, "again")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/", filepath.Join(dir, "root")); err != nil {
		t.Fatal(err)
	}
	if bytes, inodes := size(dir); bytes-before < 1<<20 || bytes-before > 2<<20 || inodes != folders+2 {
		t.Errorf("a file with two names, and a link: %d more, %d files", bytes-before, inodes)
	}
	for i := range batch + 10 {
		if err := os.WriteFile(filepath.Join(dir, "a", strconv.Itoa(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, inodes := size(dir); inodes != folders+2+batch+10 {
		t.Errorf("%d files in a large folder", inodes)
	}
	deep := dir
	for range deepest + 10 {
		deep = filepath.Join(deep, "d")
	}
	if err := os.MkdirAll(deep, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, inodes := size(dir); inodes != folders+2+batch+10+deepest {
		t.Errorf("%d files with deep folders", inodes)
	}
}

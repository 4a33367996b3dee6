package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestRemoveAllOfADeepFolder: a folder with more levels than this process may have descriptors, and with more than one way down, is removed. What its links lead to stays.
func TestRemoveAllOfADeepFolder(t *testing.T) {
	const files, depth = 64, 100
	dir := t.TempDir()
	outside := filepath.Join(dir, "outside")
	if err := os.MkdirAll(filepath.Join(outside, "folder"), 0o700); err != nil {
		t.Fatal(err)
	}
	tree := filepath.Join(dir, "tree")
	for way := range 3 {
		deep := filepath.Join(tree, "x", strconv.Itoa(way)+strings.Repeat("/d", depth))
		if err := os.MkdirAll(deep, 0o700); err != nil {
			t.Fatal(err)
		}
		for at := deep; at != tree; at = filepath.Dir(filepath.Dir(at)) {
			err := errors.Join(os.WriteFile(filepath.Join(at, "file"), nil, 0o600), os.Symlink(outside, filepath.Join(at, "link")))
			if err != nil && !errors.Is(err, fs.ErrExist) {
				t.Fatal(err)
			}
		}
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	err := RemoveAll(tree)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
	if _, err := os.Stat(filepath.Join(outside, "folder")); err != nil {
		t.Error(err)
	}
}

func TestRemoveAllOfWhatIsNoFolder(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Symlink(dir, link)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, link, filepath.Join(dir, "missing"), filepath.Join(dir, "missing", "too")} {
		if err := RemoveAll(path); err != nil {
			t.Errorf("%s: %v", path, err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := RemoveAll(filepath.Join(file, "x")); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("below a file: %v", err)
	}
}

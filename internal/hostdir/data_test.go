package hostdir

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// A file is made with its size and as holes, for root alone. One that is there stays as it is, whatever it is, and no path leads out by a link.
func TestData(t *testing.T) {
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	at := func(name string) string { return filepath.Join(root, name) }
	const size = 1 << 30
	var wg sync.WaitGroup
	for range 4 { // several VMs at once
		wg.Go(func() {
			if err := CreateData(root, at("a/b/disk"), size); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	st, err := os.Stat(at("a/b/disk"))
	if err != nil {
		t.Fatal(err)
	}
	if blocks := st.Sys().(*syscall.Stat_t).Blocks; st.Size() != size || blocks > 64 || st.Mode() != 0o600 {
		t.Errorf("it has %d bytes, %d blocks, the mode %s", st.Size(), blocks, st.Mode())
	}
	if names, err := os.ReadDir(at("a/b")); err != nil || len(names) != 1 {
		t.Errorf("the folder has %v, %v", names, err)
	}
	f, err := OpenData(root, at("a/b/disk"), true)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteString("kept")
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	if err := CreateData(root, at("a/b/disk"), 1); err != nil {
		t.Error(err)
	}
	if f, err = OpenData(root, at("a/b/disk"), false); err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	head := make([]byte, 4)
	if _, err := f.ReadAt(head, 0); err != nil || string(head) != "kept" {
		t.Errorf("it has %q, %v", head, err)
	}
	if _, err := f.WriteString("x"); err == nil {
		t.Error("a file that is only read was written to")
	}

	outside := filepath.Join(t.TempDir(), "secret")
	if err := errors.Join(os.WriteFile(outside, nil, 0o600), os.Symlink(outside, at("link")), os.Symlink(filepath.Dir(outside), at("folder")), os.Symlink(outside+"-new", at("dangling")), syscall.Mkfifo(at("pipe"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for what, path := range map[string]string{
		"a link": at("link"), "a link on the way": at("folder/secret"), "a link to nothing": at("dangling"), "a pipe": at("pipe"), "a folder": at("a"), "nothing": at("none"), "below a file": at("a/b/disk/x"),
	} {
		if what != "nothing" {
			err := CreateData(root, path, size)
			if _, open := OpenData(root, path, true); !errdefs.IsFailedPrecondition(open) || err != nil && !errdefs.IsFailedPrecondition(err) {
				t.Errorf("%s: made %v, opened %v", what, err, open)
			}
		} else if _, err := OpenData(root, path, true); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, path := range []string{outside, outside + "-new"} {
		if err := CreateData(root, path, size); !errdefs.IsInvalid(err) {
			t.Errorf("outside: %v", err)
		}
		if _, err := OpenData(root, path, true); !errdefs.IsInvalid(err) {
			t.Errorf("outside: %v", err)
		}
	}
	if _, err := os.Lstat(outside + "-new"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a link has made a file: %v", err)
	}
}

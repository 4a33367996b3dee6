package cocoond

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume/hostmount"
)

// A daemon that was killed before it mounted a volume has left the folder. It does not keep the container from ending; a file that
// nobody knows does, and stays.
func TestFolderOfAMountThatWasInterrupted(t *testing.T) {
	root := t.TempDir()
	mounter, err := hostmount.New(hostmount.Config{Dir: root, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	m := mounts{mounter, root}
	for range 2 {
		id := vm.NewID()
		dir := filepath.Join(root, string(id))
		if err := os.MkdirAll(filepath.Join(dir, "data"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := m.Unmount(t.Context(), id); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the folder is left: %v", err)
		}
		if err := m.Unmount(t.Context(), id); err != nil {
			t.Errorf("again: %v", err)
		}
		file := filepath.Join(dir, "data/file")
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, []byte("x"), 0o600)); err != nil {
			t.Fatal(err)
		}
		if err := m.Unmount(t.Context(), id); err == nil {
			t.Error("a folder with a file is gone")
		}
		if _, err := os.Stat(file); err != nil {
			t.Error(err)
		}
	}
}

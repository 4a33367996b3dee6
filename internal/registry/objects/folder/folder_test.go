package folder_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/objects"
	"cocoonstack.io/cocoon/internal/registry/objects/folder"
	"cocoonstack.io/cocoon/internal/registry/objects/objectstest"
)

func TestStore(t *testing.T) {
	objectstest.Run(t, func(t *testing.T) objects.Store {
		s, err := folder.New(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}

func TestFolderOfAnyName(t *testing.T) {
	for _, dir := range []string{".", "d", "./data/", "../up"} {
		t.Run(dir, func(t *testing.T) {
			within := filepath.Join(t.TempDir(), "here")
			if err := os.Mkdir(within, 0o700); err != nil {
				t.Fatal(err)
			}
			t.Chdir(within)
			s, err := folder.New(dir)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Write(t.Context(), "a/b/c", []byte("text")); err != nil {
				t.Fatal(err)
			}
			if err := s.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Stat(t.Context(), "a/b/c"); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestNobodyElseReadsIt(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	if _, err := folder.Open(dir); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("no data: %v", err)
	}
	s, err := folder.New(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Write(t.Context(), "a/b", []byte("secret")); err != nil {
		t.Fatal(err)
	}
	if err := s.Write(t.Context(), "a/c", nil); err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err == nil && fi.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s is %s", path, fi.Mode())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := folder.Open(dir); err != nil {
		t.Error(err)
	}
}

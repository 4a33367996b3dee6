package file_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/file"
	"cocoonstack.io/cocoon/internal/volume/volumetest"
)

const mib = volumetest.MiB

func open(t testing.TB, dir string) *file.Store {
	t.Helper()
	s, err := file.New(context.Background(), file.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// reopen ends a store and opens its folder again.
func reopen(t testing.TB, s *file.Store, dir string) *file.Store {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return open(t, dir)
}

func create(t testing.TB, s *file.Store, name string) volume.Volume {
	t.Helper()
	v, err := s.Create(t.Context(), volume.Spec{Name: name, Size: mib})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestStore(t *testing.T) {
	dirs := map[volume.Store]string{}
	start := func(t *testing.T, dir string) volume.Store {
		s := open(t, dir)
		dirs[s] = dir
		return s
	}
	volumetest.Run(t, func(t *testing.T) volume.Store { return start(t, filepath.Join(t.TempDir(), "store")) }, func(t *testing.T, s volume.Store) volume.Store {
		if c, ok := s.(io.Closer); !ok || c.Close() != nil {
			t.Fatal("it cannot be closed")
		}
		return start(t, dirs[s])
	})
}

func TestOneProcessHasTheStore(t *testing.T) {
	dir := t.TempDir()
	first := open(t, dir)
	if _, err := file.New(t.Context(), file.Config{Dir: dir}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a second process: %v", err)
	}
	reopen(t, first, dir)
	if _, err := file.New(t.Context(), file.Config{Dir: "relative"}); !errdefs.IsInvalid(err) {
		t.Errorf("a relative folder: %v", err)
	}
}

func TestModes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := open(t, dir)
	create(t, s, "one")
	if _, err := s.Snapshot(t.Context(), "one", volume.Spec{Name: "x"}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Restore(t.Context(), "one", "x"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Attach(t.Context(), "one", vm.NewID(), volume.Mode{}); err != nil {
		t.Fatal(err)
	}
	files := 0
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		files++
		if want := map[bool]fs.FileMode{true: 0o700, false: 0o600}[e.IsDir()]; info.Mode().Perm() != want {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		return nil
	})
	if err != nil || files != 10 {
		t.Errorf("%d files, %v", files, err)
	}
}

// TestHolesStay checks that empty parts take no space and are not read.
func TestHolesStay(t *testing.T) {
	s := open(t, t.TempDir())
	if _, err := s.Create(t.Context(), volume.Spec{Name: "huge", Size: 1 << 40}); err != nil {
		t.Fatal(err)
	}
	user := vm.NewID()
	_, disk, err := s.Attach(t.Context(), "huge", user, volume.Mode{})
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(disk.Path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt([]byte("far"), 1<<39)
	if err := errors.Join(err, f.Close(), s.Detach(t.Context(), "huge", user)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Clone(t.Context(), "huge", volume.Spec{Name: "copy"}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Snapshot(t.Context(), "huge", volume.Spec{Name: "x"}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Restore(t.Context(), "copy", "x"); err != nil {
		t.Fatal(err)
	}
	content := make([]byte, 16*mib)
	copy(content[8*mib:], "text")
	if _, err := s.Import(t.Context(), volume.Spec{Name: "imported"}, bytes.NewReader(content), nil); err != nil {
		t.Fatal(err)
	}
	all, err := s.Usage(t.Context())
	if err != nil || len(all) != 3 {
		t.Fatalf("usage is %+v, %v", all, err)
	}
	for id, u := range all {
		if u.Allocated < sparse.Block || u.Allocated > mib {
			t.Errorf("volume %s uses %d bytes of %d", id, u.Allocated, u.Size)
		}
	}
}

// TestExportStops checks that an export ends with its context, and when the other side fails.
func TestExportStops(t *testing.T) {
	s := open(t, t.TempDir())
	if _, err := s.Create(t.Context(), volume.Spec{Name: "huge", Size: 1 << 40}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err := s.Export(ctx, "huge", writerFunc(func(p []byte) (int, error) { cancel(); return len(p), nil }))
	if !errdefs.Is(err, errdefs.Canceled) {
		t.Error(err)
	}
	broken := errdefs.Unavailablef("broken pipe")
	if err := s.Export(t.Context(), "huge", writerFunc(func([]byte) (int, error) { return 0, broken })); !errors.Is(err, broken) {
		t.Error(err)
	}
	if _, _, err := s.Attach(t.Context(), "huge", vm.NewID(), volume.Mode{}); err != nil {
		t.Errorf("after both: %v", err)
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// TestAsMuchAsTheFileSystemHolds: a file system without room for the size is no internal error.
func TestAsMuchAsTheFileSystemHolds(t *testing.T) {
	s := open(t, t.TempDir())
	_, err := s.Create(t.Context(), volume.Spec{Name: "huge", Size: volume.MaxSize})
	if err != nil && !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Error(err)
	}
	create(t, s, "small")
	if _, err := s.Resize(t.Context(), "small", volume.MaxSize); err != nil && !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Error(err)
	}
}

func BenchmarkList200(b *testing.B) {
	s, err := file.New(context.Background(), file.Config{Dir: b.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	for range 200 {
		if _, err := s.Create(b.Context(), volume.Spec{Size: mib}); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		if all, err := s.List(b.Context()); err != nil || len(all) != 200 {
			b.Fatal(len(all), err)
		}
	}
}

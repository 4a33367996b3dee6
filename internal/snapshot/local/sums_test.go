package local_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/local"
	"cocoonstack.io/cocoon/internal/snapshot/snapshottest"
	"cocoonstack.io/cocoon/internal/sparse"
)

// spoil changes a byte of a file in place, as a faulty disk does: the file times stay the same.
func spoil(t *testing.T, path string, at int64) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [1]byte
	_, err = f.ReadAt(b[:], at)
	b[0] ^= 0x10
	if _, werr := f.WriteAt(b[:], at); err != nil || werr != nil {
		t.Fatal(err, werr)
	}
	if err := os.Chtimes(path, info.ModTime(), info.ModTime()); err != nil {
		t.Fatal(err)
	}
}

func hold(t *testing.T, s *local.Store, name string) snapshot.Held {
	t.Helper()
	h, err := s.Hold(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Release)
	return h
}

func read(t *testing.T, h snapshot.Held, name string) error {
	t.Helper()
	f, err := h.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	m, err := f.Extents()
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, sparse.Reader(f, m))
	return err
}

func lost(t *testing.T, what string, err error, file string) {
	t.Helper()
	if !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), file) {
		t.Errorf("%s: %v, want data loss of %s", what, err, file)
	}
}

func TestDamagedMemoryIsNeverRead(t *testing.T) {
	s, g := open(t, t.TempDir()), snapshottest.NewGuest(t)
	if one := snapshottest.Save(t, s, g, "one"); !one.Summed {
		t.Fatal("it has no checksums")
	}
	saveDelta(t, s, g, "two", "two", "one")
	for _, name := range []string{"one", "two"} {
		if err := errors.Join(read(t, hold(t, s, name), snapshot.FileMemory), read(t, hold(t, s, name), snapshot.FileState)); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	two := hold(t, s, "two")
	spoil(t, filepath.Join(two.Dir(), snapshot.FileBase), snapshottest.Memory/2+3)
	lost(t, "its base", read(t, two, snapshot.FileMemory), snapshot.FileBase)
	lost(t, "the base itself", read(t, hold(t, s, "one"), snapshot.FileMemory), snapshot.FileMemory)
	lost(t, "export", s.Export(t.Context(), two, io.Discard), snapshot.FileBase)
	lost(t, "export to a folder", s.ExportDir(t.Context(), two, filepath.Join(t.TempDir(), "d")), snapshot.FileBase)
	spoil(t, filepath.Join(two.Dir(), snapshot.FileState), 2)
	lost(t, "its devices", read(t, two, snapshot.FileState), snapshot.FileState)
	if _, err := s.Get(t.Context(), "two"); err != nil {
		t.Errorf("it is gone: %v", err)
	}
}

// TestDamagedLayers: a layer is verified once, even if it is in several snapshots.
func TestDamagedLayers(t *testing.T) {
	dir, g := t.TempDir(), snapshottest.NewGuest(t)
	s := open(t, dir)
	one := snapshottest.Save(t, s, g, "one")
	file := one.Disks[1].Layers[0].File
	path := filepath.Join(hold(t, s, "one").Dir(), file)
	sums, err := os.Stat(path + sparse.SumSuffix)
	if err != nil {
		t.Fatal(err)
	}
	snapshottest.Save(t, s, g, "two")
	shared, err := os.Stat(filepath.Join(hold(t, s, "two").Dir(), file+sparse.SumSuffix))
	if err != nil || !os.SameFile(sums, shared) {
		t.Errorf("a layer of both is summed twice, %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	if err := hold(t, s, "one").Verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	spoil(t, path, 17)
	if err := hold(t, s, "two").Verify(t.Context()); err != nil { // it was verified since the store was opened
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	lost(t, "in the next life", hold(t, s, "two").Verify(t.Context()), file)
	lost(t, "and in the other", hold(t, s, "one").Verify(t.Context()), file)
}

// TestLargeLayersAreComparedLater: no caller waits for them, and later callers get the result.
func TestLargeLayersAreComparedLater(t *testing.T) {
	dir, g := t.TempDir(), snapshottest.NewGuest(t)
	s := open(t, dir)
	one := snapshottest.Save(t, s, g, "one")
	path := filepath.Join(hold(t, s, "one").Dir(), one.Disks[1].Layers[0].File)
	spoil(t, path, 17)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	defer local.SetScrubNow(0)()
	s = open(t, dir)
	if err := hold(t, s, "one").Verify(t.Context()); err != nil {
		t.Errorf("somebody waited: %v", err)
	}
	var err error
	for err == nil && t.Context().Err() == nil {
		err = hold(t, s, "one").Verify(t.Context())
	}
	lost(t, "later", err, filepath.Base(path))
}

func TestSnapshotsOfBeforeHaveNoSums(t *testing.T) {
	dir, g := t.TempDir(), snapshottest.NewGuest(t)
	s := open(t, dir)
	one := snapshottest.Save(t, s, g, "one")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	sums, err := filepath.Glob(filepath.Join(dir, one.ID, "*"+sparse.SumSuffix))
	if err != nil || len(sums) != len(one.Files()) {
		t.Fatalf("%v, %v", sums, err)
	}
	for _, f := range sums {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	meta := filepath.Join(dir, one.ID, snapshot.FileMeta)
	text, err := os.ReadFile(meta)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(meta, bytes.Replace(text, []byte(`"summed": true,`), nil, 1), 0o600); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	h := hold(t, s, "one")
	if err := errors.Join(h.Verify(t.Context()), read(t, h, snapshot.FileMemory)); err != nil || h.Snapshot().Summed {
		t.Errorf("%v", err)
	}
	saveDelta(t, s, g, "two", "two", "one") // its base gets checksums now
	if err := read(t, hold(t, s, "two"), snapshot.FileMemory); err != nil {
		t.Error(err)
	}
}

// TestFoldersCarrySums: a snapshot in a folder is verified like one in the store.
func TestFoldersCarrySums(t *testing.T) {
	s, g := open(t, t.TempDir()), snapshottest.NewGuest(t)
	snapshottest.Save(t, s, g, "one")
	saveDelta(t, s, g, "two", "two", "one")
	for n, name := range []string{"one", "two"} {
		dir := filepath.Join(t.TempDir(), "d")
		if err := s.ExportDir(t.Context(), hold(t, s, name), dir); err != nil {
			t.Fatal(err)
		}
		h, err := s.HoldDir(t.Context(), dir)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(h.Verify(t.Context()), read(t, h, snapshot.FileMemory)); err != nil || !h.Snapshot().Summed {
			t.Error(err)
		}
		memory := filepath.Join(dir, snapshot.FileMemory)
		if n == 0 { // replace the link to the store's file by a copy
			if err := errors.Join(os.Rename(memory, memory+".old"), sparse.CopyFile(t.Context(), memory, memory+".old"), os.Remove(memory+".old")); err != nil {
				t.Fatal(err)
			}
		}
		spoil(t, memory, snapshottest.Memory/2)
		lost(t, name, read(t, h, snapshot.FileMemory), snapshot.FileMemory)
		if _, err := s.ImportDir(t.Context(), "from-"+name, "", dir); err != nil {
			t.Fatal(err)
		}
		lost(t, name+" imported", read(t, hold(t, s, "from-"+name), snapshot.FileMemory), snapshot.FileMemory)
	}
}

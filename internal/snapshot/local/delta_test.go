package local_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/local"
	"cocoonstack.io/cocoon/internal/snapshot/snapshottest"
	"cocoonstack.io/cocoon/internal/sparse"
)

// saveDelta saves a snapshot whose memory has one different word and otherwise equals that of the snapshot on.
func saveDelta(t *testing.T, s *local.Store, g *snapshottest.Guest, name, word, on string) snapshot.Snapshot {
	t.Helper()
	d, snap := snapshottest.Begin(t, s, g, name)
	base, err := d.Base(t.Context(), "nosuch", on)
	if err != nil || base == "" {
		t.Fatalf("Base = %q, %v", base, err)
	}
	f, err := os.Create(filepath.Join(d.Dir(), snapshot.FileMemory))
	if err != nil {
		t.Fatal(err)
	}
	own := sparse.NewPages(snapshottest.Memory)
	own.Set(3)
	_, err = f.WriteAt([]byte(word), 3*sparse.Block)
	err = errors.Join(err, f.Truncate(snapshottest.Memory), sparse.EndDelta(f, snapshottest.Memory, own), f.Close())
	if err != nil {
		t.Fatal(err)
	}
	snap.MemoryBase = base
	if snap, err = d.Commit(t.Context(), snap); err != nil {
		t.Fatal(err)
	}
	return snap
}

// remembers checks that the memory of a snapshot contains word.
func remembers(t *testing.T, h snapshot.Held, word string) {
	t.Helper()
	f, err := h.Open(snapshot.FileMemory)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := make([]byte, snapshottest.Memory)
	copy(want[snapshottest.Memory/2:], "memory")
	copy(want[3*sparse.Block:], word)
	got, err := io.ReadAll(io.NewSectionReader(f, 0, snapshottest.Memory+1))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%s: %d bytes are not its memory, %v", h.Snapshot().Name, len(got), err)
	}
}

// TestMemoryDelta stores memory as a delta to another snapshot, which is then removed. Exports contain the whole
// memory.
func TestMemoryDelta(t *testing.T) {
	s, err := local.New(local.Config{Dir: filepath.Join(t.TempDir(), "snapshots")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	g := snapshottest.NewGuest(t)
	first := snapshottest.Save(t, s, g, "first")
	second := saveDelta(t, s, g, "second", "two", "first")
	third := saveDelta(t, s, g, "third", "three", "second")
	if second.MemoryBase != first.ID || third.MemoryBase != first.ID {
		t.Errorf("bases %q and %q, want %q", second.MemoryBase, third.MemoryBase, first.ID)
	}
	for _, name := range []string{"first", "second"} {
		if err := s.Remove(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil { // only the data on disk must count
		t.Fatal(err)
	}
	h, err := s.Hold(t.Context(), "third")
	if err != nil {
		t.Fatal(err)
	}
	remembers(t, h, "three")
	dir := filepath.Join(t.TempDir(), "exported")
	if err := s.ExportDir(t.Context(), h, dir); err != nil {
		t.Fatal(err)
	}
	var stream bytes.Buffer
	if err := s.Export(t.Context(), h, &stream); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ImportDir(t.Context(), "from-dir", "", dir); err != nil {
		t.Error(err)
	}
	if _, err := s.Import(t.Context(), "from-tar", "", &stream, nil); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"from-dir", "from-tar"} {
		h, err := s.Hold(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		remembers(t, h, "three")
		info, err := os.Stat(filepath.Join(h.Dir(), snapshot.FileMemory))
		if x := h.Snapshot(); err != nil || x.MemoryBase != "" || info.Size() != snapshottest.Memory {
			t.Errorf("%s is not whole: %v", name, err)
		}
		h.Release()
	}
	h.Release()

	t.Run("no base", func(t *testing.T) { // an unused base is removed
		d, snap := snapshottest.Begin(t, s, g, "whole")
		if id, err := d.Base(t.Context(), "third"); id != first.ID || err != nil {
			t.Fatalf("Base = %q, %v", id, err)
		}
		if snap, err = d.Commit(t.Context(), snap); err != nil {
			t.Fatal(err)
		}
		h, err := s.Hold(t.Context(), snap.ID)
		if err != nil {
			t.Fatal(err)
		}
		defer h.Release()
		if _, err := os.Stat(filepath.Join(h.Dir(), snapshot.FileBase)); err == nil {
			t.Error("a whole memory keeps another one")
		}
	})
	for name, spoil := range map[string]func(dir string) error{
		"base is gone": func(dir string) error { return os.Remove(filepath.Join(dir, snapshot.FileBase)) },
		"base is shorter": func(dir string) error {
			return os.Truncate(filepath.Join(dir, snapshot.FileBase), snapshottest.Memory/2)
		},
		"map is gone": func(dir string) error {
			return os.Truncate(filepath.Join(dir, snapshot.FileMemory), snapshottest.Memory)
		},
		"map is damaged": func(dir string) error {
			f, err := os.OpenFile(filepath.Join(dir, snapshot.FileMemory), os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteAt([]byte{0xff}, snapshottest.Memory)
			return errors.Join(err, f.Close())
		},
	} {
		t.Run(name, func(t *testing.T) {
			whole := snapshottest.Save(t, s, g, "base-of-it")
			x := saveDelta(t, s, g, "spoilt", "four", whole.ID)
			if err := errors.Join(s.Remove(t.Context(), whole.ID), spoil(filepath.Join(filepath.Dir(h.Dir()), x.ID))); err != nil {
				t.Fatal(err)
			}
			if h, err := s.Hold(t.Context(), x.ID); err == nil {
				h.Release()
				t.Error("held")
			} else if c := errdefs.ClassOf(err); c != errdefs.DataLoss && c != errdefs.InvalidArgument {
				t.Error(err)
			}
			if err := s.Remove(t.Context(), x.ID); err != nil {
				t.Error(err)
			}
		})
	}
}

//go:build vm

package local_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/snapshottest"
)

// TestVMDiskFull needs its own file system, therefore it runs in the namespace of this test tier.
func TestVMDiskFull(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=16m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	store := filepath.Join(dir, "snapshots")
	s := open(t, store)
	// The stream comes from another disk, and is larger than this one.
	elsewhere := open(t, t.TempDir())
	d, snap := snapshottest.Begin(t, elsewhere, snapshottest.NewGuest(t), "large")
	noise := make([]byte, 24<<20)
	_, _ = rand.Read(noise)
	snap.Memory = int64(len(noise))
	if err := os.WriteFile(filepath.Join(d.Dir(), snapshot.FileMemory), noise, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Commit(t.Context(), snap); err != nil {
		t.Fatal(err)
	}
	h, err := elsewhere.Hold(t.Context(), "large")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Release()
	var stream bytes.Buffer
	if err := elsewhere.Export(t.Context(), h, &stream); err != nil {
		t.Fatal(err)
	}
	exported := filepath.Join(t.TempDir(), "exported")
	if err := elsewhere.ExportDir(t.Context(), h, exported); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(dir, "other")
	fill := func() {
		f, err := os.Create(other)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := io.Copy(f, rand.Reader); err == nil {
			t.Fatal("the disk did not get full")
		}
	}
	for name, do := range map[string]func() error{
		"larger than the disk": func() error {
			_, err := s.Import(t.Context(), "x", "", bytes.NewReader(stream.Bytes()), nil)
			return err
		},
		"folder": func() error { _, err := s.ImportDir(t.Context(), "x", "", exported); return err },
		"full in the middle": func() error {
			small := snapshottest.Save(t, elsewhere, snapshottest.NewGuest(t), "small")
			h, err := elsewhere.Hold(t.Context(), small.ID)
			if err != nil {
				t.Fatal(err)
			}
			defer h.Release()
			var stream bytes.Buffer
			if err := elsewhere.Export(t.Context(), h, &stream); err != nil {
				t.Fatal(err)
			}
			filled := false
			_, err = s.Import(t.Context(), "x", "", &stream, func(int64) {
				if !filled {
					filled = true
					fill()
				}
			})
			return errors.Join(err, os.Remove(other))
		},
		"full before a save": func() error {
			fill()
			d, err := s.Create(t.Context(), "x")
			if err == nil {
				err = d.Discard()
				if err == nil {
					err = errdefs.Exhaustedf("an empty folder needs no room here")
				}
			}
			return errors.Join(err, os.Remove(other))
		},
		"full at the end of a save": func() error {
			d, err := s.Create(t.Context(), "x")
			if err != nil {
				t.Fatal(err)
			}
			fill()
			_, err = d.Commit(t.Context(), snapshot.Snapshot{})
			return errors.Join(err, d.Discard(), os.Remove(other))
		},
	} {
		if err := do(); !errdefs.Is(err, errdefs.ResourceExhausted) {
			t.Errorf("%s: %v (%s)", name, err, errdefs.ClassOf(err))
		}
		left, _ := filepath.Glob(filepath.Join(store, "tmp/*"))
		all, err := s.List(t.Context())
		if len(left) > 0 || err != nil || len(all) > 0 {
			t.Errorf("%s: left behind: %v, %v, %v", name, left, all, err)
		}
	}
	snapshottest.Save(t, s, snapshottest.NewGuest(t), "x") // there is free space again
}

package local_test

import (
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/local"
	"cocoonstack.io/cocoon/internal/snapshot/snapshottest"
)

// Memory of the benchmarks' guest, in bytes: 1 GiB, a quarter of it used, in pieces of 1 MiB.
const (
	benchMemory = 1 << 30
	benchData   = benchMemory / 4
)

func large(b *testing.B, s *local.Store) snapshot.Held {
	b.Helper()
	d, snap := snapshottest.Begin(b, s, snapshottest.NewGuest(b), "large")
	f, err := os.OpenFile(filepath.Join(d.Dir(), snapshot.FileMemory), os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(benchMemory); err != nil {
		b.Fatal(err)
	}
	piece, noise := make([]byte, 1<<20), rand.NewChaCha8([32]byte{})
	for off := int64(0); off < benchMemory; off += 4 << 20 {
		_, _ = noise.Read(piece)
		if _, err := f.WriteAt(piece, off); err != nil {
			b.Fatal(err)
		}
	}
	snap.Memory = benchMemory
	if _, err := d.Commit(b.Context(), snap); err != nil {
		b.Fatal(err)
	}
	h, err := s.Hold(b.Context(), "large")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(h.Release)
	return h
}

// BenchmarkExport exports a snapshot to a writer that discards it.
func BenchmarkExport(b *testing.B) {
	s := open(b, b.TempDir())
	h := large(b, s)
	b.SetBytes(benchData)
	for b.Loop() {
		if err := s.Export(b.Context(), h, io.Discard); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkImport imports such a stream from a file into another store, durable and verified.
func BenchmarkImport(b *testing.B) {
	from, to := open(b, b.TempDir()), open(b, b.TempDir())
	f, err := os.Create(filepath.Join(b.TempDir(), "stream"))
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	if err := from.Export(b.Context(), large(b, from), f); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(benchData)
	for b.Loop() {
		_, err := f.Seek(0, io.SeekStart)
		if err == nil {
			_, err = to.Import(b.Context(), "", "", f, nil)
		}
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := to.Remove(b.Context(), "large"); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// BenchmarkImportDir registers a folder.
func BenchmarkImportDir(b *testing.B) {
	s := open(b, b.TempDir())
	h := large(b, s)
	dir := filepath.Join(b.TempDir(), "exported")
	if err := s.ExportDir(b.Context(), h, dir); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := s.ImportDir(b.Context(), "again", "", dir); err != nil {
			b.Fatal(err)
		}
		if err := s.Remove(b.Context(), "again"); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCopy is the baseline for BenchmarkImport: the files copied by cp, and synced.
func BenchmarkCopy(b *testing.B) {
	s := open(b, b.TempDir())
	h := large(b, s)
	dir := b.TempDir()
	b.SetBytes(benchData)
	for b.Loop() {
		to := filepath.Join(dir, "copy")
		if out, err := exec.Command("sh", "-c", `cp -r --sparse=always "$1" "$2" && sync "$2"/*`, "sh", h.Dir(), to).CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, out)
		}
		b.StopTimer()
		if err := os.RemoveAll(to); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// BenchmarkDisks makes the disks of a clone.
func BenchmarkDisks(b *testing.B) {
	s := open(b, b.TempDir())
	g := snapshottest.NewGuest(b)
	base := g.Disks
	snapshottest.Save(b, s, g, "template")
	h, err := s.Hold(b.Context(), "template")
	if err != nil {
		b.Fatal(err)
	}
	defer h.Release()
	root := b.TempDir()
	for b.Loop() {
		dir, err := os.MkdirTemp(root, "")
		if err != nil {
			b.Fatal(err)
		}
		if _, err := s.Disks(b.Context(), h, base, dir, 0); err != nil {
			b.Fatal(err)
		}
	}
}

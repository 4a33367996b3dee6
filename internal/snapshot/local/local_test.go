package local_test

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/local"
	"cocoonstack.io/cocoon/internal/snapshot/snapshottest"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/vm"
)

func open(t testing.TB, dir string) *local.Store {
	t.Helper()
	s, err := local.New(local.Config{Dir: dir, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	if err := s.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestStore(t *testing.T) {
	snapshottest.Run(t, func(t *testing.T) snapshot.Store { return open(t, t.TempDir()) })
}

func TestOneProcessHasTheStore(t *testing.T) {
	dir := t.TempDir()
	first := open(t, dir)
	second, err := local.New(local.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Open(t.Context()); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a second process: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if err := second.Open(t.Context()); err != nil {
		t.Error(err)
	}
	_ = second.Close()
	if _, err := local.New(local.Config{Dir: "relative"}); !errdefs.IsInvalid(err) {
		t.Errorf("a relative folder: %v", err)
	}
}

func TestEverythingIsThereAfterARestart(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	saved := snapshottest.Save(t, s, snapshottest.NewGuest(t), "kept")
	h, err := s.Hold(t.Context(), "kept")
	if err != nil {
		t.Fatal(err)
	}
	h.Release()
	d, _ := snapshottest.Begin(t, s, snapshottest.NewGuest(t), "unfinished")
	unfinished := d.Dir()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	got, err := s.Get(t.Context(), "kept")
	if err != nil || got.ID != saved.ID || got.Size != saved.Size || got.UsedAt.Before(saved.CreatedAt) {
		t.Errorf("it is %+v, %v", got, err)
	}
	if _, err := os.Stat(unfinished); !os.IsNotExist(err) {
		t.Errorf("a draft of before: %v", err)
	}
	snapshottest.Save(t, s, snapshottest.NewGuest(t), "unfinished")
}

func TestModes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "snapshots")
	s := open(t, dir)
	snapshottest.Save(t, s, snapshottest.NewGuest(t), "one")
	err := filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		if err != nil {
			return err
		}
		if want := map[bool]os.FileMode{true: 0o700, false: 0o600}[info.IsDir()]; info.Mode().Perm() != want {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestDamagedSnapshotsBlockNoOther(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	for _, name := range []string{"good", "cut", "lost", "moved", "same"} {
		snapshottest.Save(t, s, snapshottest.NewGuest(t), name)
	}
	record := func(name string) string {
		snap, err := s.Get(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		return filepath.Join(dir, snap.ID, snapshot.FileMeta)
	}
	cut, lost, moved, same := record("cut"), record("lost"), record("moved"), record("same")
	text, err := os.ReadFile(same)
	if err != nil {
		t.Fatal(err)
	}
	for path, text := range map[string]string{cut: "{", moved: string(text), same: strings.Replace(string(text), `"name": "same"`, `"name": "good"`, 1)} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(lost); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "notes"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "tmp", "somebody"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	all, err := s.List(t.Context())
	if err != nil || len(all) != 1 || all[0].Name != "good" { // or the one that took its name, whichever was read first
		t.Fatalf("list is %+v, %v", all, err)
	}
	for _, path := range []string{cut, lost, moved} {
		id := filepath.Base(filepath.Dir(path))
		if _, err := s.Get(t.Context(), id); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s: %v", id, err)
		}
		if _, err := s.Hold(t.Context(), id); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("hold %s: %v", id, err)
		}
		if err := s.Remove(t.Context(), id); err != nil {
			t.Errorf("remove %s: %v", id, err)
		}
		if _, err := os.Stat(filepath.Dir(path)); !os.IsNotExist(err) {
			t.Errorf("%s: %v", id, err)
		}
	}
	for _, kept := range []string{"notes", "tmp/somebody"} {
		if _, err := os.Stat(filepath.Join(dir, kept)); err != nil {
			t.Errorf("what is not ours: %v", err)
		}
	}
}

// TestAnotherFileSystem puts the VMs' folders on another file system: files are copied where links are impossible.
func TestAnotherFileSystem(t *testing.T) {
	far := func() string {
		dir, err := os.MkdirTemp("/dev/shm", "snapshot")
		if err != nil {
			t.Skip("no second file system: ", err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		return dir
	}
	s := open(t, t.TempDir())
	g, err := snapshottest.MakeGuest(far(), far())
	if err != nil {
		t.Fatal(err)
	}
	base := slices.Clone(g.Disks)
	snapshottest.Save(t, s, g, "copied")
	h, err := s.Hold(t.Context(), "copied")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Release()
	dir := far()
	var first []vm.Disk
	for range 2 {
		disks, err := s.Disks(t.Context(), h, base, dir, 0)
		if err != nil {
			t.Fatal(err)
		}
		if d := diff.Of(first, disks); first != nil && d != "" {
			t.Errorf("the second time: %s", d)
		}
		first = disks
	}
	if data, err := os.ReadFile(first[1].Backing.Backing.Path); err != nil || len(data) != snapshottest.Storage || !strings.HasPrefix(string(data), "empty file system") {
		t.Errorf("the layer has %d bytes, %v", len(data), err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 3 {
		t.Errorf("the folder holds %v, %v", left, err)
	}
	exported := filepath.Join(far(), "exported")
	if err := s.ExportDir(t.Context(), h, exported); err != nil {
		t.Fatal(err)
	}
	if got, err := s.ImportDir(t.Context(), "again", "", exported); err != nil || got.Size > 1<<20 {
		t.Errorf("imported as %+v, %v", got, err)
	}
}

func TestMissingFilesAreNoticed(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	snap := snapshottest.Save(t, s, snapshottest.NewGuest(t), "lost")
	if err := os.Remove(filepath.Join(dir, snap.ID, snapshot.FileMemory)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Hold(t.Context(), "lost"); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("got %v", err)
	}
	if err := s.Remove(t.Context(), "lost"); err != nil { // nothing holds it
		t.Error(err)
	}
}

// TestLeftoversKeepNoStoreFromOpening: a VM can write to the draft of its snapshot. A store whose process has died opens, with however many levels in a draft, and when a
// draft cannot be removed.
func TestLeftoversKeepNoStoreFromOpening(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	s := open(t, dir)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	deep, stuck := string(vm.NewID()), string(vm.NewID())
	if err := os.MkdirAll(filepath.Join(dir, "tmp", deep, "memory.saving"+strings.Repeat("/d", 100)), 0o700); err != nil {
		t.Fatal(err)
	}
	kept := filepath.Join(dir, "tmp", stuck, "kept")
	if err := errors.Join(os.MkdirAll(kept, 0o700), unix.Mount("ramfs", kept, "ramfs", 0, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(kept, unix.MNT_DETACH) })

	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	err := s.Open(t.Context())
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(filepath.Join(dir, "tmp"))
	if err != nil || len(left) != 1 || left[0].Name() != stuck {
		t.Errorf("left: %v, %v", left, err)
	}
	if err := errors.Join(unix.Unmount(kept, 0), s.Close(), s.Open(t.Context())); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(filepath.Join(dir, "tmp")); err != nil || len(left) > 0 {
		t.Errorf("left when it can be removed: %v, %v", left, err)
	}
}

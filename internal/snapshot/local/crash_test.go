package local_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/snapshot/local"
	"cocoonstack.io/cocoon/internal/snapshot/snapshottest"
)

// With this variable set, the test binary uses the store in the folder as a daemon does, in an endless loop, until it
// is killed.
const childDir = "COCOON_TEST_SNAPSHOT_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		err := live(context.Background(), dir)
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// live runs the life cycle of snapshots until something fails.
func live(ctx context.Context, dir string) error {
	s, err := local.New(local.Config{Dir: filepath.Join(dir, "snapshots")})
	if err != nil {
		return err
	}
	if err := s.Open(ctx); err != nil {
		return err
	}
	all, err := s.List(ctx)
	if err != nil {
		return err
	}
	for _, snap := range all { // left by the previous process
		if err := s.Remove(ctx, snap.ID); err != nil {
			return err
		}
	}
	for n := 0; ; n++ {
		if err := round(ctx, s, filepath.Join(dir, "vms")); err != nil {
			return err
		}
	}
}

func round(ctx context.Context, s *local.Store, vms string) error {
	dir, err := os.MkdirTemp(vms, "")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	image := filepath.Join(dir, "image")
	if err := os.Mkdir(image, 0o700); err != nil {
		return err
	}
	g, err := snapshottest.MakeGuest(dir, image)
	if err != nil {
		return err
	}
	d, snap, err := snapshottest.Fill(ctx, s, g, "saved")
	if err != nil {
		return err
	}
	if _, err := d.Commit(ctx, snap); err != nil {
		return err
	}
	h, err := s.Hold(ctx, "saved")
	if err != nil {
		return err
	}
	defer h.Release()
	var stream bytes.Buffer
	if err := s.Export(ctx, h, &stream); err != nil {
		return err
	}
	if _, err := s.Import(ctx, "imported", "", &stream, nil); err != nil {
		return err
	}
	exported := filepath.Join(dir, "exported")
	if err := s.ExportDir(ctx, h, exported); err != nil {
		return err
	}
	if _, err := s.ImportDir(ctx, "folder", "", exported); err != nil {
		return err
	}
	_, err = s.Update(ctx, "imported", func(x *snapshot.Snapshot) { x.Digest = "sha256:1" })
	h.Release()
	return errors.Join(err, s.Remove(ctx, "saved"), s.Remove(ctx, "imported"), s.Remove(ctx, "folder"))
}

// sound checks that the store holds only complete snapshots.
func sound(t *testing.T, dir string) {
	t.Helper()
	s := open(t, dir)
	defer s.Close()
	all, err := s.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, snap := range all {
		h, err := s.Hold(t.Context(), snap.ID)
		if err != nil {
			t.Errorf("%s: %v", snap.Name, err)
			continue
		}
		if err := s.Export(t.Context(), h, io.Discard); err != nil {
			t.Errorf("%s survived and is not whole: %v", snap.Name, err)
		}
		data, err := os.ReadFile(filepath.Join(h.Dir(), snapshot.FileMemory))
		if err != nil || len(data) != snapshottest.Memory || string(data[snapshottest.Memory/2:][:6]) != "memory" {
			t.Errorf("%s: its memory has %d bytes, %v", snap.Name, len(data), err)
		}
		if err := h.Verify(t.Context()); err != nil {
			t.Errorf("%s: %v", snap.Name, err)
		}
		h.Release()
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != len(all)+4 { // lock, used, tmp, sums
		t.Errorf("the folder holds %v, the list %d, %v", entries, len(all), err)
	}
	if left, err := os.ReadDir(filepath.Join(dir, "tmp")); err != nil || len(left) > 0 {
		t.Errorf("left in tmp: %v, %v", left, err)
	}
}

func TestKilledAnywhereInTheLifeOfSnapshots(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{
		"tmp/*", "tmp/*/vmstate", "tmp/*/memory-ranges", "tmp/*/disk-1.0.raw", "tmp/*/disk-1.1.qcow2", "tmp/*/.snapshot.json.tmp-*", "tmp/*/snapshot.json",
		"??????????????????????????/snapshot.json", "??????????????????????????/.snapshot.json.tmp-*", "used/*", "tmp/*.gone", "tmp/*.gone/disk-1.1.qcow2",
		"tmp/*/vmstate.sum", "tmp/*/disk-1.1.qcow2.sum", "sums/*",
	} {
		t.Run(pattern, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			if err := os.Mkdir(filepath.Join(dir, "vms"), 0o700); err != nil {
				t.Fatal(err)
			}
			for range 3 { // each on the leftovers of the one before
				var said bytes.Buffer
				cmd := exec.Command(self)
				cmd.Env = append(os.Environ(), childDir+"="+dir, "GORACE=atexit_sleep_ms=0")
				cmd.Stdout, cmd.Stderr = &said, &said
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				ended := make(chan struct{})
				go func() { _ = cmd.Wait(); close(ended) }()
				until(t, ended, filepath.Join(dir, "snapshots", pattern))
				_ = cmd.Process.Kill()
				<-ended
				if said.Len() > 0 {
					t.Fatalf("it failed before it was killed: %s", said.String())
				}
				sound(t, filepath.Join(dir, "snapshots"))
			}
		})
	}
}

// until waits until a file matches, the process ends, or a timeout expires: some patterns are hard to observe.
func until(t *testing.T, ended <-chan struct{}, pattern string) {
	t.Helper()
	tick, end := time.NewTicker(50*time.Microsecond), time.NewTimer(3*time.Second)
	defer tick.Stop()
	defer end.Stop()
	for {
		if hits, _ := filepath.Glob(pattern); len(hits) > 0 {
			return
		}
		select {
		case <-ended:
			return
		case <-tick.C:
		case <-end.C:
			t.Log("not seen: ", pattern)
			return
		}
	}
}

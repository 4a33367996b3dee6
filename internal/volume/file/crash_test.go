package file_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/file"
)

// With one of these variables set, the test binary is another process.
const (
	childDir = "COCOON_TEST_VOLUME_DIR"  // uses the store in the folder as a daemon does, in an endless loop, until it is killed
	fullDir  = "COCOON_TEST_VOLUME_FULL" // fills the disk of a store in the folder
)

func TestMain(m *testing.M) {
	var err error
	switch {
	case os.Getenv(childDir) != "":
		err = live(context.Background(), os.Getenv(childDir))
	case os.Getenv(fullDir) != "":
		err = fillDisk(context.Background(), os.Getenv(fullDir))
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// live runs the life cycle of volumes until something fails.
func live(ctx context.Context, dir string) error {
	s, err := file.New(ctx, file.Config{Dir: dir})
	if err != nil {
		return err
	}
	for {
		if err := errors.Join(clean(ctx, s), round(ctx, s)); err != nil {
			return err
		}
	}
}

// clean deletes everything, for example what the previous process left.
func clean(ctx context.Context, s *file.Store) error {
	all, err := s.List(ctx)
	if err != nil {
		return err
	}
	for _, v := range all {
		for _, a := range v.Attachments {
			if err := s.Detach(ctx, string(v.ID), a.VM); err != nil {
				return err
			}
		}
		if err := s.Delete(ctx, string(v.ID)); err != nil {
			return err
		}
	}
	snaps, err := s.Snapshots(ctx)
	if err != nil {
		return err
	}
	for _, x := range snaps {
		if err := s.DeleteSnapshot(ctx, string(x.ID)); err != nil {
			return err
		}
	}
	return nil
}

// The contents of the volumes. Nobody writes in place, so a volume has one of them in full; what is added later is zero.
var contents = [][]byte{bytes.Repeat([]byte("a"), mib), bytes.Repeat([]byte("b"), mib)}

func round(ctx context.Context, s *file.Store) error {
	_, err := s.Create(ctx, volume.Spec{Name: "empty", Size: mib})
	for n, content := range contents {
		name := fmt.Sprint("v", n)
		_, err1 := s.Import(ctx, volume.Spec{Name: name}, bytes.NewReader(content), nil)
		_, err2 := s.Snapshot(ctx, name, volume.Spec{Name: name})
		err = errors.Join(err, err1, err2)
	}
	if err != nil {
		return err
	}
	_, err1 := s.Clone(ctx, "v0", volume.Spec{Name: "clone"})
	_, err2 := s.FromSnapshot(ctx, "v1", volume.Spec{Name: "copy"})
	_, err3 := s.Resize(ctx, "v0", 2*mib)
	_, err4 := s.Update(ctx, "v1", func(v *volume.Volume) { v.Name, v.Labels = "renamed", map[string]string{"k": "v"} })
	_, err5 := s.Restore(ctx, "v0", "v1")
	_, err6 := s.Restore(ctx, "clone", "v1")
	_, _, err7 := s.Attach(ctx, "copy", vm.NewID(), volume.Mode{})
	one, shares := vm.NewID(), volume.Mode{Shared: true}
	_, _, err8 := s.Attach(ctx, "empty", one, shares)
	_, _, err9 := s.Attach(ctx, "empty", vm.NewID(), shares)
	return errors.Join(err1, err2, err3, err4, err5, err6, err7, err8, err9, s.Detach(ctx, "empty", one))
}

// sound checks that the store holds only complete volumes and snapshots, and no other files.
func sound(t *testing.T, dir string) {
	t.Helper()
	s := open(t, dir)
	defer s.Close()
	volumes, err1 := s.List(t.Context())
	snapshots, err2 := s.Snapshots(t.Context())
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	for _, v := range volumes {
		whole(t, "volume "+v.Name, filepath.Join(dir, "volumes", string(v.ID), "data"), v.Size, v.Name == "empty")
		onlyFiles(t, filepath.Join(dir, "volumes", string(v.ID)), "data", "volume.json")
		if want := map[string]int64{"v0": 2 * mib}[v.Name]; v.Size != mib && v.Size != want {
			t.Errorf("volume %s has %d bytes", v.Name, v.Size)
		}
	}
	for _, x := range snapshots {
		whole(t, "snapshot "+x.Name, filepath.Join(dir, "snapshots", string(x.ID), "data"), x.Size, false)
		onlyFiles(t, filepath.Join(dir, "snapshots", string(x.ID)), "data", "snapshot.json")
	}
	onlyFiles(t, dir, "lock", "snapshots", "volumes")
	for sub, n := range map[string]int{"volumes": len(volumes), "snapshots": len(snapshots)} {
		if there, err := os.ReadDir(filepath.Join(dir, sub)); err != nil || len(there) != n {
			t.Errorf("%s has %v, %v; the list has %d", sub, there, err, n)
		}
	}
}

func whole(t *testing.T, what, path string, size int64, empty bool) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil || int64(len(data)) != size || len(data) < mib {
		t.Errorf("%s has %d bytes, %v; its record says %d", what, len(data), err, size)
		return
	}
	is := func(c []byte) bool { return bytes.Equal(data[:mib], c) }
	if !empty && !slices.ContainsFunc(contents, is) || empty && !is(make([]byte, mib)) || !bytes.Equal(data[mib:], make([]byte, len(data)-mib)) {
		t.Errorf("%s survived and is not whole", what)
	}
}

func onlyFiles(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%s has %q, %v; want %q", dir, got, err, want)
	}
}

func TestKilledAnywhereInTheLifeOfVolumes(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	const id = "??????????????????????????"
	for _, pattern := range []string{
		"volumes", "volumes/.draft-*", "volumes/.draft-*/data", "volumes/.draft-*/.volume.json.tmp-*", "volumes/.draft-*/volume.json",
		"volumes/" + id, "volumes/" + id + "/.volume.json.tmp-*", "volumes/" + id + "/.data.tmp-*", "volumes/.gone-*", "volumes/.gone-*/volume.json",
		"snapshots/.draft-*", "snapshots/.draft-*/data", "snapshots/.draft-*/.snapshot.json.tmp-*", "snapshots/" + id, "snapshots/.gone-*",
	} {
		t.Run(pattern, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "store")
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
				until(t, ended, filepath.Join(dir, pattern))
				_ = cmd.Process.Kill()
				<-ended
				if said.Len() > 0 {
					t.Fatalf("it failed before it was killed: %s", said.String())
				}
				sound(t, dir)
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

// TestStatesThatAKillLeaves makes each state between two file operations, so that none depends on luck.
func TestStatesThatAKillLeaves(t *testing.T) {
	for name, c := range map[string]struct {
		leave func(dir, id string) error
		size  int64 // of the volume afterwards
	}{
		"an empty draft": {func(dir, _ string) error {
			return os.Mkdir(filepath.Join(dir, "volumes", ".draft-"+string(vm.NewID())), 0o700)
		}, mib},
		"a whole draft": {func(dir, id string) error {
			return os.CopyFS(filepath.Join(dir, "volumes", ".draft-"+string(vm.NewID())), os.DirFS(filepath.Join(dir, "volumes", id)))
		}, mib},
		"a draft of a snapshot": {func(dir, _ string) error {
			return os.Mkdir(filepath.Join(dir, "snapshots", ".draft-"+string(vm.NewID())), 0o700)
		}, mib},
		"half removed": {func(dir, id string) error {
			gone := filepath.Join(dir, "volumes", ".gone-"+string(vm.NewID()))
			return errors.Join(os.CopyFS(gone, os.DirFS(filepath.Join(dir, "volumes", id))), os.Remove(filepath.Join(gone, "volume.json")))
		}, mib},
		"a new record": {func(dir, id string) error {
			return os.WriteFile(filepath.Join(dir, "volumes", id, ".volume.json.tmp-1"), []byte("{"), 0o600)
		}, mib},
		"bytes of a snapshot": {func(dir, id string) error {
			return os.WriteFile(filepath.Join(dir, "volumes", id, ".data.tmp-1"), contents[1], 0o600)
		}, mib},
		"grown, not recorded": {func(dir, id string) error {
			return os.Truncate(filepath.Join(dir, "volumes", id, "data"), 3*mib)
		}, 3 * mib},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "store")
			s := open(t, dir)
			v, err := s.Import(t.Context(), volume.Spec{Name: "one"}, bytes.NewReader(contents[0]), nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(s.Close(), c.leave(dir, string(v.ID))); err != nil {
				t.Fatal(err)
			}
			for range 2 { // the second finds nothing to do
				s := open(t, dir)
				got, err := s.Get(t.Context(), "one")
				if err != nil || got.ID != v.ID || got.Size != c.size {
					t.Errorf("it is %+v, %v", got, err)
				}
				s.Close()
				whole(t, "volume", filepath.Join(dir, "volumes", string(v.ID), "data"), c.size, false)
				onlyFiles(t, filepath.Join(dir, "volumes"), string(v.ID))
				onlyFiles(t, filepath.Join(dir, "volumes", string(v.ID)), "data", "volume.json")
				onlyFiles(t, filepath.Join(dir, "snapshots"))
			}
		})
	}
}

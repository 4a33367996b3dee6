//go:build lvmguest

package lvm_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/hostmount"
)

// The host mounts a thin volume for a container while the store has its device open exclusively, and its file system grows there. Both go on
// after a restart.
func TestHostMounts(t *testing.T) {
	s := fresh(t)
	dir := filepath.Join(t.TempDir(), "mounts")
	mounter := func() *hostmount.Mounter {
		m, err := hostmount.New(hostmount.Config{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	m, at, container := mounter(), filepath.Join(dir, "data"), vm.NewID()
	t.Cleanup(func() { _ = unix.Unmount(dir, 0) })
	if _, err := s.Create(t.Context(), volume.Spec{Name: "data", Size: 32 * mib}); err != nil {
		t.Fatal(err)
	}
	mount := func() {
		t.Helper()
		_, disk, err := s.Attach(t.Context(), "data", container, volume.Mode{})
		if err == nil {
			_, err = m.Mount(t.Context(), disk, at, hostmount.Options{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	has := func(most, least int64) {
		t.Helper()
		var st unix.Statfs_t
		if err := unix.Statfs(at, &st); err != nil {
			t.Fatal(err)
		}
		if got := int64(st.Blocks) * st.Bsize; got < least*mib || got > most*mib {
			t.Errorf("it has %d bytes, not %d to %d MiB", got, least, most)
		}
	}
	mount()
	has(32, 20)
	file := filepath.Join(at, "file")
	if err := os.WriteFile(file, []byte("hello"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Resize(t.Context(), "data", 96*mib); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := m.Grow(t.Context(), at); err != nil {
			t.Fatal(err)
		}
		has(96, 80)
	}
	s.again(t)
	m = mounter()
	mount()
	has(96, 80)
	if all, err := m.List(dir); err != nil || len(all) != 1 || all[0].Dir != at {
		t.Errorf("%+v, %v", all, err)
	}
	release := func() {
		t.Helper()
		if err := m.Unmount(t.Context(), at); err != nil {
			t.Fatal(err)
		}
		if err := s.Detach(t.Context(), "data", container); err != nil {
			t.Fatal(err)
		}
	}
	release()
	if _, err := s.Resize(t.Context(), "data", 128*mib); err != nil {
		t.Fatal(err)
	}
	mount() // grown while nobody had it
	has(128, 112)
	if text, err := os.ReadFile(file); err != nil || string(text) != "hello" {
		t.Errorf("%q, %v", text, err)
	}
	release()
	if err := s.Delete(t.Context(), "data"); err != nil {
		t.Fatal(err)
	}
}

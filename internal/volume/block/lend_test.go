package block_test

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/block"
	"cocoonstack.io/cocoon/internal/volume/kinds"
	"cocoonstack.io/cocoon/internal/volume/volumetest"
)

// borrowed is a store whose devices are lent.
type borrowed struct {
	*block.Store
	dir string
}

// Unwrap implements volume.Wrapper.
func (b *borrowed) Unwrap() volume.Store { return b.Store }

// Provide implements volumetest.Provider. To lend a device again is no error, but to make a volume again is one.
func (b *borrowed) Provide(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	owner := vm.Behalf(ctx)
	if taken, err := kinds.Has(ctx, b.Store, owner, spec.Name); err != nil || taken {
		return volume.Volume{}, cmp.Or(err, vm.Volumes.Taken(owner.Qualify(spec.Name)))
	}
	f, err := os.CreateTemp(filepath.Dir(b.dir), "disk-*")
	if err != nil {
		return volume.Volume{}, err
	}
	if err := errors.Join(f.Truncate(spec.Size), f.Close()); err != nil {
		return volume.Volume{}, err
	}
	return b.Lend(ctx, owner, spec, f.Name())
}

func TestLentStore(t *testing.T) {
	start := func(t *testing.T, dir string) volume.Store { return &borrowed{open(t, dir, nil), dir} }
	volumetest.Run(t, func(t *testing.T) volume.Store {
		return start(t, filepath.Join(t.TempDir(), "store"))
	}, func(t *testing.T, s volume.Store) volume.Store {
		b, ok := s.(*borrowed)
		if !ok || b.Close() != nil {
			t.Fatal("it cannot be closed")
		}
		return start(t, b.dir)
	})
}

// TestLend: a lent device stays a volume until it is given back, whatever becomes of the device, and no VM loses it.
func TestLend(t *testing.T) {
	base := t.TempDir()
	dir, path := filepath.Join(base, "store"), disk(t, base, "one", 2*mib)
	owner := vm.Owner{Namespace: "prod"}
	ctx := vm.OnBehalf(t.Context(), owner)
	s := open(t, dir, map[string]string{"prod/mine": disk(t, base, "mine", mib)})
	lend := func(name, path string) (volume.Volume, error) {
		return s.Lend(ctx, owner, volume.Spec{Name: name, Labels: map[string]string{"a": "b"}}, path)
	}
	v, err := lend("data", path)
	if err != nil || v.Size != 2*mib || v.Owner != owner || v.Labels["a"] != "b" {
		t.Fatalf("%+v, %v", v, err)
	}
	if again, err := lend("data", path); err != nil || again.ID != v.ID {
		t.Errorf("lent twice: %+v, %v", again, err)
	}
	for what, c := range map[string]struct {
		name, path string
		class      errdefs.Class
	}{
		"a device of the configuration": {"mine", path, errdefs.AlreadyExists}, "a relative path": {"x", "one", errdefs.InvalidArgument}, "a path that climbs": {"x", base + "/../one", errdefs.InvalidArgument},
		"no name": {"", path, errdefs.InvalidArgument}, "no device": {"x", base, errdefs.FailedPrecondition}, "nothing": {"x", base + "/none", errdefs.DataLoss},
		"a device of another volume": {"x", path, errdefs.FailedPrecondition},
	} {
		if _, err := lend(c.name, c.path); !errdefs.Is(err, c.class) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := s.Return(ctx, owner, "mine"); !errdefs.Is(err, errdefs.AlreadyExists) {
		t.Errorf("a device of the configuration was given back: %v", err)
	}
	if _, err := s.Get(vm.OnBehalf(t.Context(), vm.Owner{Namespace: "other"}), string(v.ID)); !errdefs.IsNotFound(err) {
		t.Errorf("another namespace sees it: %v", err)
	}

	user := vm.NewID()
	if _, _, err := s.Attach(ctx, "data", user, volume.Mode{}); err != nil {
		t.Fatal(err)
	}
	if err := s.Return(ctx, owner, "data"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("given back while a VM has it: %v", err)
	}
	if size, err := s.Measure(ctx, owner, "data"); err != nil || size != 2*mib {
		t.Errorf("measured %d, %v", size, err)
	}
	if err := os.Truncate(path, 2*mib+4097); err != nil {
		t.Fatal(err)
	}
	if size, err := s.Measure(ctx, owner, "data"); err != nil || size != 2*mib+4096 {
		t.Errorf("measured %d when it has grown, %v", size, err)
	}
	if got, err := s.Resize(ctx, "data", 2*mib+4096); err != nil || got.Size != 2*mib+4096 {
		t.Errorf("resized: %+v, %v", got, err)
	}
	if _, err := s.Measure(ctx, owner, "mine"); !errdefs.IsAlreadyExists(err) {
		t.Errorf("a device of the configuration was measured: %v", err)
	}

	// The device is withdrawn while the VM does not run. It is closed, and no VM gets it until it is lent again.
	if err := s.Withdraw(ctx, owner, "mine"); !errdefs.IsAlreadyExists(err) {
		t.Errorf("a device of the configuration was withdrawn: %v", err)
	}
	for range 2 {
		if err := errors.Join(s.Withdraw(ctx, owner, "none"), s.Withdraw(ctx, owner, "data")); err != nil {
			t.Error(err)
		}
		if got, here, err := s.Lent(ctx, owner, "data"); err != nil || here || len(got.Attachments) != 1 {
			t.Errorf("withdrawn: %+v, here %t, %v", got, here, err)
		}
		if isOpen(t, path) {
			t.Error("a withdrawn device is open")
		}
		_, _, err := s.Attach(ctx, "data", user, volume.Mode{})
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "publish it again") {
			t.Errorf("a VM starts with a withdrawn device: %v", err)
		}
		_ = s.Close()
		s = open(t, dir, nil)
	}
	if _, err := lend("data", path); err != nil {
		t.Error(err)
	}
	if _, _, err := s.Attach(ctx, "data", user, volume.Mode{}); err != nil || !isOpen(t, path) {
		t.Errorf("lent after it was withdrawn: %v", err)
	}

	// The machine starts again: the device is away, and then another one with the same bytes.
	_ = s.Close()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, nil)
	if got, err := s.Get(ctx, "data"); err != nil || len(got.Attachments) != 1 {
		t.Fatalf("without its device: %+v, %v", got, err)
	}
	if _, _, err := s.Attach(ctx, "data", user, volume.Mode{}); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("a VM starts without the device: %v", err)
	}
	if _, err := lend("data", disk(t, base, "small", mib)); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a smaller device: %v", err)
	}
	if got, err := lend("data", disk(t, base, "two", 3*mib)); err != nil || got.ID != v.ID || got.Size != 3*mib {
		t.Errorf("lent again: %+v, %v", got, err)
	}
	if _, d, err := s.Attach(ctx, "data", user, volume.Mode{}); err != nil || d.Path != base+"/two" {
		t.Errorf("attached as %+v, %v", d, err)
	}
	// The machine starts once more. The path leads to a device at once, and nobody has said that it is the one of the volume.
	_ = s.Close()
	record := filepath.Join(dir, string(v.ID)+".json")
	text, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	other := strings.Replace(string(text), strings.TrimSpace(string(boot)), "another", 1)
	if other == string(text) || os.WriteFile(record, []byte(other), 0o600) != nil {
		t.Fatalf("the record has no boot: %s", text)
	}
	s = open(t, dir, nil)
	if _, _, err := s.Attach(ctx, "data", user, volume.Mode{}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "since the machine started") {
		t.Errorf("attached after another start: %v", err)
	}
	if _, here, err := s.Lent(ctx, owner, "data"); err != nil || here {
		t.Errorf("it is said to be here: %t, %v", here, err)
	}
	if _, err := lend("data", base+"/two"); err != nil {
		t.Error(err)
	}
	if got, here, err := s.Lent(ctx, owner, "data"); err != nil || !here || got.ID != v.ID {
		t.Errorf("lent again: %+v, %t, %v", got, here, err)
	}
	if _, _, err := s.Attach(ctx, "data", user, volume.Mode{}); err != nil {
		t.Error(err)
	}
	if err := s.Detach(ctx, "data", user); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.Return(ctx, owner, "data"); err != nil {
			t.Error(err)
		}
	}
	if _, err := s.Get(ctx, "data"); !errdefs.IsNotFound(err) {
		t.Errorf("it is still there: %v", err)
	}
	_ = s.Close()
	s = open(t, dir, nil)
	if all, err := s.List(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("after a start there are %+v, %v", all, err)
	}
}

// isOpen reports whether this process has the file at path open.
func isOpen(t *testing.T, path string) bool {
	t.Helper()
	fds, err := filepath.Glob("/proc/self/fd/*")
	if err != nil || len(fds) == 0 {
		t.Fatalf("%v: %v", fds, err)
	}
	for _, fd := range fds {
		if at, _ := os.Readlink(fd); at == path {
			return true
		}
	}
	return false
}

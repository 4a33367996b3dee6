package block_test

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/loopdev"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/block"
	"cocoonstack.io/cocoon/internal/volume/volumetest"
)

const mib = volumetest.MiB

func open(t *testing.T, dir string, devices map[string]string) *block.Store {
	t.Helper()
	s, err := block.New(t.Context(), block.Config{Dir: dir, Devices: devices, Files: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// configured is a store whose configuration grows.
type configured struct {
	*block.Store
	dir     string
	devices map[string]string
}

var _ volumetest.Provider = (*configured)(nil)

// Unwrap implements volume.Wrapper.
func (c *configured) Unwrap() volume.Store { return c.Store }

// Provide implements volumetest.Provider.
func (c *configured) Provide(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	owner := vm.Behalf(ctx)
	f, err := os.CreateTemp(filepath.Dir(c.dir), "disk-*")
	if err != nil {
		return volume.Volume{}, err
	}
	if err := errors.Join(f.Truncate(spec.Size), f.Close()); err != nil {
		return volume.Volume{}, err
	}
	v, err := c.Add(owner, spec, f.Name())
	if err == nil {
		c.devices[owner.Qualify(spec.Name)] = f.Name()
	}
	return v, err
}

func TestStore(t *testing.T) {
	start := func(t *testing.T, dir string, devices map[string]string) volume.Store {
		return &configured{open(t, dir, devices), dir, devices}
	}
	volumetest.Run(t, func(t *testing.T) volume.Store {
		return start(t, filepath.Join(t.TempDir(), "store"), map[string]string{})
	}, func(t *testing.T, s volume.Store) volume.Store {
		c, ok := s.(*configured)
		if !ok || c.Close() != nil {
			t.Fatal("it cannot be closed")
		}
		return start(t, c.dir, c.devices)
	})
}

// disk makes a file that stands for a device.
func disk(t *testing.T, dir, name string, size int64) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, size)); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestConfigurationIsChecked(t *testing.T) {
	for name, path := range map[string]string{
		"": "/dev/x", "a/b/c": "/dev/x", "/a": "/dev/x", "a/": "/dev/x", "a b": "/dev/x", "..": "/dev/x", "../a": "/dev/x",
		"a": "", "b": "dev/x", "c": "/dev/../x", "d": "/dev/",
	} {
		if err := block.Check(map[string]string{name: path}); !errdefs.IsInvalid(err) {
			t.Errorf("%q on %q: %v", name, path, err)
		}
	}
	if err := block.Check(map[string]string{"a": "/dev/x", "b": "/dev/x"}); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "a and b") {
		t.Errorf("one device twice: %v", err)
	}
	if err := block.Check(map[string]string{"a": "/dev/x", "dev/a": "/dev/y"}); err != nil {
		t.Error(err)
	}
	if _, err := block.New(t.Context(), block.Config{Dir: "x"}); !errdefs.IsInvalid(err) {
		t.Errorf("a relative folder: %v", err)
	}
}

// TestOtherDevices: a name of the configuration that leads to another device, or to none, does not give it to a VM.
func TestOtherDevices(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "store")
	one, two := disk(t, base, "one", 4*mib), disk(t, base, "two", 4*mib)
	link := filepath.Join(base, "link")
	point := func(to string) {
		t.Helper()
		_ = os.Remove(link)
		if err := os.Symlink(to, link); err != nil {
			t.Fatal(err)
		}
	}
	point(one)
	s := open(t, dir, map[string]string{"db": link})
	user := vm.NewID()
	attach := func(s *block.Store) error { _, _, err := s.Attach(t.Context(), "db", user, volume.Mode{}); return err }
	_, d, err := s.Attach(t.Context(), "db", user, volume.Mode{})
	if err != nil || d.Path != one {
		t.Fatalf("attached as %+v, %v", d, err)
	}
	if err := s.Detach(t.Context(), "db", user); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		to    string
		class errdefs.Class
	}{
		"another": {two, errdefs.FailedPrecondition}, "a missing one": {base + "/none", errdefs.DataLoss}, "a folder": {base, errdefs.FailedPrecondition}, "no disk": {"/dev/null", errdefs.FailedPrecondition},
	} {
		point(c.to)
		if err := attach(s); !errdefs.Is(err, c.class) {
			t.Errorf("%s: %v", what, err)
		}
		if v, err := s.Get(t.Context(), "db"); err != nil || len(v.Attachments) > 0 {
			t.Errorf("%s: it is %+v, %v", what, v, err)
		}
		_ = s.Close()
		s = open(t, dir, map[string]string{"db": link}) // nor after a start
		if err := attach(s); !errdefs.Is(err, c.class) {
			t.Errorf("%s, after a start: %v", what, err)
		}
	}
	point(one)
	if err := os.Truncate(one, 2*mib); err != nil {
		t.Fatal(err)
	}
	if err := attach(s); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "another device") {
		t.Errorf("a smaller one: %v", err)
	}
	if err := os.Truncate(one, 8*mib); err != nil {
		t.Fatal(err)
	}
	if err := attach(s); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "volume resize db 8388608") {
		t.Errorf("one that has grown: %v", err)
	}
	if _, err := s.Resize(t.Context(), "db", 6*mib); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("another size than that of the device: %v", err)
	}
	if v, err := s.Resize(t.Context(), "db", 8*mib); err != nil || v.Size != 8*mib {
		t.Errorf("its new size: %+v, %v", v, err)
	}
	if err := attach(s); err != nil {
		t.Error(err)
	}
}

// TestConfigurationChanges: a device that is not named any more is no volume, but one that a VM has stays known.
func TestConfigurationChanges(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "store")
	devices := map[string]string{"a": disk(t, base, "a", mib), "prod/b": disk(t, base, "b", mib), "tiny": disk(t, base, "tiny", 4096), "none": base + "/none"}
	s := open(t, dir, devices)
	user := vm.NewID()
	b, d, err := s.Attach(vm.OnBehalf(t.Context(), vm.Owner{Namespace: "prod"}), "b", user, volume.Mode{})
	if err != nil || b.Kind != block.Kind || d.Device {
		t.Fatalf("%+v, %+v, %v", b, d, err)
	}
	list := func() (names []string) {
		t.Helper()
		all, err := s.List(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range all {
			names = append(names, v.Owner.Qualify(v.Name))
		}
		return names
	}
	if got := strings.Join(list(), " "); got != "a prod/b" {
		t.Errorf("there are %s", got)
	}
	_ = s.Close()
	s = open(t, dir, map[string]string{"other": devices["prod/b"]}) // with another name, the VM could lose it to a second one
	if got := strings.Join(list(), " "); got != "prod/b" {
		t.Errorf("with another name there are %s", got)
	}
	_ = s.Close()
	s = open(t, dir, nil)
	if got := strings.Join(list(), " "); got != "prod/b" {
		t.Errorf("without a configuration there are %s", got)
	}
	if _, _, err := s.Attach(t.Context(), "b", user, volume.Mode{}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), devices["prod/b"]) {
		t.Errorf("attached again: %v", err)
	}
	if err := s.Detach(t.Context(), "b", user); err != nil {
		t.Errorf("detached: %v", err)
	}
	_ = s.Close()
	s = open(t, dir, nil)
	if got := list(); len(got) > 0 {
		t.Errorf("there are %s", got)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left are %v, %v", entries, err)
	}
	_ = s.Close()
	if all := open(t, dir, devices); all == nil {
		t.Error("not opened")
	}
}

// TestDamagedRecords: one stays where it is, and its name taken. Others are not affected.
func TestDamagedRecords(t *testing.T) {
	base := t.TempDir()
	dir := filepath.Join(base, "store")
	devices := map[string]string{"a": disk(t, base, "a", mib), "b": disk(t, base, "b", mib)}
	s := open(t, dir, devices)
	a, err := s.Get(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	_ = s.Close()
	file := filepath.Join(dir, string(a.ID)+".json")
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for what, text := range map[string]string{"no record": "x", "another kind": strings.Replace(string(good), `"block"`, `"file"`, 1), "no device": strings.Replace(string(good), `"size"`, `"Size"`, 1) + "}"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "."+string(a.ID)+".json.tmp-1"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		s := open(t, dir, devices)
		if _, err := s.Get(t.Context(), string(a.ID)); !errdefs.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: %v", what, err)
		}
		if _, _, err := s.Attach(t.Context(), string(a.ID), vm.NewID(), volume.Mode{ReadOnly: true}); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%s: %v", what, err)
		}
		if all, err := s.List(t.Context()); err != nil || len(all) != 1 || all[0].Name != "b" {
			t.Errorf("%s: there is %+v, %v", what, all, err)
		}
		if left, err := os.ReadFile(file); err != nil || string(left) != text {
			t.Errorf("%s: the record has changed: %v", what, err)
		}
		_ = s.Close()
	}
}

// TestDeviceIsFenced: a device that a VM has cannot be used by the host, and the other way round.
func TestDeviceIsFenced(t *testing.T) {
	base := t.TempDir()
	dir, file := filepath.Join(base, "store"), disk(t, base, "disk", 4*mib)
	dev := loopdev.Of(t, file)
	link := filepath.Join(base, "by-id")
	if err := os.Symlink(dev, link); err != nil {
		t.Fatal(err)
	}
	devices := map[string]string{"db": link, "twice": dev}
	s := open(t, dir, devices)
	if _, err := s.Get(t.Context(), "twice"); !errdefs.IsNotFound(err) {
		t.Errorf("a device with two names: %v", err)
	}
	host := func() (*os.File, error) { return os.OpenFile(dev, os.O_RDONLY|unix.O_EXCL, 0) } // as a mount does
	mounted, err := host()
	if err != nil {
		t.Fatalf("before it is attached: %v", err)
	}
	user := vm.NewID()
	if _, _, err := s.Attach(t.Context(), "db", user, volume.Mode{}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "the host uses") {
		t.Errorf("while the host uses it: %v", err)
	}
	mounted.Close()
	_, d, err := s.Attach(t.Context(), "db", user, volume.Mode{})
	if err != nil || d != (vm.Disk{Path: dev, Device: true, Format: vm.DiskRaw}) {
		t.Fatalf("%+v, %v", d, err)
	}
	if f, err := os.OpenFile(d.Path, os.O_RDWR, 0); err != nil { // as a hypervisor
		t.Error(err)
	} else {
		f.Close()
	}
	for range 2 {
		if f, err := host(); !errors.Is(err, unix.EBUSY) {
			f.Close()
			t.Errorf("the host uses an attached device: %v", err)
		}
		_ = s.Close() // a start of the daemon
		s = open(t, dir, devices)
	}
	// Another device gets the number: the loop device has another file now.
	if err := s.Detach(t.Context(), "db", user); err != nil {
		t.Fatal(err)
	}
	if f, err := host(); err != nil {
		t.Errorf("after it is detached: %v", err)
	} else {
		f.Close()
	}
	other := loopdev.Of(t, disk(t, base, "other", 4*mib))
	if err := errors.Join(os.Remove(link), os.Symlink(other, link)); err != nil {
		t.Fatal(err)
	}
	delete(devices, "twice")
	if _, _, err := s.Attach(t.Context(), "db", user, volume.Mode{}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "another device") {
		t.Errorf("a device that was renumbered: %v", err)
	}
	fixed := loopdev.Of(t, disk(t, base, "fixed", mib), "--read-only")
	_ = s.Close()
	more := maps.Clone(devices)
	more["fixed"] = fixed
	s = open(t, dir, more)
	if _, _, err := s.Attach(t.Context(), "fixed", user, volume.Mode{}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "read only") {
		t.Errorf("a device that cannot be written to: %v", err)
	}
	if _, _, err := s.Attach(t.Context(), "fixed", user, volume.Mode{ReadOnly: true}); err != nil {
		t.Error(err)
	}
	if _, err := block.New(t.Context(), block.Config{Dir: dir}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a second process: %v", err)
	}
}

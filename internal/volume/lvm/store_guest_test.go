//go:build lvmguest

package lvm_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/file"
	"cocoonstack.io/cocoon/internal/volume/kinds"
	"cocoonstack.io/cocoon/internal/volume/lvm"
	"cocoonstack.io/cocoon/internal/volume/volumetest"
)

func (s *store) Unwrap() volume.Store { return s.Store }

func TestStore(t *testing.T) {
	volumetest.Run(t, func(t *testing.T) volume.Store { return fresh(t) }, func(t *testing.T, v volume.Store) volume.Store {
		s, ok := v.(*store)
		if !ok {
			t.Fatal("another store")
		}
		s.again(t)
		return s
	})
}

// device returns the node of a volume in /dev; "": it has none.
func device(t *testing.T, id vm.ID) string {
	t.Helper()
	path := "/dev/mapper/vg-cocoon--" + string(id)
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
		return ""
	}
	return path
}

// host opens a device as a mount does.
func host(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_EXCL, 0)
	return errors.Join(err, f.Close())
}

// TestDevices: a volume has a device only while it is used, and then the host cannot use the device, whatever becomes of the process.
func TestDevices(t *testing.T) {
	s := fresh(t)
	v, err := s.Create(t.Context(), volume.Spec{Name: "a", Size: 3 * mib})
	if err != nil {
		t.Fatal(err)
	}
	if path := device(t, v.ID); path != "" {
		t.Errorf("a new volume has the device %s", path)
	}
	user := vm.NewID()
	attach := func() {
		t.Helper()
		got, d, err := s.Attach(t.Context(), "a", user, volume.Mode{})
		if err != nil || len(got.Attachments) != 1 || d != (vm.Disk{Path: device(t, v.ID), Format: vm.DiskRaw, Device: true}) {
			t.Fatalf("%+v, %+v, %v", got, d, err)
		}
	}
	attach()
	for range 2 {
		if err := host(device(t, v.ID)); !errors.Is(err, unix.EBUSY) {
			t.Errorf("the host uses it too: %v", err)
		}
		s.again(t)
	}
	// As after a start of the host.
	s.Close()
	command(t, "lvchange", "-q", "-an", "vg/cocoon-"+string(v.ID))
	command(t, "vgchange", "-q", "-ay", "vg")
	if path := device(t, v.ID); path != "" {
		t.Errorf("LVM gives it the device %s", path)
	}
	*s = *open(t, s.cfg)
	if err := host(device(t, v.ID)); !errors.Is(err, unix.EBUSY) {
		t.Errorf("after a start of the host: %v", err)
	}
	attach()
	if err := s.Detach(t.Context(), "a", user); err != nil {
		t.Fatal(err)
	}
	if err := host(device(t, v.ID)); !errors.Is(err, unix.EBUSY) {
		t.Errorf("after it is detached: %v", err)
	}
	s.Rest(t.Context())
	if path := device(t, v.ID); path != "" {
		t.Errorf("a volume at rest has the device %s", path)
	}
	attach()
	if err := s.Detach(t.Context(), "a", user); err != nil {
		t.Fatal(err)
	}
	s.again(t)
	if path := device(t, v.ID); path != "" {
		t.Errorf("the next process leaves the device %s", path)
	}
	// A host that uses it keeps it.
	command(t, "lvchange", "-q", "-ay", "-K", "vg/cocoon-"+string(v.ID))
	f, err := os.OpenFile(device(t, v.ID), os.O_RDONLY|unix.O_EXCL, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Attach(t.Context(), "a", user, volume.Mode{}); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "the host uses") {
		t.Errorf("while the host uses it: %v", err)
	}
	f.Close()
	if _, err := lvm.New(t.Context(), s.cfg); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a second process: %v", err)
	}
}

// TestSharing: copies take no space until they change, usage follows, and a device is not needed for it.
func TestSharing(t *testing.T) {
	s := fresh(t)
	content := bytes.Repeat([]byte("x"), 4*mib)
	v, err := s.Import(t.Context(), volume.Spec{Name: "a", Size: 64 * mib}, bytes.NewReader(content), nil)
	if err != nil {
		t.Fatal(err)
	}
	before := s.Pools(t.Context())[0]
	if before.Fault != "" || before.Size != 256*mib || before.Used < 4*mib || before.Used > 5*mib || before.MetadataSize == 0 || before.Free != before.Size/100*90-before.Used {
		t.Errorf("the pool is %+v", before)
	}
	c, err := s.Clone(t.Context(), "a", volume.Spec{Name: "b"})
	if err != nil {
		t.Fatal(err)
	}
	if after := s.Pools(t.Context())[0]; after.Used != before.Used {
		t.Errorf("after a copy: %+v", after)
	}
	for range 2 {
		usage, err := s.Usage(t.Context())
		for _, id := range []vm.ID{v.ID, c.ID} {
			if u := usage[id]; err != nil || u != (volume.Usage{Size: 64 * mib, Allocated: 4 * mib}) {
				t.Errorf("usage of %s is %+v, %v", id, u, err)
			}
		}
		s.again(t)
	}
	if err := errors.Join(s.Delete(t.Context(), "a"), s.Delete(t.Context(), "b")); err != nil {
		t.Fatal(err)
	}
	if after := s.Pools(t.Context())[0]; after.Used != 0 {
		t.Errorf("after all are deleted: %+v", after)
	}
	// What another volume had is not found in a new one.
	if _, err := s.Create(t.Context(), volume.Spec{Name: "next", Size: 4 * mib}); err != nil {
		t.Fatal(err)
	}
	user := vm.NewID()
	_, d, err := s.Attach(t.Context(), "next", user, volume.Mode{})
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(d.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	for at := int64(0); at < 4*mib; at += 64 << 10 {
		if _, err := f.WriteAt([]byte("y"), at+512); err != nil { // a part of each block of the pool
			t.Fatal(err)
		}
	}
	got := make([]byte, 4*mib)
	_, err = f.ReadAt(got, 0)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil || bytes.Contains(got, []byte("x")) || bytes.Count(got, []byte("y")) != 64 {
		t.Errorf("it has what was deleted: %v", err)
	}
}

// TestGuard: nothing is made or grown in a pool that is too full or does not zero its blocks, and what is there stays usable.
func TestGuard(t *testing.T) {
	s := fresh(t)
	s.cfg.Warn, s.cfg.Refuse = 15, 20 // the kernel counts a reserve of a tenth of the metadata as in use
	s.again(t)
	if _, err := s.Import(t.Context(), volume.Spec{Name: "a"}, bytes.NewReader(bytes.Repeat([]byte("x"), 8*mib)), nil); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Snapshot(t.Context(), "a", volume.Spec{Name: "x"}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Import(t.Context(), volume.Spec{Name: "fill"}, bytes.NewReader(bytes.Repeat([]byte("x"), 50*mib)), nil); err != nil {
		t.Fatal(err)
	}
	tries := map[string]func() error{
		"create":   func() error { _, err := s.Create(t.Context(), volume.Spec{Name: "n", Size: mib}); return err },
		"resize":   func() error { _, err := s.Resize(t.Context(), "a", 60*mib); return err },
		"snapshot": func() error { _, err := s.Snapshot(t.Context(), "a", volume.Spec{}); return err },
		"check":    func() error { return s.CheckLive(t.Context(), "a") },
		"clone":    func() error { _, err := s.Clone(t.Context(), "a", volume.Spec{}); return err },
		"copy":     func() error { _, err := s.FromSnapshot(t.Context(), "x", volume.Spec{}); return err },
		"restore":  func() error { _, err := s.Restore(t.Context(), "a", "x"); return err },
		"import": func() error {
			_, err := s.Import(t.Context(), volume.Spec{Name: "n"}, strings.NewReader("x"), nil)
			return err
		},
	}
	refused := func(class errdefs.Class, remedy string) {
		t.Helper()
		before := logicals(t)
		for what, try := range tries {
			if err := try(); !errdefs.Is(err, class) || !strings.Contains(err.Error(), remedy) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if p := s.Pools(t.Context())[0]; !strings.Contains(p.Fault, remedy) || p.Free != 0 {
			t.Errorf("the pool is %+v", p)
		}
		if after := logicals(t); strings.Join(after, " ") != strings.Join(before, " ") {
			t.Errorf("there are %v; before it was %v", after, before)
		}
	}
	refused(errdefs.ResourceExhausted, "lvextend")
	s.Watch()
	if said := s.log.String(); !strings.Contains(said, "level=ERROR") || !strings.Contains(said, "thin pool is too full") {
		t.Errorf("the log says %s", said)
	}
	user := vm.NewID()
	if _, _, err := s.Attach(t.Context(), "a", user, volume.Mode{}); err != nil {
		t.Error(err)
	}
	if err := s.Detach(t.Context(), "a", user); err != nil {
		t.Error(err)
	}
	// An import ends when the pool becomes too full.
	s.cfg.Refuse = 40
	s.again(t)
	_, err := s.Import(t.Context(), volume.Spec{Name: "large"}, bytes.NewReader(bytes.Repeat([]byte("x"), 100*mib)), nil)
	if !errdefs.Is(err, errdefs.ResourceExhausted) {
		t.Errorf("an import: %v", err)
	}
	if n := len(logicals(t)); n != 3 {
		t.Errorf("it left something: %v", logicals(t))
	}
	command(t, "lvchange", "-q", "--zero", "n", pool)
	refused(errdefs.FailedPrecondition, "lvchange --zero y")
	command(t, "lvchange", "-q", "--zero", "y", pool)
	if err := errors.Join(tries["create"](), s.DeleteSnapshot(t.Context(), "x"), s.Delete(t.Context(), "a")); err != nil {
		t.Error(err)
	}
}

// TestFull: a guest that writes to a full pool gets an error for lack of space, nothing else is lost, and room lets it go on.
func TestFull(t *testing.T) {
	const small = "vg/small"
	command(t, "lvcreate", "-q", "-y", "-L", "16m", "-c", "64k", "--poolmetadatasize", "16m", "--errorwhenfull", "y", "-T", small)
	s := open(t, lvm.Config{Dir: filepath.Join(t.TempDir(), "store"), Pool: small})
	defer func() {
		s.Close()
		clear(t)
	}()
	if _, err := s.Create(t.Context(), volume.Spec{Name: "a", Size: 32 * mib}); err != nil {
		t.Fatal(err)
	}
	_, d, err := s.Attach(t.Context(), "a", vm.NewID(), volume.Mode{})
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(d.Path, os.O_RDWR|unix.O_DIRECT, 0) // as the hypervisor does
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	one, err := unix.Mmap(-1, 0, mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS) // aligned
	if err != nil {
		t.Fatal(err)
	}
	copy(one, "x")
	var failed error
	at := int64(0)
	for ; at < 32*mib && failed == nil; at += mib {
		_, failed = f.WriteAt(one, at)
	}
	if !errors.Is(failed, unix.ENOSPC) || at < 14*mib {
		t.Fatalf("after %d bytes: %v", at, failed)
	}
	if p := s.Pools(t.Context())[0]; p.Free != 0 || !strings.Contains(p.Fault, "is full") {
		t.Errorf("the pool is %+v", p)
	}
	if _, err := s.Create(t.Context(), volume.Spec{Name: "b", Size: mib}); !errdefs.IsUnavailable(err) {
		t.Errorf("another volume: %v", err)
	}
	command(t, "lvextend", "-q", "-L", "64m", small)
	if _, err := f.WriteAt(one, at-mib); err != nil {
		t.Errorf("after the pool was extended: %v", err)
	}
	if p := s.Pools(t.Context())[0]; p.Fault != "" || p.Size != 64*mib {
		t.Errorf("the pool is %+v", p)
	}
}

// TestDamage: records and logical volumes that do not belong together are kept, and told.
func TestDamage(t *testing.T) {
	s := fresh(t)
	for _, name := range []string{"lost", "short", "good", "bad", "other"} {
		if _, err := s.Create(t.Context(), volume.Spec{Name: name, Size: 4 * mib}); err != nil {
			t.Fatal(err)
		}
	}
	lv := func(name string) string {
		v, err := s.Get(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		return "vg/cocoon-" + string(v.ID)
	}
	lost, short, bad, other := lv("lost"), lv("short"), lv("bad"), lv("other")
	s.Close()
	command(t, "lvremove", "-q", "-y", lost)
	command(t, "lvreduce", "-q", "-f", "-y", "-L", "2m", short)
	record := func(lv string) string {
		return filepath.Join(s.cfg.Dir, "volumes", strings.TrimPrefix(lv, "vg/cocoon-")+".json")
	}
	text, err := os.ReadFile(record(bad))
	if err != nil {
		t.Fatal(err)
	}
	// A record may not have anything removed that is not ours.
	hostile := bytes.Replace(text, []byte(`"lv": "cocoon-`), []byte(`"gone": ["pool"], "lv": "cocoon-`), 1)
	if err := errors.Join(os.WriteFile(record(bad), hostile, 0o600), os.Remove(record(other))); err != nil || bytes.Equal(hostile, text) {
		t.Fatal(err)
	}
	for range 2 {
		*s = *open(t, s.cfg)
		for _, name := range []string{"lost", "short"} {
			if _, err := s.Get(t.Context(), name); !errdefs.Is(err, errdefs.DataLoss) {
				t.Errorf("%s: %v", name, err)
			}
			if _, err := s.Create(t.Context(), volume.Spec{Name: name, Size: mib}); !errdefs.IsAlreadyExists(err) {
				t.Errorf("another %s: %v", name, err)
			}
		}
		if all, err := s.List(t.Context()); err != nil || len(all) != 1 || all[0].Name != "good" {
			t.Errorf("there are %+v, %v", all, err)
		}
		if said := s.log.String(); !strings.Contains(said, "logical volume without a record kept") || !strings.Contains(said, other) {
			t.Errorf("the log says %s", said)
		}
		if n := len(logicals(t)); n != 4 {
			t.Errorf("there are %v", logicals(t))
		}
		s.Close()
	}
	if err := os.WriteFile(record(bad), text, 0o600); err != nil {
		t.Fatal(err)
	}
	*s = *open(t, s.cfg)
	if _, err := s.Get(t.Context(), "bad"); err != nil {
		t.Errorf("after it was repaired: %v", err)
	}
	// One that is lost while the store is open.
	command(t, "lvremove", "-q", "-y", bad)
	if _, _, err := s.Attach(t.Context(), "bad", vm.NewID(), volume.Mode{}); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("attached: %v", err)
	}
	if _, err := s.Clone(t.Context(), "bad", volume.Spec{}); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("cloned: %v", err)
	}
}

// TestNoPool: without its pool, a store opens and says what is missing. It is used as soon as the pool is there.
func TestNoPool(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	for name, remedy := range map[string]string{"none/pool": "none", "vg/none": "lvcreate --type thin-pool"} {
		s := open(t, lvm.Config{Dir: dir, Pool: name})
		if _, err := s.Create(t.Context(), volume.Spec{Name: "a", Size: mib}); !errdefs.IsUnavailable(err) && !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), remedy) {
			t.Errorf("%s: %v", name, err)
		}
		if all, err := s.List(t.Context()); err != nil || len(all) > 0 {
			t.Errorf("there are %+v, %v", all, err)
		}
		s.Close()
	}
	s := fresh(t)
	if _, err := s.Create(t.Context(), volume.Spec{Name: "a", Size: mib}); err != nil {
		t.Fatal(err)
	}
	s.Close()
	command(t, "vgrename", "-q", "vg", "away")
	*s = *open(t, s.cfg)
	_, err := s.Create(t.Context(), volume.Spec{Name: "b", Size: mib})
	_, _, err2 := s.Attach(t.Context(), "a", vm.NewID(), volume.Mode{})
	command(t, "vgrename", "-q", "away", "vg")
	if err == nil || err2 == nil {
		t.Errorf("without its volume group: %v, %v", err, err2)
	}
	if err := s.Settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Create(t.Context(), volume.Spec{Name: "b", Size: mib}); err != nil {
		t.Error(err)
	}
	if _, _, err := s.Attach(t.Context(), "a", vm.NewID(), volume.Mode{}); err != nil {
		t.Error(err)
	}
}

// TestKinds: beside another store that makes volumes, names are unique, and each request goes to the store of its kind.
func TestKinds(t *testing.T) {
	thin := fresh(t)
	files, err := file.New(t.Context(), file.Config{Dir: filepath.Join(t.TempDir(), "files")})
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	s := kinds.New([]kinds.Kind{{Name: file.Kind, Making: files}, {Name: lvm.Kind, Making: thin.Store}})
	ctx := t.Context()
	for name, kind := range map[string]string{"f": "", "t": lvm.Kind} {
		v, err := s.Create(ctx, volume.Spec{Name: name, Size: mib, Kind: kind})
		if err != nil || kind != "" && v.Kind != kind || kind == "" && v.Kind != file.Kind {
			t.Fatalf("%+v, %v", v, err)
		}
		if x, err := s.Snapshot(ctx, name, volume.Spec{Name: "of-" + name}); err != nil || x.Kind != v.Kind {
			t.Fatalf("%+v, %v", x, err)
		}
		if c, err := s.Clone(ctx, name, volume.Spec{Name: name + "2"}); err != nil || c.Kind != v.Kind {
			t.Errorf("%+v, %v", c, err)
		}
		if c, err := s.FromSnapshot(ctx, "of-"+name, volume.Spec{Name: name + "3", Kind: v.Kind}); err != nil || c.Kind != v.Kind {
			t.Errorf("%+v, %v", c, err)
		}
	}
	if all, err := s.List(ctx); err != nil || len(all) != 6 {
		t.Errorf("there are %+v, %v", all, err)
	}
	if all, err := s.Snapshots(ctx); err != nil || len(all) != 2 || all[0].Name != "of-f" {
		t.Errorf("there are %+v, %v", all, err)
	}
	if p := s.Pools(ctx); len(p) != 1 || p[0].Name != pool {
		t.Errorf("the pools are %+v", p)
	}
	for what, c := range map[string]struct {
		want errdefs.Class
		try  func() error
	}{
		"create":        {errdefs.AlreadyExists, func() error { _, err := s.Create(ctx, volume.Spec{Name: "f", Size: mib, Kind: lvm.Kind}); return err }},
		"clone":         {errdefs.AlreadyExists, func() error { _, err := s.Clone(ctx, "f", volume.Spec{Name: "t"}); return err }},
		"from snapshot": {errdefs.AlreadyExists, func() error { _, err := s.FromSnapshot(ctx, "of-t", volume.Spec{Name: "f"}); return err }},
		"rename":        {errdefs.AlreadyExists, func() error { _, err := s.Update(ctx, "t", func(v *volume.Volume) { v.Name = "f" }); return err }},
		"snapshot":      {errdefs.AlreadyExists, func() error { _, err := s.Snapshot(ctx, "f", volume.Spec{Name: "of-t"}); return err }},
		"import": {errdefs.AlreadyExists, func() error {
			_, err := s.Import(ctx, volume.Spec{Name: "t"}, strings.NewReader("x"), nil)
			return err
		}},
		"another kind of copy": {errdefs.InvalidArgument, func() error { _, err := s.Clone(ctx, "f", volume.Spec{Kind: lvm.Kind}); return err }},
		"restore":              {errdefs.FailedPrecondition, func() error { _, err := s.Restore(ctx, "f", "of-t"); return err }},
		"no such kind":         {errdefs.Unsupported, func() error { _, err := s.Create(ctx, volume.Spec{Name: "n", Size: mib, Kind: "nvme"}); return err }},
	} {
		if err := c.try(); !errdefs.Is(err, c.want) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := s.Restore(ctx, "t", "of-t"); err != nil {
		t.Error(err)
	}
	if _, d, err := s.Attach(ctx, "t", vm.NewID(), volume.Mode{}); err != nil || !d.Device {
		t.Errorf("%+v, %v", d, err)
	}
	for _, x := range []string{"of-f", "of-t"} {
		if err := s.DeleteSnapshot(ctx, x); err != nil {
			t.Error(err)
		}
	}
	if err := errors.Join(s.Delete(ctx, "t2"), s.Delete(ctx, "f2")); err != nil {
		t.Error(err)
	}
}

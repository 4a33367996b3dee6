package kinds_test

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
	"cocoonstack.io/cocoon/internal/volume/block"
	"cocoonstack.io/cocoon/internal/volume/file"
	"cocoonstack.io/cocoon/internal/volume/kinds"
	"cocoonstack.io/cocoon/internal/volume/volumetest"
)

const mib = volumetest.MiB

// opened is a store and how to open it again.
type opened struct {
	*kinds.Store
	close func() error
	dir   string
}

func (o *opened) Unwrap() volume.Store { return o.Store }

func open(t *testing.T, dir string, devices map[string]string) *opened {
	t.Helper()
	files, err := file.New(t.Context(), file.Config{Dir: filepath.Join(dir, "files")})
	if err != nil {
		t.Fatal(err)
	}
	blocks, err := block.New(t.Context(), block.Config{Dir: filepath.Join(dir, "blocks"), Devices: devices, Files: true, Taken: func(owner vm.Owner, name string) (bool, error) {
		return kinds.Has(t.Context(), files, owner, name)
	}})
	if err != nil {
		t.Fatal(err)
	}
	o := &opened{Store: kinds.New([]kinds.Kind{{Name: file.Kind, Making: files}}, blocks), dir: dir, close: func() error { return errors.Join(files.Close(), blocks.Close()) }}
	t.Cleanup(func() { _ = o.close() })
	return o
}

func TestStore(t *testing.T) {
	volumetest.Run(t, func(t *testing.T) volume.Store { return open(t, t.TempDir(), nil) }, func(t *testing.T, s volume.Store) volume.Store {
		o, ok := s.(*opened)
		if !ok || o.close() != nil {
			t.Fatal("it cannot be closed")
		}
		return open(t, o.dir, nil)
	})
}

// TestKinds: both kinds are found by name and id, no name is given twice, and a device is not touched.
func TestKinds(t *testing.T) {
	dir, ctx := t.TempDir(), t.Context()
	device := func(name string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(strings.Repeat(name[:1], mib)), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	devices := map[string]string{"disk": device("one"), "dev/disk": device("two")}
	s := open(t, dir, devices)
	made, err := s.Create(ctx, volume.Spec{Name: "made", Size: mib})
	if err != nil {
		t.Fatal(err)
	}
	all, err := s.List(ctx)
	if err != nil || len(all) != 3 || all[0].Name != "disk" || all[0].Kind != block.Kind || all[1].ID != made.ID || all[1].Kind != file.Kind || all[2].Owner.Namespace != "dev" {
		t.Fatalf("there are %+v, %v", all, err)
	}
	disk := all[0]
	usage, err := s.Usage(ctx)
	if err != nil || len(usage) != 3 || usage[disk.ID].Allocated != mib {
		t.Errorf("usage is %+v, %v", usage, err)
	}
	for ref, want := range map[string]vm.ID{"disk": disk.ID, string(disk.ID): disk.ID, "made": made.ID, string(made.ID): made.ID, "dev/disk": all[2].ID} {
		if v, err := s.Get(ctx, ref); err != nil || v.ID != want {
			t.Errorf("%s is %+v, %v", ref, v, err)
		}
	}
	if _, err := s.Get(ctx, "none"); !errdefs.IsNotFound(err) {
		t.Error(err)
	}
	// A name wins over the beginning of an id in the other store.
	short, err := s.Create(ctx, volume.Spec{Name: string(disk.ID[:4]), Size: mib})
	if err != nil {
		t.Fatal(err)
	}
	if v, err := s.Get(ctx, short.Name); err != nil || v.ID != short.ID {
		t.Errorf("%s is %+v, %v", short.Name, v, err)
	}
	user := vm.NewID()
	if v, d, err := s.Attach(ctx, "disk", user, volume.Mode{}); err != nil || len(v.Attachments) != 1 || d.Path != devices["disk"] {
		t.Errorf("%+v, %+v, %v", v, d, err)
	}
	if err := s.Detach(ctx, "disk", user); err != nil {
		t.Error(err)
	}
	snap, err := s.Snapshot(ctx, "made", volume.Spec{Name: "x"})
	if err != nil {
		t.Fatal(err)
	}
	for what, try := range map[string]func() error{
		"create":        func() error { _, err := s.Create(ctx, volume.Spec{Name: "disk", Size: mib}); return err },
		"clone":         func() error { _, err := s.Clone(ctx, "made", volume.Spec{Name: "disk"}); return err },
		"from snapshot": func() error { _, err := s.FromSnapshot(ctx, "x", volume.Spec{Name: "disk"}); return err },
		"import": func() error {
			_, err := s.Import(ctx, volume.Spec{Name: "disk"}, strings.NewReader("x"), nil)
			return err
		},
		"rename": func() error { _, err := s.Update(ctx, "made", func(v *volume.Volume) { v.Name = "disk" }); return err },
	} {
		if err := try(); !errdefs.IsAlreadyExists(err) || !strings.Contains(err.Error(), "disk") {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, try := range map[string]func() error{
		"delete":   func() error { return s.Delete(ctx, "disk") },
		"snapshot": func() error { _, err := s.Snapshot(ctx, "disk", volume.Spec{}); return err },
		"restore":  func() error { _, err := s.Restore(ctx, "disk", string(snap.ID)); return err },
		"clone":    func() error { _, err := s.Clone(ctx, "disk", volume.Spec{}); return err },
		"export":   func() error { return s.Export(ctx, "disk", io.Discard) },
	} {
		if err := try(); !errdefs.Is(err, errdefs.Unsupported) || !strings.Contains(err.Error(), "volume disk") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := s.Create(vm.OnBehalf(ctx, vm.Owner{Namespace: "prod"}), volume.Spec{Name: "disk", Size: mib}); err != nil {
		t.Errorf("another owner's volume of that name: %v", err)
	}
	if v, err := s.Get(ctx, "disk"); err != nil || v.ID != disk.ID {
		t.Errorf("the operator's disk is %+v, %v", v, err)
	}
	if _, err := s.Get(vm.OnBehalf(ctx, vm.Owner{Namespace: "test"}), "disk"); !errdefs.IsNotFound(err) {
		t.Errorf("the disk of somebody who has none: %v", err)
	}
	// A device whose name somebody has taken meanwhile is no volume.
	if err := s.close(); err != nil {
		t.Fatal(err)
	}
	devices["made"] = device("three")
	s = open(t, dir, devices)
	if v, err := s.Get(ctx, "made"); err != nil || v.ID != made.ID {
		t.Errorf("made is %+v, %v", v, err)
	}
	for name, text := range map[string]string{"one": "o", "two": "t", "three": "t"} {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != strings.Repeat(text, mib) {
			t.Errorf("device %s has changed: %v", name, err)
		}
	}
}

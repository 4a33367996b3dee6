package engine_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// onHost is a VM that boots from a file of the node.
func onHost(name string, d vm.HostDisk) vm.Spec {
	s := cloud()
	s.Name, s.Image = name, vm.FromVolume("root")
	s.Volumes = []vm.Volume{{Name: "root", Kind: vm.VolumeHostDisk, HostDisk: &d}}
	return s
}

// A VM boots from a file of the node, which is made if it may be, and which stays when the VM is removed.
func TestHostDisk(t *testing.T) {
	r, root := folders(t)
	ctx := t.Context()
	path := filepath.Join(root, "all", "disk")
	rec := r.must(r.Launch(ctx, onHost("web", vm.HostDisk{Path: path, Capacity: 1 << 20})))
	want := vm.Disk{Path: path, Root: filepath.Join(root, "all"), Format: vm.DiskRaw, Serial: "cocoon-h000", Role: vm.RoleHost}
	same := func(what string, rec vm.Record) {
		t.Helper()
		if d := diff.Of(want, rec.Disks[0]); d != "" {
			t.Errorf("%s: %s", what, d)
		}
		r.placed(what, "host, cidata", rec)
	}
	same("launched", rec)
	if st, err := os.Stat(path); err != nil || st.Size() != 1<<20 {
		t.Fatalf("%+v, %v", st, err)
	}
	if err := os.WriteFile(path, []byte("what the guest has written"), 0o600); err != nil {
		t.Fatal(err)
	}
	same("restarted", r.must(r.Restart(ctx, "web", 0)))
	for what, err := range map[string]error{
		"a snapshot":    errorOf(r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"})),
		"a hibernation": errorOf(r.Hibernate(ctx, "web", "")),
	} {
		wantClass(t, what, err, errdefs.FailedPrecondition)
	}
	if err := r.Remove(ctx, "web", true); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || !strings.HasPrefix(string(text), "what the guest") {
		t.Errorf("the file has %q, %v", text, err)
	}
}

func errorOf[T any](_ T, err error) error { return err }

// Two running VMs have one file only if both share it, or only read it.
func TestHostDiskOfTwo(t *testing.T) {
	r, root := folders(t)
	ctx := t.Context()
	path := filepath.Join(root, "all", "disk")
	for what, c := range map[string]struct {
		first, second vm.HostDisk
		ok            bool
	}{
		"exclusive":  {vm.HostDisk{}, vm.HostDisk{}, false},
		"one shares": {vm.HostDisk{Shared: true}, vm.HostDisk{}, false},
		"one reads":  {vm.HostDisk{}, vm.HostDisk{ReadOnly: true}, false},
		"both share": {vm.HostDisk{Shared: true}, vm.HostDisk{Shared: true}, true},
		"both read":  {vm.HostDisk{ReadOnly: true}, vm.HostDisk{ReadOnly: true}, true},
	} {
		if err := os.WriteFile(path, make([]byte, 512), 0o600); err != nil {
			t.Fatal(err)
		}
		c.first.Path, c.second.Path = path, path
		r.must(r.Launch(ctx, onHost("first", c.first)))
		_, err := r.Launch(ctx, onHost("second", c.second))
		if c.ok != (err == nil) || err != nil && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", what, err)
		}
		if err != nil && strings.Contains(err.Error(), "first") {
			t.Errorf("%s: the error names the other VM: %v", what, err)
		}
		r.must(r.Stop(ctx, "first", 0))
		if !c.ok {
			r.must(r.Launch(ctx, onHost("second", c.second)))
			_, err = r.Start(ctx, "first")
			wantClass(t, what+", started again", err, errdefs.FailedPrecondition)
		}
		r.clearAll()
	}
}

// What the operator does not allow to the owner, and what is no file, leaves nothing behind.
func TestHostDiskThatCannotBe(t *testing.T) {
	r, root := folders(t)
	ctx := t.Context()
	outside := filepath.Join(t.TempDir(), "secret")
	if err := errors.Join(os.WriteFile(outside, nil, 0o600), os.Symlink(outside, filepath.Join(root, "all", "alias"))); err != nil {
		t.Fatal(err)
	}
	for what, d := range map[string]vm.HostDisk{
		"not allowed":        {Path: outside},
		"made elsewhere":     {Path: outside + "-new", Capacity: 512},
		"a link":             {Path: filepath.Join(root, "all", "alias")},
		"a link to be made":  {Path: filepath.Join(root, "all", "alias"), Capacity: 512},
		"missing":            {Path: filepath.Join(root, "all", "none")},
		"a folder":           {Path: filepath.Join(root, "all", "in"), Capacity: 512},
		"beside the allowed": {Path: filepath.Join(root, "alldisk"), Capacity: 512},
	} {
		_, err := r.Launch(ctx, onHost("web", d))
		wantClass(t, what, err, errdefs.FailedPrecondition)
	}
	s := onHost("web", vm.HostDisk{Path: filepath.Join(root, "all", "file")})
	s.Image = "demo"
	_, err := r.Launch(ctx, s)
	wantClass(t, "a container image", err, errdefs.InvalidArgument)
	r.clearAll()
	if _, err := os.Stat(outside + "-new"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file was made outside: %v", err)
	}
}

// The operator allows a folder to one namespace, or to read only.
func TestHostDiskOfNamespace(t *testing.T) {
	mine, root := folders(t)
	file, readOnly := filepath.Join(root, "prod", "disk"), filepath.Join(root, "fixed", "disk")
	for _, path := range []string{file, readOnly} {
		if err := os.WriteFile(path, make([]byte, 512), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	_, err := mine.Launch(mine.as("dev"), onHost("dev", vm.HostDisk{Path: file}))
	wantClass(t, "of another namespace", err, errdefs.FailedPrecondition)
	mine.must(mine.Launch(mine.as("prod"), onHost("prod", vm.HostDisk{Path: file})))
	for what, d := range map[string]vm.HostDisk{"written to a folder to read": {Path: readOnly}, "made there": {Path: readOnly + "-new", Capacity: 512, ReadOnly: true}} {
		_, err = mine.Launch(mine.as("dev"), onHost("dev", d))
		wantClass(t, what, err, errdefs.FailedPrecondition)
	}
	mine.must(mine.Launch(mine.as("dev"), onHost("dev", vm.HostDisk{Path: readOnly, ReadOnly: true})))
}

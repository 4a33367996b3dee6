package firmware_test

import (
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/engine/firmware"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func record(namespace, name, key string, id vm.ID) vm.Record {
	return vm.Record{ID: id, Owner: vm.Owner{Namespace: namespace}, Spec: vm.Spec{Name: name, Hardware: &vm.Hardware{TPM: vm.TPMPersistent, Keep: key}}}
}

// written returns a folder as firmware leaves it.
func written(t *testing.T, text string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "firmware")
	if err := os.MkdirAll(filepath.Join(dir, "tpm"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"efivars.fd", "tpm/state"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text+" "+name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// laid returns what the VM of r gets; "" for nothing.
func laid(t *testing.T, s *firmware.Store, r vm.Record) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "firmware")
	if err := s.Lay(r, to); err != nil {
		t.Fatal(err)
	}
	text, _ := os.ReadFile(filepath.Join(to, "tpm", "state"))
	if _, err := os.Stat(filepath.Join(to, "efivars.fd")); (err == nil) != (len(text) > 0) {
		t.Errorf("a part of the state is missing: %q, %v", text, err)
	}
	return string(text)
}

func keep(t *testing.T, s *firmware.Store, r vm.Record, from string) {
	t.Helper()
	if err := s.Keep(r, from); err != nil {
		t.Fatal(err)
	}
}

func TestStateOutlivesItsVM(t *testing.T) {
	s := firmware.New(filepath.Join(t.TempDir(), "kept"))
	first := record("prod", "web", "uid", "one")
	if got := laid(t, s, first); got != "" {
		t.Errorf("a first VM gets %q", got)
	}
	dir := written(t, "first")
	keep(t, s, first, dir)
	keep(t, s, first, dir) // as after a crash
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the folder of the VM stays: %v", err)
	}
	if got := laid(t, s, record("prod", "web", "uid", "two")); got != "first tpm/state" {
		t.Errorf("the next VM gets %q", got)
	}
	for what, r := range map[string]vm.Record{
		"another namespace": record("dev", "web", "uid", "x"), "another name": record("prod", "db", "uid", "x"), "another key": record("prod", "web", "uid2", "x"),
	} {
		if got := laid(t, s, r); got != "" {
			t.Errorf("a VM with %s gets %q", what, got)
		}
	}
	keep(t, s, record("prod", "web", "uid", "never"), filepath.Join(t.TempDir(), "none")) // it has not started
	if got := laid(t, s, first); got != "first tpm/state" {
		t.Errorf("after a VM that has not started, the next one gets %q", got)
	}
	keep(t, s, record("prod", "web", "uid", "two"), written(t, "second"))
	if got := laid(t, s, first); got != "second tpm/state" {
		t.Errorf("after a second VM, the next one gets %q", got)
	}
	keep(t, s, record("prod", "web", "uid", "two"), written(t, "third")) // its removal failed, and it ran again
	if got := laid(t, s, first); got != "third tpm/state" {
		t.Errorf("after the second VM ran again, the next one gets %q", got)
	}
}

// A crash between the steps of Keep loses neither the old nor the new state.
func TestInterrupted(t *testing.T) {
	root := t.TempDir()
	s := firmware.New(root)
	keep(t, s, record("prod", "web", "uid", "one"), written(t, "first"))
	entries, err := filepath.Glob(root + "/*")
	if err != nil || len(entries) != 1 {
		t.Fatal(entries, err)
	}
	dir := written(t, "second")
	if err := os.Rename(dir, filepath.Join(entries[0], "two")); err != nil { // moved, and not yet recorded
		t.Fatal(err)
	}
	two := record("prod", "web", "uid", "two")
	if got := laid(t, s, two); got != "first tpm/state" {
		t.Errorf("before the removal goes on, a VM gets %q", got)
	}
	keep(t, s, two, dir)
	if got := laid(t, s, two); got != "second tpm/state" {
		t.Errorf("afterwards, it gets %q", got)
	}
	if all, _ := os.ReadDir(entries[0]); len(all) != 2 {
		t.Errorf("%d files are left of the first state and the second", len(all))
	}
}

func TestOwners(t *testing.T) {
	s := firmware.New(filepath.Join(t.TempDir(), "kept"))
	keep(t, s, record("prod", "web", "uid", "a"), written(t, "a"))
	keep(t, s, record("dev", "web", "uid", "b"), written(t, "b"))
	keep(t, s, record("", "web", "mine", "c"), written(t, "c"))
	keep(t, s, record("prod", "web", "uid2", "d"), written(t, "d")) // a machine that was made anew: the state of the first goes
	var got []string
	for _, by := range []vm.Owner{{}, {Namespace: "prod"}, {Namespace: "dev"}, {Namespace: "other"}} {
		all, err := s.List(by)
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range all {
			got = append(got, by.Namespace+" sees "+k.Owner.Namespace+"/"+k.VM+" "+k.Key)
		}
	}
	want := []string{" sees /web mine", " sees dev/web uid", " sees prod/web uid2", "prod sees prod/web uid2", "dev sees dev/web uid"}
	if d := diff.Of(want, got); d != "" {
		t.Error(d)
	}
	k := vm.KeptFirmware{Owner: vm.Owner{Namespace: "prod"}, VM: "web", Key: "uid2"}
	if err := s.Drop(vm.Owner{Namespace: "dev"}, k); !errdefs.IsNotFound(err) {
		t.Errorf("another namespace removes it: %v", err)
	}
	if err := s.Drop(vm.Owner{}, k); err != nil {
		t.Error(err)
	}
	if err := s.Drop(vm.Owner{}, k); !errdefs.IsNotFound(err) {
		t.Errorf("it was removed twice: %v", err)
	}
}

// What a TPM that was taken over has left does not lead out of its folder.
func TestHostileState(t *testing.T) {
	root := t.TempDir()
	s := firmware.New(root)
	r := record("prod", "web", "uid", "one")
	dir := written(t, "x")
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "tpm", "link")); err != nil {
		t.Fatal(err)
	}
	keep(t, s, r, dir)
	if err := s.Lay(r, filepath.Join(t.TempDir(), "to")); !errdefs.Is(err, errdefs.DataLoss) {
		t.Errorf("a link is copied: %v", err)
	}
	entries, _ := filepath.Glob(root + "/*/kept.json")
	for _, text := range []string{`{"vm":"web","from":"../../x"}`, `{"vm":"web"}`, `noise`, ``} {
		if err := os.WriteFile(entries[0], []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := s.Lay(r, filepath.Join(t.TempDir(), "to")); !errdefs.Is(err, errdefs.DataLoss) {
			t.Errorf("%q: %v", text, err)
		}
		if all, err := s.List(vm.Owner{}); err != nil || len(all) != 0 {
			t.Errorf("%q is listed: %v, %v", text, all, err)
		}
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(entries[0]), "one", "efivars.fd")); err != nil {
		t.Errorf("damage removes the state: %v", err)
	}
}

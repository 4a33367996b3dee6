package engine_test

import (
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// secured is a guest whose TPM keeps its state for the next VM of its name with the key.
func secured(key string) vm.Spec {
	s := cloud()
	s.Hardware = &vm.Hardware{TPM: vm.TPMPersistent, Keep: key}
	return s
}

func TestFirmwareOutlivesItsVM(t *testing.T) {
	r := newRig(t)
	prod := vm.OnBehalf(t.Context(), vm.Owner{Namespace: "prod"})
	state := func(rec vm.Record) string { return filepath.Join(r.dir, "state", "vms", string(rec.ID), "firmware") }
	read := func(rec vm.Record) string {
		text, _ := os.ReadFile(filepath.Join(state(rec), "tpm"))
		return string(text)
	}
	write := func(rec vm.Record, text string) { // as a driver does
		if err := os.MkdirAll(state(rec), 0o711); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(state(rec), "tpm"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	rec := r.must(r.Create(prod, secured("uid")))
	write(rec, "one")
	if err := r.Remove(prod, "web", true); err != nil {
		t.Fatal(err)
	}
	r.restart()
	rec = r.must(r.Create(prod, secured("uid")))
	if got := read(rec); got != "one" {
		t.Errorf("the next VM has %q", got)
	}
	if err := r.Remove(prod, "web", true); err != nil { // it never ran
		t.Fatal(err)
	}
	for what, other := range map[string]struct {
		owner vm.Owner
		spec  vm.Spec
	}{
		"the operator's": {spec: secured("uid")}, "of another namespace": {owner: vm.Owner{Namespace: "dev"}, spec: secured("uid")}, "with another key": {owner: vm.Owner{Namespace: "prod"}, spec: secured("uid2")},
	} {
		on := vm.OnBehalf(t.Context(), other.owner)
		if got := read(r.must(r.Create(on, other.spec))); got != "" {
			t.Errorf("a VM %s has %q", what, got)
		}
		if err := r.Remove(on, "web", true); err != nil {
			t.Fatal(err)
		}
	}
	kept, err := r.KeptFirmware(prod)
	if err != nil || len(kept) != 1 || kept[0].VM != "web" || kept[0].Key != "uid" {
		t.Fatalf("kept: %+v, %v", kept, err)
	}
	wantClass(t, "removal by another namespace", r.DropFirmware(vm.OnBehalf(t.Context(), vm.Owner{Namespace: "dev"}), kept[0]), errdefs.NotFound)
	if err := r.DropFirmware(prod, kept[0]); err != nil {
		t.Error(err)
	}
	rec = r.must(r.Create(prod, secured("uid")))
	if got := read(rec); got != "" {
		t.Errorf("after its removal, the next VM has %q", got)
	}
	write(rec, "two")
	if err := r.Reset(t.Context()); err != nil {
		t.Fatal(err)
	}
	if kept, err := r.KeptFirmware(t.Context()); err != nil || len(kept) > 0 {
		t.Errorf("after a reset: %+v, %v", kept, err)
	}
	r.clean()
}

// A clone has firmware of its own, and what it keeps goes with it.
func TestCloneKeepsNoFirmware(t *testing.T) {
	r, ctx := newRig(t), t.Context()
	s := cloud()
	s.Firmware, s.Hardware = vm.FirmwareUEFI, &vm.Hardware{UEFI: vm.UEFI{Persistent: true}, Keep: "uid"}
	r.must(r.Create(ctx, s))
	if _, err := r.SaveSnapshot(ctx, "web", vm.SaveSpec{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	rec := r.must(r.Clone(ctx, vm.CloneSpec{Snapshot: "gold", Name: "other"}))
	if rec.Spec.KeepsFirmware() != "" || !rec.Spec.Hardware.UEFI.Persistent {
		t.Errorf("a clone has %+v", rec.Spec.Hardware)
	}
}

package engine

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

// A guest that is Windows has a drive for its drivers, whether their file is there or not, and its snapshots say what it is.
func TestWindowsGuest(t *testing.T) {
	iso := filepath.Join(t.TempDir(), "virtio-win.iso")
	e := newNode(Config{DefaultDriver: "d", Kernel: "k", WindowsDrivers: iso}, Deps{Drivers: map[string]hypervisor.Driver{"d": nopDriver{}}})
	spec := vm.Spec{Name: "win", Image: "x"}.AsWindows().Default()
	r, err := e.design(spec, "d", image.Image{Type: vm.ImageDisk})
	if err != nil {
		t.Fatal(err)
	}
	if r.Boot.Firmware != vm.FirmwareUEFI {
		t.Errorf("it boots by %s", r.Boot.Firmware)
	}
	p := e.planOf(r)
	if d := diff.Of(&hypervisor.Drive{}, p.Drive); d != "" || !strings.Contains(e.missingDrivers(p.Drive), iso) {
		t.Errorf("without the file: %s, it lacks %q", d, e.missingDrivers(p.Drive))
	}
	if err := os.WriteFile(iso, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	p = e.planOf(r)
	if d := diff.Of(&hypervisor.Drive{ISO: iso}, p.Drive); d != "" || e.missingDrivers(p.Drive) != "" {
		t.Errorf("with the file: %s, it lacks %q", d, e.missingDrivers(p.Drive))
	}
	var x snapshot.Snapshot
	if describe(&x, r); !x.Windows {
		t.Error("its snapshot does not say that it is Windows")
	}

	other, err := e.design(vm.Spec{Name: "web", Image: "x"}.Default(), "d", image.Image{Type: vm.ImageDisk})
	if err != nil || e.planOf(other).Drive != nil {
		t.Errorf("another guest: %+v, %v", e.planOf(other).Drive, err)
	}
	if _, err := e.design(spec, "d", image.Image{Type: vm.ImageOCI, Config: vm.Process{Entrypoint: []string{"sh"}}}); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "container image") {
		t.Errorf("a container image: %v", err)
	}
}

// An interface that cannot be replaced keeps its hardware address where the same VM wakes, and no other VM resumes with it.
func TestModelsKeepTheirMAC(t *testing.T) {
	prod := vm.Owner{Namespace: "prod"}
	x := snapshot.Snapshot{Owner: prod, Source: snapshot.Source{VMName: "win"}, NIC: []vm.NIC{{MAC: "02:00:00:00:00:01"}, {MAC: "02:00:00:00:00:02"}}}
	clone := func(name string, nics ...vm.NICSpec) vm.Spec {
		return vm.Spec{Name: name, NICs: nics, Hardware: &vm.Hardware{NICs: []vm.NICModel{vm.NICVirtio, vm.NICE1000E}}}
	}
	same := clone("win", vm.NICSpec{}, vm.NICSpec{Network: "lab"})
	if err := keepMACs(x, prod, &same); err != nil {
		t.Fatal(err)
	}
	if d := diff.Of([]vm.NICSpec{{}, {Network: "lab", MAC: "02:00:00:00:00:02"}}, same.NICs); d != "" {
		t.Error(d)
	}
	for what, s := range map[string]vm.Spec{
		"another VM":                   clone("win-1", vm.NICSpec{}, vm.NICSpec{}),
		"the same VM, another address": clone("win", vm.NICSpec{}, vm.NICSpec{MAC: "02:00:00:00:00:03"}),
	} {
		if err := keepMACs(x, prod, &s); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	foreign := clone("win", vm.NICSpec{}, vm.NICSpec{})
	if err := keepMACs(x, vm.Owner{Namespace: "dev"}, &foreign); !errdefs.IsFailedPrecondition(err) || foreign.NICs[1].MAC != "" {
		t.Errorf("a VM of that name of another owner: %+v, %v", foreign.NICs, err)
	}
	asked := clone("win-1", vm.NICSpec{}, vm.NICSpec{MAC: "02:00:00:00:00:02"})
	if err := keepMACs(x, prod, &asked); err != nil {
		t.Errorf("an address that is asked for: %v", err)
	}
	virtio := vm.Spec{Name: "web", NICs: []vm.NICSpec{{}}}
	if err := keepMACs(x, prod, &virtio); err != nil || virtio.NICs[0].MAC != "" {
		t.Errorf("a usual machine: %+v, %v", virtio.NICs, err)
	}
}

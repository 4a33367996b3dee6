package engine

import (
	"context"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// saver is a driver that resumes what its program has saved.
type saver struct {
	nopDriver
	machine vm.Machine
	absent  error // of Machine, for a program that is not there
	lacks   error // of Check
}

func (d saver) Machine(context.Context, vm.Accel) (vm.Machine, error) { return d.machine, d.absent }

func (d saver) Check(context.Context, hypervisor.Plan) error { return d.lacks }

func machineOf(driver, version, format string) vm.Machine {
	return vm.Machine{Driver: driver, Version: version, Type: format, Arch: "any", Accel: vm.AccelKVM, CPU: "host", Flags: []string{"aes"}}
}

// TestDriverOfAClone: what was saved with its memory resumes in the program that saved it, or not at all. Any program boots its disks.
func TestDriverOfAClone(t *testing.T) {
	noKVM := errdefs.Unavailablef("it needs KVM: /dev/kvm is missing")
	own, other := machineOf("own", "1.2", "f3"), machineOf("d", "7.2", "q35")
	for what, c := range map[string]struct {
		own    saver
		cold   bool
		driver string
		class  errdefs.Class
		names  []string // what the refusal says
	}{
		"live":                 {own: saver{machine: own}, driver: "own"},
		"cold":                 {own: saver{machine: own}, cold: true, driver: "own"},
		"live, without KVM":    {own: saver{machine: own, nopDriver: nopDriver{broken: noKVM}}, class: errdefs.Unavailable, names: []string{"own 1.2 (f3)", "/dev/kvm is missing", "d 7.2 (q35)", "on a node that matches"}},
		"cold, without KVM":    {own: saver{machine: own, nopDriver: nopDriver{broken: noKVM}}, cold: true, driver: "d"},
		"live, but it lacks":   {own: saver{machine: own, lacks: errdefs.Unsupportedf("no such thing")}, class: errdefs.Unsupported, names: []string{"no such thing"}},
		"cold, but it lacks":   {own: saver{machine: own, lacks: errdefs.Unsupportedf("no such thing")}, cold: true, class: errdefs.Unsupported, names: []string{"no such thing"}},
		"live, another format": {own: saver{machine: machineOf("own", "2.0", "f4")}, class: errdefs.FailedPrecondition, names: []string{"own 1.2 (f3)", "own 2.0 (f4)", "on a node that matches"}},
	} {
		n := newNode(Config{DefaultDriver: "d", Kernel: "/k"}, Deps{Drivers: map[string]hypervisor.Driver{"own": c.own, "d": saver{machine: other}}})
		x := snapshot.Snapshot{
			ID: "x", Name: "x", Live: true, Hypervisor: "own", Machine: own, CPU: 1, Memory: 1 << 30, Storage: 1 << 30, ImageType: vm.ImageOCI,
			Record: vm.Record{Spec: vm.Spec{Name: "web", Image: "x", Sandbox: true}.Default(), ImageType: vm.ImageOCI},
		}
		r, _, err := n.designCopy(t.Context(), x, vm.CloneSpec{Snapshot: "x", Name: "copy", Cold: c.cold}, vm.NewID(), nil)
		if r.Driver != c.driver && err == nil || errdefs.ClassOf(err) != c.class {
			t.Errorf("%s: in %q, %v; want %q", what, r.Driver, err, c.driver)
		}
		for _, name := range c.names {
			if err != nil && !strings.Contains(err.Error(), name) {
				t.Errorf("%s: no word of %q: %v", what, name, err)
			}
		}
	}
}

// TestResumable: a refusal names what has saved the state and what is here, and ends with what to do.
func TestResumable(t *testing.T) {
	fire := machineOf("fire", "1.16.1", "snapshot-10.0.0")
	slow := fire
	slow.Accel, slow.CPU, slow.Flags = vm.AccelTCG, "max", nil
	other := saver{machine: machineOf("big", "7.2.22", "pc-q35-7.2")}
	gone := errdefs.Unavailablef("Fire is not installed")
	for what, c := range map[string]struct {
		drivers drivers
		accel   vm.Accel
		class   errdefs.Class
		want    string
	}{
		"the same":      {drivers{"fire": saver{machine: fire}, "big": other}, vm.AccelAuto, 0, ""},
		"another patch": {drivers{"fire": saver{machine: machineOf("fire", "1.16.2", "snapshot-10.0.0")}}, vm.AccelAuto, 0, ""},
		"no driver": {
			drivers{"big": other},
			vm.AccelAuto, errdefs.FailedPrecondition,
			"it was saved by fire 1.16.1 (snapshot-10.0.0), which this node does not have; what works here is big 7.2.22 (pc-q35-7.2); do this",
		},
		"a driver that resumes nothing": {
			drivers{"fire": nopDriver{}},
			vm.AccelAuto, errdefs.FailedPrecondition,
			"it was saved by fire 1.16.1 (snapshot-10.0.0), which this node does not have; no hypervisor works here; do this",
		},
		"not installed": {
			drivers{"fire": saver{nopDriver: nopDriver{broken: gone}}, "big": other},
			vm.AccelAuto, errdefs.Unavailable,
			"it was saved by fire 1.16.1 (snapshot-10.0.0), which does not work on this node: Fire is not installed; what works here is big 7.2.22 (pc-q35-7.2); do this",
		},
		"removed since": {
			drivers{"fire": saver{absent: gone}, "big": saver{nopDriver: nopDriver{broken: gone}, machine: other.machine}},
			vm.AccelAuto, errdefs.Unavailable,
			"it was saved by fire 1.16.1 (snapshot-10.0.0), which does not work on this node: Fire is not installed; no hypervisor works here; do this",
		},
		"another format": {
			drivers{"fire": saver{machine: machineOf("fire", "2.0.0", "snapshot-11.0.0")}, "big": other},
			vm.AccelAuto, errdefs.FailedPrecondition,
			"it was saved on another kind of machine: by fire 1.16.1 (snapshot-10.0.0), and this node has fire 2.0.0 (snapshot-11.0.0); do this",
		},
		"another CPU": {
			drivers{"fire": saver{machine: slow}},
			vm.AccelKVM, errdefs.FailedPrecondition,
			"it was saved on another kind of machine: by fire 1.16.1 (snapshot-10.0.0), and this node has fire 1.16.1 (snapshot-10.0.0); accelerator kvm (here: tcg); " +
				"CPU model host (here: max); CPU flags aes (missing here); do this",
		},
		"another fault": {drivers{"fire": saver{absent: errdefs.New(errdefs.Internal, "oops")}}, vm.AccelAuto, errdefs.Internal, "oops"},
	} {
		x := snapshot.Snapshot{Hypervisor: "fire", Machine: fire}
		accel, err := c.drivers.resumable(t.Context(), x, c.accel, "do this")
		if errdefs.ClassOf(err) != c.class || err != nil && err.Error() != c.want || accel != c.accel {
			t.Errorf("%s: %s, %v\nwant %s", what, accel, err, c.want)
		}
	}
}

// TestRestoreInItsDriver: Restore refuses memory that another hypervisor has saved, also if the record of a snapshot from elsewhere says otherwise.
func TestRestoreInItsDriver(t *testing.T) {
	own := machineOf("own", "1.2", "f3")
	n := newNode(Config{DefaultDriver: "d"}, Deps{Drivers: map[string]hypervisor.Driver{"own": saver{machine: own}, "d": saver{machine: machineOf("d", "7.2", "q35")}}})
	x := snapshot.Snapshot{Name: "x", Source: snapshot.Source{VMID: "a"}, Live: true, Hypervisor: "own", Machine: own, Image: vm.FromVolume("v")}
	for driver, class := range map[string]errdefs.Class{"own": 0, "d": errdefs.FailedPrecondition} {
		if _, err := n.restorable(t.Context(), vm.Record{ID: "a", Driver: driver}, x); errdefs.ClassOf(err) != class {
			t.Errorf("in %s: %v", driver, err)
		}
	}
}

package engine

import (
	"context"
	"reflect"
	"slices"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestStopped(t *testing.T) {
	for name, tt := range map[string]struct {
		reason string // set while it ran
		how    ending
		want   string
	}{
		"asked":               {how: ending{asked: true}, want: vm.ReasonStopped},
		"killed":              {how: ending{asked: true, killed: true}, want: vm.ReasonKilled},
		"powered off":         {how: ending{exit: hypervisor.Exit{GuestShutdown: true}}, want: vm.ReasonPoweredOff},
		"reset":               {how: ending{exit: hypervisor.Exit{GuestReset: true}}, want: vm.ReasonCrashed},
		"signal":              {how: ending{exit: hypervisor.Exit{Signal: 11, Code: -1}}, want: vm.ReasonCrashed},
		"code":                {how: ending{exit: hypervisor.Exit{Code: 1}}, want: vm.ReasonCrashed},
		"unknown":             {how: ending{exit: hypervisor.Exit{Code: -1}}, want: vm.ReasonCrashed},
		"lost":                {how: ending{lost: true}, want: vm.ReasonLost},
		"exited, then killed": {reason: vm.ReasonExited, how: ending{asked: true, killed: true}, want: vm.ReasonExited},
		"not set up":          {reason: vm.ReasonStartFailed, how: ending{exit: hypervisor.Exit{Signal: 9}}, want: vm.ReasonStartFailed},
	} {
		r := vm.Record{State: vm.StateRunning, PID: 7, Handle: []byte("h"), AgentReady: true, Reason: tt.reason}
		at := time.Unix(9, 0)
		stopped(&r, tt.how, at)
		if r.Reason != tt.want || r.State != vm.StateStopped || r.PID != 0 || r.Handle != nil || r.AgentReady || r.StoppedAt != at {
			t.Errorf("%s: got %+v, want reason %s", name, r, tt.want)
		}
	}
}

func TestStarted(t *testing.T) {
	code := 1
	r := vm.Record{State: vm.StateStopped, Reason: vm.ReasonExited, Message: "x", ExitCode: &code}
	started(&r, []byte("h"), 7, time.Unix(1, 0))
	if r.Restarts != 0 || r.Reason != "" || r.Message != "" || r.ExitCode != nil || r.PID != 7 || !r.FirstBooted {
		t.Errorf("first start: %+v", r)
	}
	started(&r, []byte("h"), 8, time.Unix(2, 0))
	if r.Restarts != 1 {
		t.Errorf("second start: %+v", r)
	}
}

// TestPlanOfSandbox: the driver is told in which cgroup of the node the VM is.
func TestPlanOfSandbox(t *testing.T) {
	e := newNode(Config{DefaultDriver: "d"}, Deps{Drivers: map[string]hypervisor.Driver{"d": nopDriver{}}})
	for _, parent := range []string{"", "/kubepods/pod1"} {
		if p := e.planOf(vm.Record{ID: vm.NewID(), ImageType: vm.ImageOCI, Spec: vm.Spec{Sandbox: true, CgroupParent: parent}}); p.CgroupParent != parent {
			t.Errorf("the VM is in %q, want %q", p.CgroupParent, parent)
		}
	}
}

func TestNodeWithoutNetwork(t *testing.T) {
	e := newNode(Config{DefaultDriver: "d"}, Deps{Drivers: map[string]hypervisor.Driver{"d": nopDriver{}}})
	disk := image.Image{Type: vm.ImageDisk}
	r, err := e.design(vm.Spec{Image: "x", NICs: []vm.NICSpec{{}}}, "d", disk)
	if err != nil || len(r.Spec.NICs) != 0 {
		t.Errorf("interface on no network: %+v, %v", r.Spec.NICs, err)
	}
	if _, err := e.design(vm.Spec{Image: "x", NICs: []vm.NICSpec{{Network: "lan"}}}, "d", disk); !errdefs.IsInvalid(err) {
		t.Errorf("interface on a network that is not there: %v", err)
	}
}

func TestDriverOfAVM(t *testing.T) {
	e := newNode(Config{DefaultDriver: "d", StandIns: []string{"other", "more", "broken"}}, Deps{Drivers: map[string]hypervisor.Driver{
		"d": nopDriver{}, "more": nopDriver{}, "broken": nopDriver{broken: errdefs.Unavailablef("there is no KVM")}, "own": nopDriver{broken: errdefs.Unavailablef("there is no KVM")},
	}})
	for want, driver := range map[string]string{"": "d", "d": "d", "other": "d", "more": "more", "broken": "d", "own": "own"} {
		if got, err := e.driverFor(t.Context(), want); err != nil || got != driver {
			t.Errorf("%q runs in %q, %v; want %q", want, got, err, driver)
		}
	}
	if _, err := e.driverFor(t.Context(), "unknown"); !errdefs.IsInvalid(err) {
		t.Errorf("an unknown hypervisor: %v", err)
	}
}

// nopDriver is a driver that starts nothing.
type nopDriver struct {
	hypervisor.Driver
	broken error
}

func (d nopDriver) Probe(context.Context) (hypervisor.Info, error) {
	return hypervisor.Info{}, d.broken
}

// uefiDriver is nopDriver without a BIOS.
type uefiDriver struct{ nopDriver }

func (uefiDriver) Firmware() vm.Firmware { return vm.FirmwareUEFI }

// A disk guest that asks for no firmware gets one that its hypervisor has.
func TestFirmwareOfADriver(t *testing.T) {
	e := newNode(Config{DefaultDriver: "d"}, Deps{Drivers: map[string]hypervisor.Driver{"d": nopDriver{}, "uefi": uefiDriver{}}})
	for _, tt := range []struct {
		driver    string
		ask, want vm.Firmware
	}{{"d", "", vm.FirmwareBIOS}, {"d", vm.FirmwareUEFI, vm.FirmwareUEFI}, {"uefi", "", vm.FirmwareUEFI}, {"uefi", vm.FirmwareBIOS, vm.FirmwareBIOS}} {
		r, err := e.design(vm.Spec{Image: "x", Firmware: tt.ask}, tt.driver, image.Image{Type: vm.ImageDisk})
		if err != nil || r.Boot.Firmware != tt.want || r.Spec.Firmware != tt.ask {
			t.Errorf("%q in %s: %q, %v; want %q", tt.ask, tt.driver, r.Boot.Firmware, err, tt.want)
		}
	}
}

func TestCloudInitIsForDiskImages(t *testing.T) {
	e := newNode(Config{DefaultDriver: "d", Kernel: "k"}, Deps{Drivers: map[string]hypervisor.Driver{"d": nopDriver{}}})
	spec := vm.Spec{Image: "x", CloudInit: &vm.CloudInit{}}
	if _, err := e.design(spec, "d", image.Image{Type: vm.ImageDisk}); err != nil {
		t.Error(err)
	}
	oci := image.Image{Type: vm.ImageOCI, Config: vm.Process{Entrypoint: []string{"sh"}}}
	if _, err := e.design(spec, "d", oci); !errdefs.IsInvalid(err) {
		t.Errorf("cloud-init of a container image: %v", err)
	}
	spec.CloudInit.User = "joe"
	if r, err := e.design(spec, "d", image.Image{Type: vm.ImageDisk}); err != nil || r.Spec.CloudInit == nil {
		t.Errorf("user of a disk image: %+v, %v", r.Spec.CloudInit, err)
	}
	if r, err := e.design(spec, "d", oci); err != nil || r.Spec.CloudInit != nil {
		t.Errorf("user of a container image: %+v, %v; it is accepted and the record shows that it has no effect", r.Spec.CloudInit, err)
	}
	spec.CloudInit.UserData = "nothing known"
	if _, err := e.design(spec, "d", oci); !errdefs.IsInvalid(err) {
		t.Errorf("cloud-init with a user of a container image: %v", err)
	}
	if _, err := e.design(spec, "d", image.Image{Type: vm.ImageDisk}); !errdefs.IsInvalid(err) {
		t.Errorf("bad user data: %v", err)
	}
}

// DNS that a node offers to every pod is no reason to refuse an image that has its own.
func TestDNSIsForContainerImages(t *testing.T) {
	e := newNode(Config{DefaultDriver: "d", Kernel: "k"}, Deps{Drivers: map[string]hypervisor.Driver{"d": nopDriver{}}})
	disk := image.Image{Type: vm.ImageDisk}
	if _, err := e.design(vm.Spec{Image: "x", DNS: &vm.DNS{Servers: []string{"10.96.0.10"}}}, "d", disk); !errdefs.IsInvalid(err) {
		t.Errorf("DNS that a pod asks for: %v", err)
	}
	if _, err := e.design(vm.Spec{Image: "x", DNS: &vm.DNS{Servers: []string{"10.96.0.10"}, Offered: true}}, "d", disk); err != nil {
		t.Error(err)
	}
}

// A clone resolves names as its own pod, not as that of the snapshot.
func TestDNSOfAClone(t *testing.T) {
	x := snapshot.Snapshot{Record: vm.Record{Spec: vm.Spec{DNS: &vm.DNS{Searches: []string{"old.example"}}}}}
	for name, tc := range map[string]struct{ asked, want *vm.DNS }{
		"its own":        {&vm.DNS{Searches: []string{"new.example"}}, &vm.DNS{Searches: []string{"new.example"}, Offered: true}},
		"the snapshot's": {nil, x.Record.Spec.DNS},
	} {
		s, err := cloneSpec(x, vm.CloneSpec{DNS: tc.asked}, "id", true)
		if err != nil || !reflect.DeepEqual(s.DNS, tc.want) {
			t.Errorf("%s: %+v, %v", name, s.DNS, err)
		}
	}
}

// A clone's machine is like that of its source, but has no UUID of another VM.
func TestCloneHasNoUUIDOfItsSource(t *testing.T) {
	x := snapshot.Snapshot{Record: vm.Record{Spec: vm.Spec{SMBIOS: &vm.SMBIOS{UUID: "5d307ca9-b3ef-428c-8861-06e72d69f223", Serial: "7"}}}}
	s, err := cloneSpec(x, vm.CloneSpec{}, "id", false)
	if err != nil || s.SMBIOS == nil || *s.SMBIOS != (vm.SMBIOS{Serial: "7"}) || x.Record.Spec.SMBIOS.UUID == "" {
		t.Errorf("%+v, %v", s.SMBIOS, err)
	}
}

// Whoever does not know the snapshot can ask for a clone of its size.
func TestCloneKeepsTheSizeOfItsSnapshot(t *testing.T) {
	x := snapshot.Snapshot{CPU: 2, Memory: 1 << 30, NICs: 2, Record: vm.Record{Spec: vm.Spec{NICs: make([]vm.NICSpec, 2)}}}
	spec := vm.CloneSpec{CPUs: 4, Memory: 4 << 30, NICs: []vm.NICSpec{{Network: "lan"}}, Keep: vm.Keep{Size: true, NICs: true}}
	for live, want := range map[bool]vm.Spec{true: {CPUs: 2, Memory: 1 << 30}, false: {CPUs: 4, Memory: 4 << 30}} {
		s, err := cloneSpec(x, spec, "id", live)
		if err != nil || s.CPUs != want.CPUs || s.Memory != want.Memory || len(s.NICs) != 2 || s.NICs[1].Network != "lan" {
			t.Errorf("resumed %t: %+v, %v", live, s, err)
		}
	}
}

// The disks of every kind of guest are limited. A clone has the limits of its snapshot unless it asks for others.
func TestLimitsOfDisks(t *testing.T) {
	e := newNode(Config{DefaultDriver: "d"}, Deps{Drivers: map[string]hypervisor.Driver{"d": nopDriver{}}})
	r := vm.DiskRate{Bytes: 1 << 20, Ops: 100}
	for _, kind := range []vm.ImageType{vm.ImageOCI, vm.ImageDisk} {
		if p := e.planOf(vm.Record{ID: vm.NewID(), ImageType: kind, Spec: vm.Spec{DiskRate: r}}); p.DiskRate != r {
			t.Errorf("%s: %+v", kind, p.DiskRate)
		}
	}
	x := snapshot.Snapshot{Record: vm.Record{Spec: vm.Spec{DiskRate: r}}}
	for asked, want := range map[vm.DiskRate]vm.DiskRate{{}: r, {Ops: 50}: {Bytes: r.Bytes, Ops: 50}, {Bytes: 2 << 20, Ops: 50}: {Bytes: 2 << 20, Ops: 50}} {
		for _, live := range []bool{false, true} {
			if s, err := cloneSpec(x, vm.CloneSpec{DiskRate: asked}, "id", live); err != nil || s.DiskRate != want {
				t.Errorf("%+v, resumed %t: %+v, %v", asked, live, s.DiskRate, err)
			}
		}
	}
	if in := incomingOf(kept{x: x}); in.DiskRate != r {
		t.Errorf("the driver hears of %+v in the saved state", in.DiskRate)
	}
}

// kept is a snapshot without files.
type kept struct {
	snapshot.Held
	x snapshot.Snapshot
}

func (k kept) Snapshot() snapshot.Snapshot { return k.x }
func (kept) Dir() string                   { return "/" }
func (kept) Feed() string                  { return "" }

// based is a store whose images have layers.
type based struct {
	image.Store
	layers map[string][]string
}

func (b based) Base(_ context.Context, img image.Image) (disks []vm.Disk, err error) {
	for n, path := range b.layers[img.ID] {
		disks = append(disks, vm.Disk{Path: path, Role: vm.RoleLayer, Serial: image.SerialLayer(n), ReadOnly: true})
	}
	return disks, nil
}

func TestContainersShareLayers(t *testing.T) {
	e := &node{images: based{layers: map[string][]string{"a": {"base", "a"}, "b": {"base", "b", "c"}}}}
	disks, _ := e.images.Base(t.Context(), image.Image{ID: "a"})
	disks = append(disks, vm.Disk{Path: "cow", Role: vm.RoleCOW, Serial: image.SerialCOW})
	containers := []vm.ContainerRecord{{Name: "x"}, {Name: "y"}, {Name: "z"}}
	disks, err := e.layImages(t.Context(), vm.Record{Containers: containers}, []image.Image{{ID: "a"}, {ID: "b"}, {ID: "b"}}, disks)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, d := range disks {
		got = append(got, d.Path+"="+d.Serial)
	}
	want := []string{"base=cocoon-l000", "a=cocoon-l001", "cow=cocoon-cow", "b=cocoon-i000", "c=cocoon-i001"}
	if !slices.Equal(got, want) {
		t.Errorf("disks %q, want %q", got, want)
	}
	for i, want := range [][]string{{"cocoon-l000", "cocoon-l001"}, {"cocoon-l000", "cocoon-i000", "cocoon-i001"}, {"cocoon-l000", "cocoon-i000", "cocoon-i001"}} {
		if !slices.Equal(containers[i].Layers, want) {
			t.Errorf("container %s stands on %q, want %q", containers[i].Name, containers[i].Layers, want)
		}
	}
}

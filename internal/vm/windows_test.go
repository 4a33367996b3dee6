package vm

import (
	"testing"

	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func windowsSpec(h Hardware) Spec {
	h.Windows = true
	return Spec{Name: "win", Image: "windows", Hardware: &h, NICs: []NICSpec{{}, {Network: "lab"}}}
}

func TestWindowsDefaults(t *testing.T) {
	s := windowsSpec(Hardware{})
	s.Volumes = []Volume{
		{Name: "data", Kind: VolumeDisk, Disk: &VolumeUse{Ref: "d"}},
		{Name: "shared", Kind: VolumeDisk, Disk: &VolumeUse{Ref: "s", ReadOnly: true}},
		{Name: "keys", Kind: VolumeFiles, Label: "KEYS"},
		{Name: "files", Kind: VolumeFiles},
		{Name: "more", Kind: VolumeDisk, Disk: &VolumeUse{Ref: "m"}},
		{Name: "last", Kind: VolumeDisk, Disk: &VolumeUse{Ref: "l"}},
	}
	got := s.Default()
	want := &Hardware{
		Windows: true, UEFI: UEFI{Persistent: true}, CPU: CPU{HyperV: windowsHyperV}, Clock: Clock{Local: true, CatchUp: true, NoHPET: true},
		NICs: []NICModel{NICE1000E, NICE1000E},
		Disks: map[string]DiskDevice{
			DiskOfImage: {Bus: DiskSATA}, DiskOfSeed: {Bus: DiskSATA, CDROM: true}, "data": {Bus: DiskSATA}, "shared": {Bus: DiskUSB},
			"keys": {Bus: DiskSATA, CDROM: true}, "more": {Bus: DiskSATA}, "last": {Bus: DiskUSB},
		},
	}
	if d := diff.Of(want, got.Hardware); d != "" || got.Firmware != FirmwareUEFI {
		t.Errorf("%s, firmware %s", d, got.Firmware)
	}
	if err := got.Validate(); err != nil {
		t.Error(err)
	}
	if d := diff.Of(got, got.Default()); d != "" {
		t.Errorf("the defaults change what has them: %s", d)
	}
	if s.Hardware.Disks != nil || s.Hardware.NICs != nil {
		t.Errorf("the defaults change the request: %+v", s.Hardware)
	}
}

func TestWindowsKeepsWhatIsAsked(t *testing.T) {
	asked := Hardware{
		Windows: true, CPU: CPU{HideKVM: true}, Clock: Clock{Timezone: "Europe/Berlin"}, TPM: TPMPersistent, NICs: []NICModel{NICVirtio},
		Disks: map[string]DiskDevice{DiskOfImage: {Bus: DiskVirtio}, DiskOfSeed: {Bus: DiskUSB}},
	}
	s := windowsSpec(asked)
	s.Firmware = FirmwareBIOS
	want := asked
	want.Clock = Clock{Timezone: "Europe/Berlin", CatchUp: true, NoHPET: true}
	want.NICs = []NICModel{NICVirtio, NICE1000E}
	got := s.Default()
	if d := diff.Of(&want, got.Hardware); d != "" || got.Firmware != FirmwareBIOS {
		t.Errorf("%s, firmware %s", d, got.Firmware)
	}
	own := windowsSpec(Hardware{CPU: CPU{HyperV: HyperV{Features: []string{"relaxed"}}}}).Default()
	if d := diff.Of(HyperV{Features: []string{"relaxed"}}, own.Hardware.CPU.HyperV); d != "" {
		t.Error(d)
	}
	if err := got.Validate(); err != nil {
		t.Error(err)
	}
	plain := Spec{Name: "web", Image: "demo"}.Default()
	if plain.Hardware != nil || plain.Firmware != "" || plain.IsWindows() || !plain.AsWindows().IsWindows() || plain.IsWindows() {
		t.Errorf("a guest that is not Windows: %+v", plain)
	}
}

// A guest that boots from a volume has it on SATA, before other disks fill it.
func TestWindowsBootVolume(t *testing.T) {
	s := windowsSpec(Hardware{Disks: map[string]DiskDevice{"a": {Bus: DiskSATA}, "b": {Bus: DiskSATA}, "c": {Bus: DiskSATA}}})
	s.Image = FromVolume("system")
	for _, name := range []string{"a", "b", "c", "d", "system"} {
		s.Volumes = append(s.Volumes, Volume{Name: name, Kind: VolumeDisk, Disk: &VolumeUse{Ref: name}})
	}
	got := s.Default()
	disks := got.Hardware.Disks
	if disks["system"].Bus != DiskSATA || disks[DiskOfSeed].Bus != DiskSATA || disks["d"].Bus != DiskUSB {
		t.Errorf("%+v", disks)
	}
	if err := got.Validate(); err != nil {
		t.Error(err)
	}
	disks["d"] = DiskDevice{Bus: DiskSATA}
	if err := got.Validate(); err == nil {
		t.Error("no port of SATA is left for the CD-ROM of drivers")
	}
}

// A guest with the drivers of virtio has disks and interfaces on it; the rest is as Windows needs it.
func TestWindowsOnVirtio(t *testing.T) {
	s := windowsSpec(Hardware{})
	s.Volumes = []Volume{{Name: "data", Kind: VolumeDisk, Disk: &VolumeUse{Ref: "d", ReadOnly: true}}, {Name: "keys", Kind: VolumeFiles, Label: "KEYS"}}
	got := s.OnVirtio().Default()
	want := map[string]DiskDevice{
		DiskOfImage: {Bus: DiskVirtio}, "data": {Bus: DiskVirtio}, DiskOfSeed: {Bus: DiskSATA, CDROM: true}, "keys": {Bus: DiskSATA, CDROM: true},
	}
	if d := diff.Of(want, got.Hardware.Disks); d != "" {
		t.Error(d)
	}
	if d := diff.Of([]NICModel{NICVirtio, NICVirtio}, got.Hardware.NICs); d != "" || got.Firmware != FirmwareUEFI {
		t.Errorf("%s, firmware %s", d, got.Firmware)
	}
	if err := got.Validate(); err != nil {
		t.Error(err)
	}
	s.Image = FromVolume("data")
	if _, has := s.OnVirtio().Hardware.Disks[DiskOfImage]; has {
		t.Error("a guest that boots from a volume has the disk of an image")
	}
}

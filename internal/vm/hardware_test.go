package vm

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestHardware(t *testing.T) {
	spec := func(h Hardware) Spec {
		return Spec{
			Name: "web", Hostname: "web", Image: "cloud", Firmware: FirmwareUEFI, CPUs: 4, Memory: MinMemory, Storage: MinStorage, Accel: AccelAuto, Hardware: &h,
			NICs:    []NICSpec{{}, {Network: "lab"}},
			Volumes: []Volume{{Name: "data", Kind: VolumeDisk, Disk: &VolumeUse{Ref: "d"}}, {Name: "keys", Kind: VolumeFiles, Label: "KEYS"}, {Name: "files", Kind: VolumeFiles}},
		}
	}
	on := func(name string, d DiskDevice) Hardware { return Hardware{Disks: map[string]DiskDevice{name: d}} }
	for what, h := range map[string]Hardware{
		"nothing":  {},
		"topology": {Topology: Topology{2, 2, 1}},
		"watchdog": {Watchdog: WatchdogShutdown},
		"models":   {NICs: []NICModel{"", NICE1000E}},
		"data":     on("data", DiskDevice{Bus: DiskSCSI, ReadOnly: true}),
		"files":    on("keys", DiskDevice{Bus: DiskSATA, CDROM: true}),
		"image":    on(DiskOfImage, DiskDevice{Bus: DiskUSB}),
		"seed":     on(DiskOfSeed, DiskDevice{Bus: DiskSATA, CDROM: true}),
		"serials":  {Disks: map[string]DiskDevice{"data": {Serial: "A_1.2+3-4567890abcde"}, DiskOfImage: {Serial: "B"}, "keys": {}}},
		"TPM":      {TPM: TPMPersistent},
		"UEFI":     {UEFI: UEFI{SecureBoot: true, Persistent: true}},
		"blocks":   on("data", DiskDevice{Blocks: Blocks{512, 4096}}),
	} {
		if err := spec(h).Validate(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	boots := spec(on(DiskOfImage, DiskDevice{Bus: DiskSATA}))
	boots.Image = FromVolume("data")
	bios := spec(Hardware{UEFI: UEFI{SecureBoot: true}})
	bios.Firmware = FirmwareBIOS
	many := spec(Hardware{Disks: map[string]DiskDevice{}})
	for _, name := range []string{"a", "b", "c", "d", "e", "f", "g"} {
		many.Volumes = append(many.Volumes, Volume{Name: name, Kind: VolumeDisk, Disk: &VolumeUse{Ref: name}})
		many.Hardware.Disks[name] = DiskDevice{Bus: DiskSATA}
	}
	for what, s := range map[string]Spec{
		"too few CPUs":        spec(Hardware{Topology: Topology{1, 2, 1}}),
		"a part":              spec(Hardware{Topology: Topology{Sockets: 4}}),
		"negative":            spec(Hardware{Topology: Topology{-2, -2, 1}}),
		"overflow":            spec(Hardware{Topology: Topology{1 << 32, 1 << 32, 4}}),
		"model":               spec(Hardware{NICs: []NICModel{"ne2k_pci"}}),
		"three models":        spec(Hardware{NICs: []NICModel{"", "", NICVirtio}}),
		"TPM":                 spec(Hardware{TPM: "1.2"}),
		"action":              spec(Hardware{Watchdog: "bark"}),
		"bus":                 spec(on("data", DiskDevice{Bus: "ide"})),
		"CD on virtio":        spec(on("data", DiskDevice{CDROM: true})),
		"read-only SATA":      spec(on("data", DiskDevice{Bus: DiskSATA, ReadOnly: true})),
		"no such volume":      spec(on("other", DiskDevice{Bus: DiskSATA})),
		"no disk":             spec(on("files", DiskDevice{Bus: DiskSATA})),
		"image of none":       boots,
		"seven SATA disks":    many,
		"Secure Boot of BIOS": bios,
		"long serial":         spec(on("data", DiskDevice{Serial: "123456789012345678901"})),
		"serial of two":       spec(on("data", DiskDevice{Serial: "a,b"})),
		"serial of ours":      spec(on("data", DiskDevice{Serial: "Vol-abc"})),
		"serial of images":    spec(on("data", DiskDevice{Serial: "cocoon-disk"})),
		"one serial twice":    spec(Hardware{Disks: map[string]DiskDevice{"data": {Serial: "A"}, DiskOfImage: {Serial: "A"}}}),
		"no power of two":     spec(on("data", DiskDevice{Blocks: Blocks{1000, 4096}})),
		"one size":            spec(on("data", DiskDevice{Blocks: Blocks{Logical: 512}})),
		"small physical":      spec(on("data", DiskDevice{Blocks: Blocks{4096, 512}})),
		"blocks of SATA":      spec(on("data", DiskDevice{Bus: DiskSATA, Blocks: Blocks{4096, 4096}})),
		"blocks of a CD":      spec(on("data", DiskDevice{Bus: DiskSCSI, CDROM: true, Blocks: Blocks{512, 512}})),
	} {
		if err := s.Validate(); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	h := spec(on("data", DiskDevice{Bus: DiskSCSI}))
	h.Clone().Hardware.Disks["data"] = DiskDevice{}
	if h.Hardware.Disks["data"].Bus != DiskSCSI {
		t.Error("a clone shares its disks")
	}
}

package vm

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

func TestHardware(t *testing.T) {
	spec := func(h Hardware) Spec {
		return Spec{
			Name: "web", Hostname: "web", Image: "cloud", CPUs: 4, Memory: MinMemory, Storage: MinStorage, Accel: AccelAuto, Hardware: &h,
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
	} {
		if err := spec(h).Validate(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	boots := spec(on(DiskOfImage, DiskDevice{Bus: DiskSATA}))
	boots.Image = FromVolume("data")
	many := spec(Hardware{Disks: map[string]DiskDevice{}})
	for _, name := range []string{"a", "b", "c", "d", "e", "f", "g"} {
		many.Volumes = append(many.Volumes, Volume{Name: name, Kind: VolumeDisk, Disk: &VolumeUse{Ref: name}})
		many.Hardware.Disks[name] = DiskDevice{Bus: DiskSATA}
	}
	for what, s := range map[string]Spec{
		"too few CPUs":     spec(Hardware{Topology: Topology{1, 2, 1}}),
		"a part":           spec(Hardware{Topology: Topology{Sockets: 4}}),
		"negative":         spec(Hardware{Topology: Topology{-2, -2, 1}}),
		"overflow":         spec(Hardware{Topology: Topology{1 << 32, 1 << 32, 4}}),
		"action":           spec(Hardware{Watchdog: "bark"}),
		"model":            spec(Hardware{NICs: []NICModel{"ne2k_pci"}}),
		"three models":     spec(Hardware{NICs: []NICModel{"", "", NICVirtio}}),
		"bus":              spec(on("data", DiskDevice{Bus: "ide"})),
		"CD on virtio":     spec(on("data", DiskDevice{CDROM: true})),
		"read-only SATA":   spec(on("data", DiskDevice{Bus: DiskSATA, ReadOnly: true})),
		"no such volume":   spec(on("other", DiskDevice{Bus: DiskSATA})),
		"no disk":          spec(on("files", DiskDevice{Bus: DiskSATA})),
		"image of none":    boots,
		"seven SATA disks": many,
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

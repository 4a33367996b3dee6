package vm

import (
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Several guests have one disk only as a plain disk that none of them boots from, and that nobody mounts for them.
func TestShared(t *testing.T) {
	spec := func(change func(*Spec)) Spec {
		s := Spec{
			Name: "web", Hostname: "web", Image: "cloud", CPUs: 1, Memory: MinMemory, Storage: MinStorage, Accel: AccelAuto,
			Volumes: []Volume{{Name: "own", Kind: VolumeDisk, Disk: &VolumeUse{Ref: "own"}}, {Name: "data", Kind: VolumeDisk, Disk: &VolumeUse{Ref: "data", Shared: true}}},
		}
		change(&s)
		return s
	}
	on := func(d DiskDevice) func(*Spec) {
		return func(s *Spec) { s.Hardware = &Hardware{Disks: map[string]DiskDevice{"data": d}} }
	}
	for what, change := range map[string]func(*Spec){
		"on virtio":          func(*Spec) {},
		"on scsi":            on(DiskDevice{Bus: DiskSCSI}),
		"on sata":            on(DiskDevice{Bus: DiskSATA}),
		"to read only":       func(s *Spec) { s.Volumes[1].Disk.ReadOnly = true },
		"as a device":        func(s *Spec) { s.Mounts = []Mount{{Volume: "data", Path: "/dev/data", Device: true}} },
		"beside a root disk": func(s *Spec) { s.Image = FromVolume("own") },
	} {
		s := spec(change)
		if err := s.Validate(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if got := s.SharedVolumes(); len(got) != 1 || got[0].Name != "data" {
			t.Errorf("%s: shared are %+v", what, got)
		}
	}
	for what, change := range map[string]func(*Spec){
		"boots from it": func(s *Spec) { s.Image = FromVolume("data") },
		"a CD-ROM":      on(DiskDevice{Bus: DiskSCSI, CDROM: true}),
		"on usb":        on(DiskDevice{Bus: DiskUSB}),
		"mounted":       func(s *Spec) { s.Mounts = []Mount{{Volume: "data", Path: "/data"}} },
		"mounted in a container": func(s *Spec) {
			s.Containers = []Container{{Name: "c", Image: "cloud", Process: Process{}, Mounts: []Mount{{Volume: "data", Path: "/data"}}}}
		},
	} {
		if err := spec(change).Validate(); !errdefs.IsInvalid(err) || !strings.Contains(err.Error(), "volume data") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

package vm

import (
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// A guest that boots itself has files of the node as disks, and boots from one. What no node has, or what is two disks, is refused.
func TestHostDisk(t *testing.T) {
	spec := func(change func(*Spec, *HostDisk)) Spec {
		d := &HostDisk{Path: "/srv/disk.img", Capacity: 1 << 30}
		s := Spec{
			Name: "web", Hostname: "web", Image: FromVolume("root"), CPUs: 1, Memory: MinMemory, Storage: MinStorage, Accel: AccelAuto,
			Volumes:  []Volume{{Name: "root", Kind: VolumeHostDisk, HostDisk: d}},
			Hardware: &Hardware{Disks: map[string]DiskDevice{"root": {Bus: DiskSATA}}},
		}
		change(&s, d)
		return s
	}
	for what, change := range map[string]func(*Spec, *HostDisk){
		"boots from it": func(*Spec, *HostDisk) {},
		"an image":      func(s *Spec, d *HostDisk) { s.Image, d.Capacity, d.Shared = "cloud", 0, true },
	} {
		s := spec(change)
		if err := s.Validate(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if c := s.Clone(); c.Volumes[0].HostDisk == s.Volumes[0].HostDisk || *c.Volumes[0].HostDisk != *s.Volumes[0].HostDisk {
			t.Errorf("%s: not copied", what)
		}
	}
	for what, change := range map[string]func(*Spec, *HostDisk){
		"relative":  func(_ *Spec, d *HostDisk) { d.Path = "srv" },
		"upwards":   func(_ *Spec, d *HostDisk) { d.Path = "/srv/../etc/shadow" },
		"not clean": func(_ *Spec, d *HostDisk) { d.Path = "/srv//disk" },
		"no path":   func(_ *Spec, d *HostDisk) { d.Path = "" },
		"the root":  func(_ *Spec, d *HostDisk) { d.Path = "/" },
		"negative":  func(_ *Spec, d *HostDisk) { d.Capacity = -1 },
		"huge":      func(_ *Spec, d *HostDisk) { d.Capacity = MaxStorage + 1 },
		"mounted":   func(s *Spec, _ *HostDisk) { s.Mounts = []Mount{{Volume: "root", Path: "/d"}} },
		"no file":   func(s *Spec, _ *HostDisk) { s.Volumes[0].HostDisk = nil },
		"a folder":  func(s *Spec, _ *HostDisk) { s.Volumes[0].Kind = VolumeEmpty },
		"a group":   func(s *Spec, _ *HostDisk) { s.Volumes[0].Group = new(int64) },
		"twice": func(s *Spec, d *HostDisk) {
			s.Volumes = append(s.Volumes, Volume{Name: "again", Kind: VolumeHostDisk, HostDisk: d})
		},
	} {
		if err := spec(change).Validate(); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

package hypervisortest

import (
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

func (s *suite) sized(t *testing.T, i hypervisor.Instance, serial string, size int64) {
	t.Helper()
	if s.Sized != nil {
		s.Sized(t, i, serial, size)
	}
}

// testGrowDisks grows a disk that was there at the boot and one that was plugged, while the guest runs and while it is saved.
func testGrowDisks(t *testing.T, s *suite) {
	const small, large, larger = 1 << 20, 4 << 20, 8 << 20
	dir := t.TempDir()
	disk := func(serial string, port int) vm.Disk {
		path := filepath.Join(dir, serial)
		if err := os.WriteFile(path, make([]byte, small), 0o600); err != nil {
			t.Fatal(err)
		}
		return vm.Disk{Path: path, Format: vm.DiskRaw, Serial: serial, Role: vm.RoleVolume, Port: port}
	}
	grow := func(size int64, disks ...vm.Disk) {
		for _, d := range disks {
			if err := os.Truncate(d.Path, size); err != nil {
				t.Fatal(err)
			}
		}
	}
	p := s.plan(t)
	fixed, plugged := disk("vol-fixed", 0), disk("vol-plugged", 3)
	p.Disks = append(p.Disks, fixed)
	i, plugger := s.plugger(t, p)
	grower, ok := hypervisor.As[hypervisor.DiskGrower](i)
	if !ok {
		t.Skip("no DiskGrower")
	}
	readOnly := layers(t, 1)[0]
	for _, d := range []vm.Disk{plugged, readOnly} {
		if err := plugger.PlugDisk(s.ctx(t), d); err != nil {
			t.Fatal(err)
		}
	}
	s.sized(t, i, plugged.Serial, small)
	grow(large, fixed, plugged)
	for range 2 { // again is no error
		for _, d := range []vm.Disk{fixed, plugged} {
			if err := grower.GrowDisk(s.ctx(t), d.Serial, large); err != nil {
				t.Fatalf("GrowDisk: %v", err)
			}
			s.sized(t, i, d.Serial, large)
		}
	}
	for serial, size := range map[string]int64{fixed.Serial: small, plugged.Serial: small, readOnly.Serial: large, "none": large, "": large} {
		if err := grower.GrowDisk(s.ctx(t), serial, size); !errdefs.IsInvalid(err) {
			t.Errorf("grow disk %q to %d bytes: %v, want InvalidArgument", serial, size, err)
		}
	}
	for _, d := range []vm.Disk{fixed, plugged} {
		if st, err := os.Stat(d.Path); err != nil || st.Size() != large {
			t.Fatalf("disk %s has %d bytes, %v", d.Serial, st.Size(), err)
		}
	}
	if snapshotter, ok := hypervisor.As[hypervisor.Snapshotter](i); ok {
		plan := savePlan(t)
		plan.Hold = true
		if _, err := snapshotter.Save(s.ctx(t), plan); err != nil {
			t.Fatalf("Save: %v", err)
		}
		s.kill(t, i)
		grow(larger, fixed, plugged)
		q := s.from(t, plan)
		q.Disks = append(q.Disks, fixed, plugged, readOnly)
		q.Incoming.Grown = []string{fixed.Serial, plugged.Serial}
		i = s.launch(t, q)
		s.sized(t, i, fixed.Serial, larger)
		s.sized(t, i, plugged.Serial, larger)
	}
	s.kill(t, i)
	if err := grower.GrowDisk(s.ctx(t), fixed.Serial, larger); !errdefs.IsNotFound(err) {
		t.Errorf("after the end: %v, want NotFound", err)
	}
}

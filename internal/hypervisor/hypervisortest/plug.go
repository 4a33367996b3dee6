package hypervisortest

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// plugger launches a VM and waits until its guest reacts. It skips drivers that cannot plug disks.
func (s *suite) plugger(t *testing.T, p hypervisor.Plan) (hypervisor.Instance, hypervisor.DiskPlugger) {
	t.Helper()
	i := s.launch(t, p)
	plugger, ok := hypervisor.As[hypervisor.DiskPlugger](i)
	if !ok {
		t.Skip("no DiskPlugger")
	}
	s.Booted(t, i)
	return i, plugger
}

// layers returns n new read-only disks, at the ports from 1 on.
func layers(t *testing.T, n int) (disks []vm.Disk) {
	t.Helper()
	dir := t.TempDir()
	for port := 1; port <= n; port++ {
		path := filepath.Join(dir, fmt.Sprintf("layer%d", port))
		if err := os.WriteFile(path, make([]byte, 1<<20), 0o400); err != nil {
			t.Fatal(err)
		}
		disks = append(disks, vm.Disk{Path: path, Format: vm.DiskRaw, ReadOnly: true, Serial: fmt.Sprintf("plugged-%d", port), Role: vm.RoleLayer, Port: port})
	}
	return disks
}

func (s *suite) sees(t *testing.T, i hypervisor.Instance, disks ...vm.Disk) {
	t.Helper()
	var serials []string
	for _, d := range disks {
		serials = append(serials, d.Serial)
	}
	if s.Plugged != nil {
		s.Plugged(t, i, serials...)
	}
}

func testPlugDisks(t *testing.T, s *suite) {
	p := s.plan(t)
	i, plugger := s.plugger(t, p)
	disks := layers(t, 12) // more than any machine has ports
	for range 2 {          // again is no error
		for _, d := range disks {
			if err := plugger.PlugDisk(s.ctx(t), d); err != nil {
				t.Fatalf("PlugDisk: %v", err)
			}
		}
	}
	s.sees(t, i, disks...)
	other := disks[0]
	other.Serial = "other"
	again := disks[0]
	again.Port = 40
	for what, d := range map[string]vm.Disk{"port": other, "serial": again} {
		if err := plugger.PlugDisk(s.ctx(t), d); !errdefs.Is(err, errdefs.Conflict) {
			t.Errorf("another disk with this %s: %v, want Conflict", what, err)
		}
	}
	for _, port := range []int{0, -1, vm.MaxPort + 1} {
		other.Port = port
		if err := plugger.PlugDisk(s.ctx(t), other); !errdefs.IsInvalid(err) {
			t.Errorf("port %d: %v, want InvalidArgument", port, err)
		}
	}

	// A later daemon finds the disks and removes them.
	_ = i.Close()
	i = s.adopt(t, s.New(t), i.Handle())
	plugger, _ = hypervisor.As[hypervisor.DiskPlugger](i)
	if err := plugger.PlugDisk(s.ctx(t), disks[0]); err != nil {
		t.Errorf("PlugDisk after Adopt: %v", err)
	}
	for range 2 {
		for _, d := range disks {
			if err := plugger.UnplugDisk(s.ctx(t), d.Serial); err != nil {
				t.Fatalf("UnplugDisk: %v", err)
			}
		}
	}
	s.sees(t, i)
	if err := plugger.PlugDisk(s.ctx(t), disks[1]); err != nil {
		t.Fatalf("PlugDisk at a place that was used before: %v", err)
	}
	s.sees(t, i, disks[1])
	s.kill(t, i)
	for _, call := range []error{plugger.PlugDisk(s.ctx(t), disks[0]), plugger.UnplugDisk(s.ctx(t), disks[1].Serial)} {
		if !errdefs.IsNotFound(call) {
			t.Errorf("after the end: %v, want NotFound", call)
		}
	}
}

func testSavePlugged(t *testing.T, s *suite) {
	p := s.plan(t)
	i, plugger := s.plugger(t, p)
	snapshotter, ok := hypervisor.As[hypervisor.Snapshotter](i)
	if !ok {
		t.Skip("no Snapshotter")
	}
	disks := layers(t, 3)
	for _, d := range disks {
		if err := plugger.PlugDisk(s.ctx(t), d); err != nil {
			t.Fatal(err)
		}
	}
	s.sees(t, i, disks...)
	if err := plugger.UnplugDisk(s.ctx(t), disks[0].Serial); err != nil {
		t.Fatal(err)
	}
	plan := savePlan(t)
	if _, err := snapshotter.Save(s.ctx(t), plan); err != nil {
		t.Fatalf("Save: %v", err)
	}
	q := s.from(t, plan)
	q.Disks = append(q.Disks, disks[1:]...)
	j := s.launch(t, q)
	s.sees(t, j, disks[1:]...)
	resumed, _ := hypervisor.As[hypervisor.DiskPlugger](j)
	if err := resumed.PlugDisk(s.ctx(t), disks[0]); err != nil {
		t.Fatalf("PlugDisk into a resumed guest: %v", err)
	}
	s.sees(t, j, disks...)
	for _, d := range disks {
		for _, of := range []hypervisor.DiskPlugger{plugger, resumed} {
			if err := of.UnplugDisk(s.ctx(t), d.Serial); err != nil {
				t.Fatalf("UnplugDisk: %v", err)
			}
		}
	}
	s.sees(t, i)
	s.sees(t, j)

	// Without plugged disks, a guest that had some is as one that never had any.
	last := savePlan(t)
	if _, err := snapshotter.Save(s.ctx(t), last); err != nil {
		t.Fatalf("Save: %v", err)
	}
	k := s.launch(t, s.from(t, last))
	s.state(t, k, hypervisor.Running)
	for _, v := range []hypervisor.Instance{i, j, k} {
		s.kill(t, v)
	}
}

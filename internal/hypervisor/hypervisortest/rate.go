package hypervisortest

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// testDiskRate lets guests read from disks that are limited. It measures from before the guest is told to read until after it has, so a busy machine only
// adds to what it finds: a limit that holds never looks as if it did not.
func testDiskRate(t *testing.T, s *suite) {
	if s.Reads == nil {
		t.Skip("the guest cannot read when it is told to")
	}
	const (
		rate = 1 << 20
		size = 6 << 20
		slow = (size/rate - 2) * time.Second // Firecracker's disks transfer two seconds' worth at once after they were idle
	)
	dir := t.TempDir()
	disk := func(serial string, port int) vm.Disk {
		path := filepath.Join(dir, serial)
		if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
		return vm.Disk{Path: path, Format: vm.DiskRaw, Serial: serial, Role: vm.RoleVolume, Port: port}
	}
	reads := func(what string, i hypervisor.Instance, d vm.Disk) {
		t.Helper()
		began := time.Now()
		s.Reads(t, i, d.Serial, size)
		if took := time.Since(began); took < slow {
			t.Errorf("%s: the guest has read %d bytes from %s in %v, and its limit is %d bytes per second", what, int64(size), d.Serial, took, int64(rate))
		} else {
			t.Logf("%s: %v", what, took)
		}
	}
	p, fixed := s.plan(t), disk("vol-fixed", 0)
	p.DiskRate, p.Disks = vm.DiskRate{Bytes: rate}, append(p.Disks, fixed)
	i := s.launch(t, p)
	s.Booted(t, i)
	reads("booted", i, fixed)
	_ = i.Close()
	i = s.adopt(t, s.New(t), i.Handle())
	if plugger, ok := hypervisor.As[hypervisor.DiskPlugger](i); ok { // a later daemon knows the limit
		plugged := disk("vol-plugged", 3)
		if err := plugger.PlugDisk(s.ctx(t), plugged); err != nil {
			t.Fatalf("PlugDisk: %v", err)
		}
		reads("plugged", i, plugged)
		if err := plugger.UnplugDisk(s.ctx(t), plugged.Serial); err != nil {
			t.Fatalf("UnplugDisk: %v", err)
		}
	}
	snapshotter, ok := hypervisor.As[hypervisor.Snapshotter](i)
	if !ok {
		s.kill(t, i)
		return
	}
	saved := savePlan(t)
	saved.Hold = true
	if _, err := snapshotter.Save(s.ctx(t), saved); err != nil {
		t.Fatalf("Save: %v", err)
	}
	s.kill(t, i)
	from := func(now, was vm.DiskRate) hypervisor.Instance {
		q := s.from(t, saved)
		q.Disks, q.DiskRate, q.Incoming.DiskRate = append(q.Disks, fixed), now, was
		return s.launch(t, q)
	}
	j := from(p.DiskRate, p.DiskRate)
	reads("resumed", j, fixed)

	// Requests are limited alike, and a guest that resumes may have other limits than it had.
	s.kill(t, j)
	const ops, some = 20, 4 << 20
	j = from(vm.DiskRate{Ops: ops}, p.DiskRate)
	requests := time.Duration(some >> 16) // at least: none has more than 64 KiB
	began := time.Now()
	s.Reads(t, j, fixed.Serial, some)
	if took := time.Since(began); took < requests*time.Second/ops-2*time.Second {
		t.Errorf("the guest has made %d requests in %v, and its limit is %d per second", requests, took, ops)
	} else {
		t.Logf("requests: %v", took)
	}
	s.kill(t, j)
}

//go:build vm

package qemu

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/vm"
)

// A guest sees the serial number and the blocks that its disk has for it, and the driver still finds the disk by its own serial.
func TestDiskSerial(t *testing.T) {
	a, d := needGuest(t), testDriver(t)
	p := a.plan(t)
	path := filepath.Join(t.TempDir(), "disk")
	run(t, "qemu-img", "create", "-q", "-f", "raw", path, "8M")
	p.Disks = []vm.Disk{{Path: path, Format: vm.DiskRaw, Serial: "vol-1", Role: vm.RoleVolume}}
	p.Devices = map[string]vm.DiskDevice{"vol-1": {Serial: "WD-1", Blocks: vm.Blocks{Logical: 4096, Physical: 4096}}}
	i := start(t, d, p)
	if log := line(t, i, "GUEST-READY"); !strings.Contains(log, "disks: WD-1 0") {
		t.Errorf("the guest sees %s", log)
	}
	say(t, i, "sh cat /sys/block/vda/queue/logical_block_size")
	logged(t, i, "4096 .")
	if err := os.Truncate(path, 16<<20); err != nil {
		t.Fatal(err)
	}
	grower, _ := hypervisor.As[hypervisor.DiskGrower](i)
	if err := grower.GrowDisk(t.Context(), "vol-1", 16<<20); err != nil {
		t.Fatal(err)
	}
	say(t, i, "size WD-1")
	logged(t, i, "SIZE WD-1 32768.")
	if err := grower.GrowDisk(t.Context(), "WD-1", 16<<20); !errdefs.IsInvalid(err) {
		t.Errorf("a disk is found by the serial number that its guest sees: %v", err)
	}
}

// TestBuses boots the demo disk from each bus. The guest has two sockets and a watchdog.
func TestBuses(t *testing.T) {
	a := needGuest(t)
	d := testDriver(t)
	for _, bus := range []vm.DiskBus{vm.DiskVirtio, vm.DiskSATA, vm.DiskSCSI, vm.DiskUSB} {
		t.Run(string(bus), func(t *testing.T) {
			p := a.firmware(t)
			p.Disks[0].Serial, p.CPUs = "root", 2
			p.Topology, p.Watchdog = vm.Topology{Sockets: 2, Cores: 1, Threads: 1}, vm.WatchdogReset
			p.Devices = map[string]vm.DiskDevice{"root": {Bus: bus}}
			i, err := d.Launch(t.Context(), p)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = i.Kill(context.Background()); _ = i.Close() })
			logged(t, i, "disk-demo")
		})
	}
}

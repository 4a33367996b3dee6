//go:build vm

package qemu

import (
	"context"
	"testing"

	"cocoonstack.io/cocoon/internal/vm"
)

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

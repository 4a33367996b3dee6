package qemu

import (
	"context"
	"fmt"

	"cocoonstack.io/cocoon/internal/hypervisor"
	"cocoonstack.io/cocoon/internal/hypervisor/qemu/qmp"
	"cocoonstack.io/cocoon/internal/vm"
)

// A limit belongs to the device of a disk, not to its block node. So it stays when a save puts a new overlay, which is another node, below the device. Saved
// state has no limits.

// waits reports whether something has to be set before a guest without saved state begins.
func waits(p hypervisor.Plan) bool {
	return linkDown(p) || p.DiskRate != (vm.DiskRate{}) && len(p.Disks) > 0
}

// limitDisks limits what each disk of the guest transfers.
func limitDisks(ctx context.Context, c *qmp.Client, r vm.DiskRate) error {
	if r == (vm.DiskRate{}) {
		return nil
	}
	devices, err := diskDevices(ctx, c)
	if err != nil {
		return err
	}
	for _, dev := range devices {
		if err := limit(ctx, c, dev.QDev, r); err != nil {
			return err
		}
	}
	return nil
}

// limit limits what a disk transfers, by the id or the path of its device.
func limit(ctx context.Context, c *qmp.Client, device string, r vm.DiskRate) error {
	if r == (vm.DiskRate{}) {
		return nil
	}
	if err := c.Execute(ctx, "block_set_io_throttle", throttle(device, r), nil); err != nil {
		return fmt.Errorf("limit disk %s: %w", device, err)
	}
	return nil
}

func throttle(device string, r vm.DiskRate) props {
	return props{"id": device, "bps": r.Bytes, "bps_rd": 0, "bps_wr": 0, "iops": r.Ops, "iops_rd": 0, "iops_wr": 0}
}

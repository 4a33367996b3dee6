package cloudhypervisor

import (
	"context"
	"fmt"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// GrowDisk implements hypervisor.DiskGrower. A guest that does not run yet finds its disks as they are then.
func (i *instance) GrowDisk(ctx context.Context, serial string, size int64) error {
	if err := i.growDisk(ctx, serial, size); err != nil {
		return fmt.Errorf("grow disk %s of VM %s: %w", serial, i.h.ID, err)
	}
	return nil
}

func (i *instance) growDisk(ctx context.Context, serial string, size int64) error {
	now, err := i.devices(ctx)
	if err != nil {
		return err
	}
	var id string
	if d, _ := now.plugged(serial); now.configured(d.id()) && !now.disk(d.id()).ReadOnly {
		id, err = d.id(), i.CanGrow(plugPath(d.port), serial, size)
	} else {
		var n int
		n, err = i.ToGrow(i.h.Disks, diskPath, serial, size)
		id = diskID(n)
	}
	if err != nil || !i.beginning.Begun() {
		return err
	}
	if now.State != stateRunning {
		return errdefs.Unavailablef("it does not run, and Cloud Hypervisor tells only a guest that runs; resume it first")
	}
	return i.call(ctx, "PUT", "vm.resize-disk", diskSize{id, size}, nil)
}

package engine

import (
	"context"
	"fmt"
	"slices"

	"cocoonstack.io/cocoon/internal/vm"
)

// seed writes the disk from which a disk guest learns its identity, and returns the disks of r with it. It is written
// again before each start, because addresses change. The file is in the state folder and is removed with it.
func (n *node) seed(ctx context.Context, r vm.Record, nics []vm.NIC) ([]vm.Disk, error) {
	if r.ImageType == vm.ImageOCI || n.seeds == nil {
		return r.Disks, nil
	}
	spec, err := n.dirs.withFiles(r)
	if err != nil {
		return nil, err
	}
	disk, err := n.seeds.Seed(ctx, r.ID, spec, nics, n.dirs.state(r.ID))
	if err != nil {
		return nil, fmt.Errorf("write the cloud-init seed: %w", err)
	}
	disk.Role = vm.RoleCidat
	disks := slices.DeleteFunc(slices.Clone(r.Disks), func(d vm.Disk) bool { return d.Role == vm.RoleCidat })
	return append(disks, disk), nil
}

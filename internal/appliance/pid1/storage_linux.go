package pid1

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/appliance/disk"
)

// storage finds the group of volumes, or makes it on the data partition if that is blank, and mounts /perm. Each step can be interrupted, and is taken up at the
// next start.
func (m *machine) storage(ctx context.Context) error {
	g := disk.Group{Run: m.run, Log: m.log}
	err := g.Prepare(ctx, func() (string, error) { return m.root.Partition("/sys/block", "/dev", disk.DataPartition) })
	if err != nil {
		return err
	}
	permErr := m.mountPerm(ctx)
	return errors.Join(permErr, g.MakePool(ctx), g.Activate(ctx))
}

// mountPerm checks and mounts /perm. Without it the state of the daemon is in memory.
func (m *machine) mountPerm(ctx context.Context) error {
	const device = disk.PermDevice
	if _, err := m.run(ctx, "e2fsck", "-p", device); err != nil {
		exit := (*exec.ExitError)(nil)
		if !errors.As(err, &exit) || exit.ExitCode() > 1 { // 1: it repaired something
			return err
		}
	}
	if err := os.MkdirAll(permDir, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(device, permDir, "ext4", unix.MS_NOATIME|unix.MS_NODEV|unix.MS_NOSUID, ""); err != nil {
		return fmt.Errorf("mount %s: %w", device, err)
	}
	return os.MkdirAll(ownDir, 0o750)
}

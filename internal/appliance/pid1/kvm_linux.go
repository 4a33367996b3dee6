package pid1

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"strconv"
)

// openKVM gives the device of the CPU's virtualization to a group, as udev does on other systems: hypervisors are unprivileged. Without it, VMs would be emulated. A
// machine without the device has no such CPU.
func openKVM(device, group string) error {
	if _, err := os.Lstat(device); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	g, err := user.LookupGroup(group)
	if err != nil {
		return fmt.Errorf("give %s to hypervisors: %w", device, err)
	}
	id, err := strconv.Atoi(g.Gid)
	if err != nil {
		return fmt.Errorf("give %s to hypervisors: %w", device, err)
	}
	return errors.Join(os.Chown(device, 0, id), os.Chmod(device, 0o660)) //nolint:gosec // the group is the point
}

package pid1

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"strconv"
)

// openKVM gives the device of KVM to the group of hypervisors, which are unprivileged. On other systems udev does so. If the group has no access, VMs are emulated.
// A machine without the device is left as it is.
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

package volumes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// makeHostDir mounts a folder that the host shares. The host decides what can be read and written there.
func (k *Keeper) makeHostDir(ctx context.Context, v vm.Volume) error {
	dir := path.Join(k.stage, v.Name)
	if err := os.Mkdir(dir, 0o700); err != nil && !os.IsExist(err) {
		return err
	}
	if err := mountHostDir(v, dir); err != nil {
		return err
	}
	if v.Dir.ReadOnly || v.Group == nil {
		return nil
	}
	root, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer root.Close()
	return regroup(ctx, root, int(*v.Group), v.Dir.GroupOnMismatch)
}

// mountHostDir mounts the folder of v at dir.
// Errors: Unavailable if the guest has no device with its tag.
func mountHostDir(v vm.Volume, dir string) error {
	flags := uintptr(unix.MS_NODEV)
	if v.Dir.ReadOnly {
		flags |= unix.MS_RDONLY
	}
	tag := path.Base(v.Dir.Path)
	err := unix.Mount(tag, dir, "virtiofs", flags, "")
	switch {
	case errors.Is(err, unix.EINVAL):
		return errdefs.Unavailablef("the host shares no folder with the tag %s", tag)
	case errors.Is(err, unix.ENODEV):
		return errdefs.Unsupportedf("the kernel of the guest cannot mount folders of the host (virtiofs)")
	case err != nil:
		return fmt.Errorf("mount the folder of the host with the tag %s: %w", tag, err)
	}
	return nil
}

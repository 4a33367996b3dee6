package volumes

import (
	"fmt"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/vm"
)

// MountImage mounts the files of an image, which are in the folder image, or the part of them that m names, in the folder root. Nobody can write to
// them or execute them there. The keeper does not remember such a mount: it lasts as long as the mounts of root.
// Errors: NotFound if the image does not have that part, InvalidArgument.
func (k *Keeper) MountImage(root, image string, m vm.Mount) error {
	err := mountImage(root, image, m)
	if err != nil {
		return fmt.Errorf("mount the files of an image at %s: %w", m.Path, err)
	}
	return nil
}

func mountImage(root, image string, m vm.Mount) error {
	at, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	top, err := resolve(image)
	if err != nil {
		return err
	}
	defer unix.Close(top)
	src := top
	if m.SubPath != "" {
		src, err = beneath(top, m.SubPath)
		if err := inVolume(m.SubPath, err); err != nil {
			return err
		}
		defer unix.Close(src)
	}
	var st unix.Stat_t
	if err := unix.Fstat(src, &st); err != nil {
		return err
	}
	dst, err := target(at, m.Path, st.Mode&unix.S_IFMT == unix.S_IFDIR)
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	return bind(src, dst, attributes(vm.Volume{Kind: vm.VolumeImage}, m))
}

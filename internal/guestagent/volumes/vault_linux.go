package volumes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// ReadFile returns the content of a file in a volume that starts empty. Links do not lead out of the volume.
// Errors: NotFound; FailedPrecondition if it is no regular file or has more than limit bytes.
func (k *Keeper) ReadFile(volume, name string, limit int) (text []byte, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	v, ok := k.volumes[volume]
	if !ok || v.Kind != vm.VolumeEmpty {
		return nil, errdefs.NotFoundf("the guest has no volume %q that starts empty", volume)
	}
	err = k.staged(func() error {
		root, err := k.source(v, "")
		if err != nil {
			return err
		}
		defer unix.Close(root)
		text, err = readIn(root, name, limit)
		return err
	})
	return text, err
}

// readIn reads a regular file in the folder root, which programs of the guest may change meanwhile.
func readIn(root int, name string, limit int) ([]byte, error) {
	fd, err := openat2(root, name, unix.RESOLVE_IN_ROOT|unix.RESOLVE_NO_MAGICLINKS|unix.RESOLVE_NO_XDEV)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return nil, errdefs.NotFoundf("the file does not exist")
	case err != nil:
		return nil, errdefs.Preconditionf("the file cannot be opened: %w", err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG { // a device or a pipe is not even opened
		return nil, errdefs.Preconditionf("it is not a regular file")
	}
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, int64(limit)+1))
	if err != nil {
		return nil, err
	}
	if len(text) > limit {
		return nil, errdefs.Preconditionf("the file has more than %d bytes", limit)
	}
	return text, nil
}

// MountLater makes more mounts of volumes that the guest has, in the folder root. It is called after Mount.
// Errors: InvalidArgument if there is no such volume.
func (k *Keeper) MountLater(ctx context.Context, root string, mounts []vm.Mount) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, m := range mounts {
		v, ok := k.volumes[m.Volume]
		if !ok || !k.closed {
			return errdefs.Invalidf("the guest has no volume %q to mount at %s", m.Volume, m.Path)
		}
		if err := k.mountLater(ctx, root, v, m); err != nil {
			return fmt.Errorf("mount volume %s at %s: %w", m.Volume, m.Path, err)
		}
	}
	return nil
}

// mountLater takes the mount from where the stage is mounted. Preconditions: mu is held.
func (k *Keeper) mountLater(ctx context.Context, root string, v vm.Volume, m vm.Mount) error {
	tree, folder, err := k.tree(ctx, v, m)
	if err != nil {
		return err
	}
	defer unix.Close(tree)
	return moveInto(root, tree, m.Path, folder)
}

// tree returns a mount of v, or of the part of it that m names, that is nowhere yet, and whether it is a folder. Preconditions: mu
// is held.
func (k *Keeper) tree(ctx context.Context, v vm.Volume, m vm.Mount) (tree int, folder bool, err error) {
	if v.Kind == vm.VolumeDisk {
		if err := k.prepare(ctx, v, m); err != nil {
			return -1, false, err
		}
	}
	err = k.staged(func() error {
		src, err := k.source(v, m.SubPath)
		if err != nil {
			return err
		}
		defer unix.Close(src)
		var st unix.Stat_t
		if err := unix.Fstat(src, &st); err != nil {
			return err
		}
		folder = st.Mode&unix.S_IFMT == unix.S_IFDIR
		tree, err = clone(src, attributes(v, m))
		return err
	})
	return tree, folder, err
}

// moveInto puts a mount from clone at a path in the folder root.
func moveInto(root string, tree int, name string, folder bool) error {
	return inFolder(root, name, folder, func(dst int) error { return move(tree, dst) })
}

// inFolder calls f with the folder or file at a path in the folder root, where a volume can be mounted.
func inFolder(root, name string, folder bool, f func(dst int) error) error {
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	dst, err := target(fd, name, folder)
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	return f(dst)
}

// vaultPath is where the stage is mounted in the vault. The folder of a mount must stay where it is in all namespaces: its removal in
// one would end the mount in all others.
const vaultPath = "/sys"

// keepStage keeps the stage mounted in a mount namespace of its own. Preconditions: mu is held, and the stage is mounted.
func (k *Keeper) keepStage() error {
	return proc.OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("keep the memory of volumes: %w", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("keep the memory of volumes: %w", err)
		}
		if err := unix.Mount(k.stage, vaultPath, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("keep the memory of volumes: %w", err)
		}
		if err := k.leaveStage(); err != nil {
			return fmt.Errorf("keep the memory of volumes: %w", err)
		}
		ns, err := os.Open("/proc/thread-self/ns/mnt")
		k.vault = ns
		return err
	})
}

// leaveStage unmounts the disks of volumes in the calling thread's mount namespace, which has a copy of all mounts, except in the stage:
// a copy would keep a disk in use after it was unmounted everywhere else. Preconditions: mu is held.
func (k *Keeper) leaveStage() error {
	roots := k.disks.roots(func(mountedDisk) bool { return true })
	if len(roots) == 0 {
		return nil
	}
	proc, err := os.OpenFile("/proc", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer proc.Close()
	for _, root := range roots {
		dev, err := deviceOf(root)
		if err != nil {
			return err
		}
		lines, err := mountsOf(proc, dev)
		if err != nil {
			return err
		}
		for _, l := range slices.Backward(lines) {
			if strings.HasPrefix(l.at, vaultPath+"/") {
				continue
			}
			if err := unix.Unmount(l.at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
				return err // the others were below a mount that has gone
			}
		}
	}
	return nil
}

// staged runs f where the stage is mounted. Preconditions: mu is held.
func (k *Keeper) staged(f func() error) error {
	if k.vault == nil {
		return f()
	}
	return proc.OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return err
		}
		if err := unix.Setns(int(k.vault.Fd()), unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("enter the memory of volumes: %w", err)
		}
		return f()
	})
}

// base is where the stage is, as staged shows it.
func (k *Keeper) base() string {
	if k.vault != nil {
		return vaultPath
	}
	return k.stage
}

// top is the folder of v, as staged shows it, or its device.
func (k *Keeper) top(v vm.Volume) string {
	switch {
	case limited(v):
		return path.Join(k.base(), v.Name, shown)
	case v.Kind == vm.VolumeEmpty && !v.Memory:
		return path.Join(k.layer, v.Name)
	case k.uses[v.Name] == useDevice:
		return path.Join(k.base(), devices, v.Name)
	}
	return path.Join(k.base(), v.Name)
}

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
	"cocoonstack.io/cocoon/internal/filesystem"
	"cocoonstack.io/cocoon/internal/filesystem/ext4"
	"cocoonstack.io/cocoon/internal/guestagent/boot"
	"cocoonstack.io/cocoon/internal/proc"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file attaches and detaches volumes while programs run.

// Place is a root folder that programs of the guest have.
type Place struct {
	Name   string                     // unique in the guest
	Enter  func(f func() error) error // runs f where that folder is the root
	Change func(f func() error) error // is Enter for an f that writes, even where the root is read-only
}

// Attach makes v, a disk that was plugged, usable, and mounts it at a path in each of places; with "" it only waits for the disk.
// After an error v is mounted nowhere. Idempotent.
// Errors: Conflict if the guest has another volume of this name, Unavailable if the disk does not appear; InvalidArgument,
// FailedPrecondition and DataLoss as for Mount.
func (k *Keeper) Attach(ctx context.Context, v vm.Volume, at string, places []Place) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if has, ok := k.volumes[v.Name]; ok && (has.Kind != vm.VolumeDisk || has.Disk.Ref != v.Disk.Ref) {
		return errdefs.Conflictf("the guest has another volume %s", v.Name)
	}
	if err := k.needVault(); err != nil {
		return err
	}
	if at == "" {
		_, err := k.find(ctx, v.Disk.Ref)
		if err == nil {
			k.volumes[v.Name] = v
		}
		return err
	}
	err := k.attach(ctx, v, vm.Mount{Volume: v.Name, Path: at}, places)
	if err == nil {
		k.volumes[v.Name] = v
		return nil
	}
	lifted, failed := k.lift(v.Name, places)
	if failed == nil {
		failed = k.forget(v.Name, places)
	} else {
		failed = errors.Join(failed, k.putBack(ctx, v, lifted))
	}
	return errors.Join(err, failed)
}

// attach mounts v where it is not mounted yet. Preconditions: mu is held.
func (k *Keeper) attach(ctx context.Context, v vm.Volume, m vm.Mount, places []Place) error {
	for _, p := range places {
		key := mountKey(p, v.Name)
		if k.mounted[key] {
			continue
		}
		tree, folder, err := k.tree(ctx, v, m)
		if err != nil {
			return err
		}
		err = p.Change(func() error { return inFolder("/", m.Path, folder, func(int) error { return nil }) }) // makes the folder
		if err == nil {
			err = p.Enter(func() error { return moveInto("/", tree, m.Path, folder) })
		}
		if err = errors.Join(err, unix.Close(tree)); err != nil {
			return fmt.Errorf("mount it at %s: %w", m.Path, err)
		}
		k.mounted[key] = true
	}
	return nil
}

// mountKey is the key of a volume that was attached while programs ran in Keeper.mounted. No path has such a form.
func mountKey(p Place, volume string) string { return p.Name + "\x00" + volume }

// needVault makes sure that the stage is mounted in the vault, also in a guest that had no volumes so far. Preconditions: mu is held.
func (k *Keeper) needVault() error {
	if k.vault != nil {
		return nil
	}
	if err := k.open(); err != nil {
		return err
	}
	return k.close()
}

// Detach unmounts a volume in all of places, and makes the kernel forget its disk, which has that serial. A volume and a disk that
// the guest does not have are no error.
// Errors: FailedPrecondition while a program uses the volume; then it is mounted as before.
func (k *Keeper) Detach(ctx context.Context, volume, serial string, places []Place) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	disks, err := boot.Disks()
	if err != nil {
		return err
	}
	v, known := k.volumes[volume]
	lifted, err := k.lift(volume, places)
	if err == nil {
		err = k.forget(volume, places)
	}
	if err == nil && disks[serial] != "" {
		err = letGo(disks[serial])
	}
	if err != nil && known {
		k.volumes[volume] = v
		err = errors.Join(err, k.putBack(ctx, v, lifted))
	}
	return err
}

// letGo makes the kernel forget a disk that nothing uses.
func letGo(dev string) error {
	claim, err := unix.Open(dev, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0) // fails while it is mounted anywhere
	switch {
	case errors.Is(err, unix.EBUSY):
		return inUse("a program of the guest has mounted it, or has a file of it open")
	case err != nil:
		return fmt.Errorf("look whether a program uses the disk: %w", err)
	}
	defer unix.Close(claim)
	if err := boot.Forget(dev); err != nil {
		return fmt.Errorf("make the kernel forget the disk: %w", err)
	}
	return nil
}

func inUse(how string) error {
	return errdefs.Preconditionf("the volume is in use: %s; end that program, or stop the VM", how)
}

// lifted is a mount of a volume that was unmounted.
type lifted struct {
	place Place
	mountLine
}

// lift unmounts the mounts of a volume in all of places. On error it returns those that it has unmounted so far. Preconditions: mu is
// held.
func (k *Keeper) lift(volume string, places []Place) (all []lifted, err error) {
	root := k.disks.root(volume)
	if root == nil {
		return nil, nil
	}
	dev, err := deviceOf(root)
	if err != nil {
		return nil, err
	}
	return liftAll(dev, places)
}

// liftAll is lift for the file system with that device.
func liftAll(dev string, places []Place) (all []lifted, err error) {
	proc, err := os.OpenFile("/proc", unix.O_PATH|unix.O_DIRECTORY, 0) // programs of a container may have mounted something over theirs
	if err != nil {
		return nil, err
	}
	defer proc.Close()
	for _, p := range places {
		err := p.Enter(func() error {
			lines, err := mountsOf(proc, dev)
			if err != nil {
				return err
			}
			for _, l := range slices.Backward(lines) {
				if err := unix.Unmount(l.at, unix.UMOUNT_NOFOLLOW); errors.Is(err, unix.EBUSY) {
					return inUse(fmt.Sprintf("a program of the guest has a file below %s open or works there, or another volume is mounted there", l.at))
				} else if err != nil {
					return fmt.Errorf("unmount %s: %w", l.at, err)
				}
				all = append(all, lifted{p, l})
			}
			return nil
		})
		if err != nil {
			return all, err
		}
	}
	return all, nil
}

// putBack mounts what lift has unmounted. Preconditions: mu is held.
func (k *Keeper) putBack(ctx context.Context, v vm.Volume, all []lifted) error {
	for _, l := range slices.Backward(all) {
		tree, folder, err := k.tree(ctx, v, vm.Mount{Volume: v.Name, Path: l.at, SubPath: strings.TrimPrefix(l.of, "/"), ReadOnly: l.readOnly})
		if err == nil {
			err = l.place.Enter(func() error { return moveInto("/", tree, l.at, folder) })
			err = errors.Join(err, unix.Close(tree))
		}
		if err != nil {
			return fmt.Errorf("mount volume %s at %s again: %w", v.Name, l.at, err)
		}
		k.mounted[mountKey(l.place, v.Name)] = true
	}
	return nil
}

// forget makes the keeper forget a volume whose mounts were lifted. Preconditions: mu is held.
func (k *Keeper) forget(volume string, places []Place) error {
	if k.disks.root(volume) != nil {
		k.disks.remove(volume)
		err := k.staged(func() error {
			dir := path.Join(k.base(), volume)
			return errors.Join(unix.Unmount(dir, unix.MNT_DETACH), os.Remove(dir))
		})
		if err != nil {
			return fmt.Errorf("unmount volume %s: %w", volume, err)
		}
	}
	if k.uses[volume] == useDevice {
		file := k.top(k.volumes[volume])
		if err := k.staged(func() error { return os.Remove(file) }); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove the device file of volume %s: %w", volume, err)
		}
	}
	for _, p := range places {
		delete(k.mounted, mountKey(p, volume))
	}
	delete(k.volumes, volume)
	delete(k.made, volume)
	delete(k.uses, volume)
	return nil
}

// mountLine is what the kernel says about one mount.
type mountLine struct {
	of       string // the folder of its file system that it shows
	at       string // where it is
	readOnly bool
}

// deviceOf returns the device of the file system of root, as lists of mounts show it.
func deviceOf(root *os.File) (string, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(root.Fd()), &st)
	return fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)), err
}

// mountsOf returns the mounts of a file system that the calling thread sees, the first one first. proc is the folder /proc.
func mountsOf(proc *os.File, dev string) (lines []mountLine, err error) {
	fd, err := unix.Openat(int(proc.Fd()), "thread-self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("list the mounts: %w", err)
	}
	f := os.NewFile(uintptr(fd), "mountinfo")
	defer f.Close()
	text, err := io.ReadAll(f)
	if err != nil {
		return nil, fmt.Errorf("list the mounts: %w", err)
	}
	return parseMounts(string(text), dev), nil
}

// parseMounts returns the mounts of a file system from the text of /proc/PID/mountinfo.
func parseMounts(text, dev string) (lines []mountLine) {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 6 || f[2] != dev {
			continue
		}
		lines = append(lines, mountLine{
			of: proc.MountPath(f[3]), at: proc.MountPath(f[4]), readOnly: slices.Contains(strings.Split(f[5], ","), "ro"),
		})
	}
	return lines
}

// Grow waits until the kernel sees size bytes on the disk with that serial, and grows the file system of the volume on it, if that is
// mounted and can be written to. Idempotent.
// Errors: Unavailable if the kernel does not see them in time.
func (k *Keeper) Grow(ctx context.Context, volume, serial string, size int64) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	dev, err := k.find(ctx, serial)
	if err != nil {
		return err
	}
	if err := boot.Remeasure(dev); err != nil {
		return fmt.Errorf("look at the size of the disk: %w", err)
	}
	disk, err := os.Open(dev)
	if err != nil {
		return err
	}
	defer disk.Close()
	ctx, cancel := context.WithTimeout(ctx, diskLimit)
	defer cancel()
	if err := ext4.Await(ctx, disk, size); err != nil {
		return err
	}
	root := k.disks.root(volume)
	if root == nil || k.volumes[volume].Disk == nil || k.volumes[volume].Disk.ReadOnly {
		return nil
	}
	return filesystem.Grow(root, dev)
}

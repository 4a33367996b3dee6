package volumes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"

	"golang.org/x/sys/unix"

	format "cocoonstack.io/cocoon/internal/ext4"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file keeps volumes that start empty within their size limits. On disk, such a volume is a folder in a file system of its own,
// which is in a file of the writable layer. The file has all its blocks from the start, so writes to the volume never fail because
// others have filled the disk.

// Names in the writable layer and in such a file system.
const (
	limitedFolder = ".limited" // has the files; no volume has such a name
	shown         = "content"  // the folder that programs see
	filler        = "filler"   // a file that takes what is free above the limit
)

const (
	// largestLimit is the largest limit that is enforced on disk, in bytes. It is far above the size of any VM's disk.
	largestLimit = 8 << 40
	// ext4 keeps track of large files in blocks that count as free: this part of the limit, and a few more, in bytes.
	trackedPart = 1024
	tracked     = 64 << 10
	// restPart is the part of the free disk that a volume leaves to others.
	restPart = 8
)

// roomFor returns the bytes that must be free for a volume with that limit.
func roomFor(limit int64) int64 { return limit + limit/trackedPart + tracked }

// limited reports whether v has a file system of its own because of its limit. Preconditions: v comes from placed.
func limited(v vm.Volume) bool { return v.Kind == vm.VolumeEmpty && !v.Memory && v.SizeLimit > 0 }

// placed returns v as it is made here. A volume that starts empty has no limit of its own if the disk has no room for that much: then
// the disk is the limit. It stays what it was at an earlier start. Without a disk, volumes with a limit are in memory of their own.
func (k *Keeper) placed(v vm.Volume) (vm.Volume, error) {
	if !limited(v) {
		return v, nil
	}
	if !k.machine.HasDisk {
		v.Memory = true
		return v, nil
	}
	for dir, limit := range map[string]int64{path.Join(k.layer, limitedFolder): v.SizeLimit, k.layer: 0} {
		fd, err := resolve(path.Join(dir, v.Name))
		if err == nil {
			v.SizeLimit = limit
			return v, unix.Close(fd)
		}
		if !errors.Is(err, unix.ENOENT) {
			return v, err
		}
	}
	fits, err := k.fits(v.SizeLimit)
	if err == nil && !fits {
		v.SizeLimit = 0
	}
	return v, err
}

// fits reports whether the disk has room for a volume with that limit.
func (k *Keeper) fits(limit int64) (bool, error) {
	if limit > largestLimit {
		return false, nil
	}
	size, err := format.SizeFor(roomFor(limit))
	if err != nil {
		return false, err
	}
	layer, err := folderInLayer(k.layer)
	if err != nil {
		return false, err
	}
	defer unix.Close(layer)
	var fs unix.Statfs_t
	if err := unix.Fstatfs(layer, &fs); err != nil {
		return false, err
	}
	free := int64(fs.Bavail) * fs.Bsize
	return size <= free-free/restPart, nil
}

// makeLimited mounts the file system of v, and makes it first if there is none.
func (k *Keeper) makeLimited(ctx context.Context, v vm.Volume) error {
	root := k.disks.root(v.Name)
	if root == nil {
		file, err := k.backing(v)
		if err != nil {
			return err
		}
		defer file.Close()
		dev, err := k.loop(file)
		if err != nil {
			return err
		}
		defer dev.Close() // the mount keeps the device
		disk := v
		disk.Disk = &vm.VolumeUse{}
		if root, err = k.mountStore(ctx, disk, dev.Name()); err != nil {
			return err
		}
		k.disks.add(disk, root)
	}
	return bound(int(root.Fd()), v)
}

// backing opens the file with the file system of v, and makes an empty one if there is none.
func (k *Keeper) backing(v vm.Volume) (*os.File, error) {
	parent, err := folderInLayer(path.Join(k.layer, limitedFolder))
	if err != nil {
		return nil, err
	}
	defer unix.Close(parent)
	const flags = unix.O_RDWR | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(parent, v.Name, flags, 0)
	if err == nil {
		return os.NewFile(uintptr(fd), v.Name), nil
	}
	if !errors.Is(err, unix.ENOENT) {
		return nil, err
	}
	size, err := format.SizeFor(roomFor(v.SizeLimit))
	if err != nil {
		return nil, err
	}
	temp := "." + v.Name + ".new" // a guest that is interrupted here must not find a file without its blocks
	if fd, err = unix.Openat(parent, temp, flags|unix.O_CREAT|unix.O_TRUNC, 0o600); err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), v.Name)
	if err = unix.Fallocate(fd, 0, 0, size); err != nil {
		err = fmt.Errorf("reserve %d bytes of the disk: %w", size, err)
	} else {
		err = unix.Renameat(parent, temp, parent, v.Name)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close(), unix.Unlinkat(parent, temp, 0))
	}
	return file, nil
}

// loop makes a block device of a file. It ends with its last user.
func (k *Keeper) loop(file *os.File) (*os.File, error) {
	if err := k.machine.Loop(); err != nil {
		return nil, err
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("the kernel of the guest makes no disks of files: %w", err)
	}
	defer control.Close()
	for {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("look for a free loop device: %w", err)
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &unix.LoopConfig{Fd: uint32(file.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}})
		if err == nil {
			return dev, nil
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) { // EBUSY: another program was faster
			return nil, fmt.Errorf("make a disk of the file of volume %s: %w", file.Name(), err)
		}
	}
}

// bound makes the folder of v in its file system, whose root is given, if there is none. Before that it takes what is free above the
// limit.
func bound(root int, v vm.Volume) error {
	var st unix.Stat_t
	if err := unix.Fstatat(root, shown, &st, unix.AT_SYMLINK_NOFOLLOW); !errors.Is(err, unix.ENOENT) {
		return err
	}
	fd, err := unix.Openat(root, filler, unix.O_RDWR|unix.O_CREAT|unix.O_TRUNC|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var fs unix.Statfs_t
	if err := unix.Fstatfs(root, &fs); err != nil {
		return err
	}
	if spare := int64(fs.Bavail)*fs.Bsize - fs.Bsize - roomFor(v.SizeLimit); spare > 0 { // the folder takes a block
		if err := unix.Fallocate(fd, 0, 0, spare); err != nil {
			return fmt.Errorf("limit the volume to %d bytes: %w", v.SizeLimit, err)
		}
	}
	return makeFolderWhole(root, shown, v.Group)
}

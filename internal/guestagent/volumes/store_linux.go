package volumes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filesystem"
	"cocoonstack.io/cocoon/internal/filesystem/signature"
	"cocoonstack.io/cocoon/internal/guestagent/boot"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file mounts the file systems of volumes that are disks of their own.

// diskLimit limits the wait for the disk of a volume, which may just have been plugged.
const diskLimit = 10 * time.Second

// diskUse is how a disk is used. One disk is not used in both ways: what writes to the device would damage the file system.
type diskUse string

const (
	useMount  diskUse = "a file system"
	useDevice diskUse = "a device"
)

// prepare makes the disk of v usable as m asks for. Preconditions: mu is held.
func (k *Keeper) prepare(ctx context.Context, v vm.Volume, m vm.Mount) error {
	use := useMount
	if m.Device {
		use = useDevice
	}
	if has := k.uses[v.Name]; has != "" && has != use {
		return errdefs.Invalidf("it is already used as %s, so it cannot be used as %s, too", has, use)
	}
	if k.made[v.Name] {
		return nil
	}
	dev, err := k.find(ctx, v.Disk.Ref)
	if err != nil {
		return err
	}
	k.uses[v.Name] = use
	if m.Device {
		err = k.makeDevice(v, dev)
	} else {
		err = k.makeStore(ctx, v, dev)
	}
	if err != nil {
		return fmt.Errorf("disk %s: %w", v.Disk.Ref, err)
	}
	k.made[v.Name] = true
	return nil
}

// find returns the device of the disk with that serial.
func (k *Keeper) find(ctx context.Context, serial string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, diskLimit)
	defer cancel()
	disks, missing, err := boot.Await(ctx, k.machine.Plug, serial)
	if missing != "" {
		return "", errdefs.Unavailablef("the guest has no disk with the serial %s: %w", missing, err)
	}
	return disks[serial], err
}

// makeStore mounts the file system of v on the device dev. It makes it on a blank disk, and grows it on one that has grown.
func (k *Keeper) makeStore(ctx context.Context, v vm.Volume, dev string) error {
	root := k.disks.root(v.Name)
	if root == nil {
		var err error
		if root, err = k.mountStore(ctx, v, dev); err != nil {
			return err
		}
		k.disks.add(v, root)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(root.Fd()), &fs); err != nil {
		return fmt.Errorf("look at the file system: %w", err)
	}
	if v.Disk.ReadOnly || fs.Flags&unix.ST_RDONLY != 0 { // some say of themselves that they can only be read, such as that of a memory dump
		return nil
	}
	if err := filesystem.Grow(root, dev); err != nil {
		return err
	}
	if v.Group == nil {
		return nil
	}
	return regroup(ctx, root, int(*v.Group), v.Disk.GroupOnMismatch)
}

// mountStore mounts the file system of v, and returns its root.
func (k *Keeper) mountStore(ctx context.Context, v vm.Volume, dev string) (root *os.File, err error) {
	disk, err := filesystem.Open(dev, v.Disk.ReadOnly)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, disk.Close()) }()
	kind, options, err := filesystem.Prepare(ctx, disk, k.rules(v))
	if err != nil {
		return nil, err
	}
	flags := uintptr(0)
	if v.Disk.ReadOnly {
		flags = unix.MS_RDONLY
	}
	err = k.staged(func() error {
		dir := path.Join(k.base(), v.Name)
		if err := os.Mkdir(dir, 0o700); err != nil && !os.IsExist(err) {
			return err
		}
		if err := unix.Mount(dev, dir, string(kind), flags, options); err != nil {
			return filesystem.MountError(kind, err)
		}
		root, err = os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		return err
	})
	return root, err
}

// rules are those by which the disk of v gets its file system.
func (k *Keeper) rules(v vm.Volume) filesystem.Rules {
	return filesystem.Rules{
		ReadOnly: v.Disk.ReadOnly, FSType: v.Disk.FSType, Group: v.Group,
		Keep:      limited(v), // the host gets freed space of a volume's disk back, but a file in the writable layer keeps its blocks
		MountsXFS: k.mountsXFS, MakeXFS: k.makeXFS, Check: k.machine.Check,
	}
}

// makeXFS has no writer of ours: it needs the image's.
func (k *Keeper) makeXFS(ctx context.Context, dev string) error {
	i := slices.IndexFunc(mkfsXFS, func(file string) bool { return unix.Access(file, unix.X_OK) == nil })
	if i < 0 {
		return errdefs.Preconditionf("the disk is blank, and the image has no mkfs.xfs to make an xfs file system; use ext4, or an image with xfsprogs")
	}
	code, output, err := k.machine.Run(ctx, mkfsXFS[i], "-q", dev)
	if err == nil && code != 0 {
		err = errdefs.New(errdefs.Internal, "mkfs.xfs ended with code %d: %s", code, output)
	}
	return err
}

var mkfsXFS = []string{"/usr/sbin/mkfs.xfs", "/sbin/mkfs.xfs", "/usr/bin/mkfs.xfs"}

// mountsXFS returns an error if the kernel does not know xfs, even after what is needed for it was loaded.
func (k *Keeper) mountsXFS() error {
	if k.machine.XFS != nil {
		if err := k.machine.XFS(); err != nil {
			return err
		}
	}
	text, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return fmt.Errorf("list what the kernel can mount: %w", err)
	}
	if !slices.Contains(strings.Fields(string(text)), string(signature.XFS)) {
		return errdefs.Unsupportedf("the kernel of the guest cannot mount %s; use ext4, or use the volume as a device", signature.XFS)
	}
	return nil
}

// mountedDisks are the volumes whose file systems are mounted. It is safe for concurrent use, also while another volume is being made.
type mountedDisks struct {
	mu       sync.Mutex
	byVolume map[string]mountedDisk
}

type mountedDisk struct {
	root     *os.File
	readOnly bool
}

// remove closes the root of a volume, if it is mounted.
func (d *mountedDisks) remove(volume string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if root := d.byVolume[volume].root; root != nil {
		_ = root.Close()
	}
	delete(d.byVolume, volume)
}

// root returns the root of a volume; nil if it is not mounted.
func (d *mountedDisks) root(volume string) *os.File {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.byVolume[volume].root
}

func (d *mountedDisks) add(v vm.Volume, root *os.File) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.byVolume[v.Name] = mountedDisk{root: root, readOnly: v.Disk.ReadOnly}
}

// Disks returns the roots of the mounted file systems of volumes that can be written to. They stay open.
func (k *Keeper) Disks() []*os.File {
	return k.disks.roots(func(d mountedDisk) bool { return !d.readOnly })
}

func (d *mountedDisks) roots(of func(mountedDisk) bool) (roots []*os.File) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, one := range d.byVolume {
		if of(one) {
			roots = append(roots, one.root)
		}
	}
	return roots
}

// Usage returns what the mounted file systems of volumes have, by the name of the volume.
func (k *Keeper) Usage() map[string]unix.Statfs_t {
	k.disks.mu.Lock()
	defer k.disks.mu.Unlock()
	out := map[string]unix.Statfs_t{}
	for name, d := range k.disks.byVolume {
		var st unix.Statfs_t
		if err := unix.Fstatfs(int(d.root.Fd()), &st); err == nil {
			out[name] = st
		}
	}
	return out
}

// devices is the folder of the stage with the devices of volumes. No volume has such a name.
const devices = ".devices"

// makeDevice makes a device file for the disk dev. The stage is mounted without devices, so device files are on a tmpfs of their own.
func (k *Keeper) makeDevice(v vm.Volume, dev string) error {
	var st unix.Stat_t
	if err := unix.Stat(dev, &st); err != nil {
		return fmt.Errorf("look at %s: %w", dev, err)
	}
	mode, gid := uint32(0o660), 0
	if v.Disk.ReadOnly {
		mode = 0o440
	}
	if v.Group != nil {
		gid = int(*v.Group)
	}
	return k.staged(func() error {
		dir := path.Join(k.base(), devices)
		if err := os.Mkdir(dir, 0o700); err == nil {
			if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0700,size=64k"); err != nil {
				return errors.Join(fmt.Errorf("mount memory for devices: %w", err), os.Remove(dir))
			}
		} else if !os.IsExist(err) {
			return err
		}
		file := k.top(v)
		if err := unix.Mknod(file, unix.S_IFBLK|mode, int(st.Rdev)); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("make the device file: %w", err)
		}
		return errors.Join(unix.Chown(file, 0, gid), unix.Chmod(file, mode)) // independent of the umask
	})
}

package volumes

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	format "cocoonstack.io/cocoon/internal/ext4"
	"cocoonstack.io/cocoon/internal/guestagent/boot"
	"cocoonstack.io/cocoon/internal/guestagent/ext4"
	"cocoonstack.io/cocoon/internal/guestagent/signature"
	"cocoonstack.io/cocoon/internal/guestagent/xfs"
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
	if err := growStore(root, dev); err != nil {
		return err
	}
	if v.Group == nil {
		return nil
	}
	return regroup(ctx, root, int(*v.Group), v.Disk.GroupOnMismatch)
}

// growStore extends the file system of root to all of dev.
func growStore(root *os.File, dev string) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(root.Fd()), &fs); err != nil {
		return fmt.Errorf("look at the file system: %w", err)
	}
	if fs.Type == unix.XFS_SUPER_MAGIC {
		return xfs.Grow(root, dev)
	}
	smaller, err := ext4.Smaller(dev)
	if err != nil || !smaller {
		return err
	}
	return ext4.Grow(root)
}

// mountStore mounts the file system of v, and returns its root.
func (k *Keeper) mountStore(ctx context.Context, v vm.Volume, dev string) (root *os.File, err error) {
	disk, err := openDisk(dev, v.Disk.ReadOnly)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, disk.Close()) }()
	kind, err := contentOf(disk)
	if err != nil {
		return nil, err
	}
	if kind == signature.Blank || kind == signature.Unfinished {
		if kind, err = k.format(ctx, v, disk); err != nil {
			return nil, err
		}
	}
	options := ""
	switch kind {
	case signature.Ext4:
		if options, err = k.checkExt4(ctx, v, disk); err != nil {
			return nil, err
		}
	case signature.XFS:
		if err := k.canMount(kind); err != nil {
			return nil, err
		}
	default:
		return nil, errdefs.Preconditionf(
			"it holds %s instead of an ext4 or xfs file system, and stays unchanged; use the volume as a device, or erase the first and the last MiB of the disk to get a new file system", kind)
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
		switch err := unix.Mount(dev, dir, string(kind), flags, options); {
		case kind == signature.XFS && slices.ContainsFunc(damagedXFS, func(e error) bool { return errors.Is(err, e) }):
			return errdefs.DataLossf("its xfs file system is damaged, or too new for the kernel of the guest, and is not mounted; run xfs_repair in a VM that has the volume as a device: %w", err)
		case err != nil:
			return fmt.Errorf("mount its %s file system: %w", kind, err)
		}
		root, err = os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		return err
	})
	return root, err
}

// damagedXFS are the errors of a mount of xfs for what the disk holds.
var damagedXFS = []error{unix.EUCLEAN, unix.EINVAL, unix.ENOSYS, unix.EFBIG, unix.EBADMSG}

// openDisk opens a device, which must be writable unless readOnly.
func openDisk(dev string, readOnly bool) (*os.File, error) {
	f, err := os.Open(dev)
	if err != nil || readOnly {
		return f, err
	}
	fixed, err := readOnlyDisk(f)
	if err == nil && fixed {
		err = errdefs.Preconditionf("the disk is read-only; use the volume read-only")
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	return os.OpenFile(dev, os.O_RDWR, 0)
}

// contentOf tells what a disk holds.
func contentOf(disk *os.File) (signature.Kind, error) {
	size, err := disk.Seek(0, io.SeekEnd)
	if err != nil {
		return "", fmt.Errorf("look at its size: %w", err)
	}
	const usual = 128 << 10 // where the signatures of nearly all disks are
	window := make([]byte, min(size, signature.Window))
	for _, head := range [][]byte{window[:min(len(window), usual)], window} {
		if _, err := disk.ReadAt(head, 0); err != nil {
			return "", fmt.Errorf("look for a file system: %w", err)
		}
		if kind := signature.Identify(head, nil); kind != signature.Blank && kind != signature.Unknown {
			return kind, nil
		}
	}
	if signature.Identify(window, nil) == signature.Unknown {
		return signature.Unknown, nil
	}
	if _, err := disk.ReadAt(window, size-int64(len(window))); err != nil {
		return "", fmt.Errorf("look for a file system: %w", err)
	}
	return signature.Identify(nil, window), nil
}

// format makes a file system on a blank disk.
func (k *Keeper) format(ctx context.Context, v vm.Volume, disk *os.File) (signature.Kind, error) {
	if v.Disk.ReadOnly {
		return "", errdefs.Preconditionf("the disk is blank, and a read-only volume cannot get a file system; use it in a VM that can write to it first")
	}
	if v.Disk.FSType == string(signature.XFS) {
		return signature.XFS, k.formatXFS(ctx, disk)
	}
	size, err := disk.Seek(0, io.SeekEnd)
	if err != nil {
		return "", fmt.Errorf("look at its size: %w", err)
	}
	e := format.Empty{Size: size, Mode: 0o777, Now: time.Now()}
	if v.Group != nil {
		e.Mode, e.GID = 0o777|unix.S_ISGID, uint32(*v.Group)
	}
	_, _ = rand.Read(e.ID[:])
	e.ID[6], e.ID[8] = e.ID[6]&0x0f|0x40, e.ID[8]&0x3f|0x80 // a random UUID, as tools expect it
	return signature.Ext4, format.Format(disk, e)
}

// formatXFS has no writer of ours: it needs the image's.
func (k *Keeper) formatXFS(ctx context.Context, disk *os.File) error {
	if err := k.canMount(signature.XFS); err != nil {
		return err
	}
	i := slices.IndexFunc(mkfsXFS, func(file string) bool { return unix.Access(file, unix.X_OK) == nil })
	if i < 0 {
		return errdefs.Preconditionf("the disk is blank, and the image has no mkfs.xfs to make an xfs file system; use ext4, or an image with xfsprogs")
	}
	code, output, err := k.machine.Run(ctx, mkfsXFS[i], "-q", disk.Name())
	if err == nil && code != 0 {
		err = errdefs.New(errdefs.Internal, "mkfs.xfs ended with code %d: %s", code, output)
	}
	return err
}

var mkfsXFS = []string{"/usr/sbin/mkfs.xfs", "/sbin/mkfs.xfs", "/usr/bin/mkfs.xfs"}

// canMount returns an error if the kernel does not know the kind of file system, even after what is needed for xfs was loaded.
func (k *Keeper) canMount(kind signature.Kind) error {
	if kind == signature.XFS && k.machine.XFS != nil {
		if err := k.machine.XFS(); err != nil {
			return err
		}
	}
	text, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return fmt.Errorf("list what the kernel can mount: %w", err)
	}
	if !slices.Contains(strings.Fields(string(text)), string(kind)) {
		return errdefs.Unsupportedf("the kernel of the guest cannot mount %s; use ext4, or use the volume as a device", kind)
	}
	return nil
}

// checkExt4 returns the options to mount a file system with. It repairs one with errors if it can, and fails if it cannot.
func (k *Keeper) checkExt4(ctx context.Context, v vm.Volume, disk *os.File) (options string, err error) {
	const common = "errors=remount-ro"
	state, err := ext4.StateOf(disk.Name())
	if err != nil {
		return "", err
	}
	fixed, err := readOnlyDisk(disk)
	if err != nil {
		return "", err
	}
	switch {
	case state.Damaged && fixed:
		return "", errdefs.DataLossf("its ext4 file system has errors, and the disk is read-only; use the volume in a VM that can write to it, which repairs it, or run e2fsck on the disk")
	case state.Damaged:
		return common + writable(v), k.repair(ctx, disk)
	case fixed && state.Replay:
		return "", errdefs.Preconditionf("its ext4 file system was not unmounted, and its journal cannot be replayed because the disk is read-only; use the volume in a VM that can write to it first")
	case fixed:
		return common + ",noload", nil
	case v.Disk.ReadOnly:
		return common, nil
	}
	return common + writable(v), nil
}

// writable returns options of a file system that is written to. The kernel does not fill the tables of inodes with zeros, which would
// use the host's disk; checksums tell it which inodes were ever used. The host gets freed space of a volume's disk back, but a file in
// the writable layer keeps its blocks.
func writable(v vm.Volume) string {
	if limited(v) {
		return ",noinit_itable"
	}
	return ",discard,noinit_itable"
}

func readOnlyDisk(disk *os.File) (bool, error) {
	n, err := unix.IoctlGetInt(int(disk.Fd()), unix.BLKROGET)
	if err != nil {
		return false, fmt.Errorf("ask whether it is read-only: %w", err)
	}
	return n != 0, nil
}

// repairLimit limits a repair, which does not end early when the host goes away.
const repairLimit = 30 * time.Minute

// maxRepaired is the highest exit code of e2fsck that means success: 1 and 2 tell that it has repaired something.
const maxRepaired = 2

// repair runs e2fsck on a file system with errors.
func (k *Keeper) repair(ctx context.Context, disk *os.File) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), repairLimit)
	defer cancel()
	code, output, err := k.machine.Check(ctx, "-p", disk.Name())
	if err == nil && code > maxRepaired {
		err = errdefs.DataLossf("e2fsck -p cannot repair it (code %d): %s", code, output)
	}
	if err == nil {
		var state ext4.State
		if state, err = ext4.StateOf(disk.Name()); err == nil && state.Damaged {
			err = errdefs.DataLossf("e2fsck -p has left errors: %s", output)
		}
	}
	if err != nil {
		return fmt.Errorf("its ext4 file system has errors and is not mounted; run e2fsck on the disk while no VM uses it: %w", err)
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

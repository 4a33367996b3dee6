// Package boot is what the agent does as PID 1 before it serves: mount the kernel's file systems, load modules, find
// the image's file system and the writable disk, and make them the root.
//
// It does not know the guest protocol. Any failure is returned as one error; the caller prints it and powers off.
package boot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filesystem/ext4"
	"cocoonstack.io/cocoon/internal/vm"
)

// Serials that identify the disks of an OCI guest; the host sets them (internal/image).
const (
	serialLayer = "cocoon-l" // and three digits, 000 being the lowest layer of the image
	serialCOW   = "cocoon-cow"

	serialContainerLayer = "cocoon-i" // and three digits
)

// Folders of the initramfs.
const (
	moduleDir = "/modules"
	checkFile = "/e2fsck.gz"
	lowerDir  = "/l" // short: the kernel accepts 4096 bytes of options, and these name every layer
	upperDir  = "/mnt/upper"
	rootDir   = "/mnt/root"
)

// early are the modules that disk, channel and network need; late ones can wait until the agent answers. Few guests ever need
// those for disks that are plugged later, or for disks in files.
var (
	early = []string{"virtio_pci", "virtio_console", "virtio_blk", "virtio_net"}
	late  = []string{"virtio_rng", "virtio_balloon", "button", "evdev"}
	plug  = []string{"virtio_scsi", "sd_mod"}
	loop  = []string{"loop"}
	nfs   = []string{"nfsv4"}
	xfs   = []string{"xfs"}
	links = []string{"bridge", "veth"}
)

// Result is what Root leaves for the caller.
type Result struct {
	HasRoot bool // false: the machine has no disk of ours and the initramfs is still the root
	Late    func() error
	Plug    func() error // loads what disks need that are plugged later; called once at most
	Loop    func() error // loads what disks in files need; called once at most
	NFS     func() error // loads what folders of NFS servers need, unless the guest was started without vm.ArgNFS; called once at most
	XFS     func() error // loads what xfs needs, if there is a disk that can have it; called once at most
	Links   func() error // loads what bridges and pairs of interfaces need; called once at most
	Check   *os.File     // e2fsck, compressed with gzip; nil if no disk can need it
	Disk    *os.File     // a folder of the writable disk's file system, reachable by no path from the root; nil without a disk
}

// Root turns the initramfs into the guest's root file system.
func Root() (Result, error) {
	if err := mountKernel("/"); err != nil {
		return Result{}, err
	}
	mods, err := openModules(moduleDir)
	if err != nil {
		return Result{}, err
	}
	if err := mods.load(early...); err != nil {
		return Result{}, err
	}
	if hasDevice(virtioDevices, deviceFS) {
		if err := mods.load("virtiofs"); err != nil {
			return Result{}, err
		}
	}
	if hasDevice(virtioDevices, deviceSocket) { // the agent may listen there
		if err := mods.load("vmw_vsock_virtio_transport"); err != nil {
			return Result{}, err
		}
	}
	later := late
	if hasDevice(virtioDevices, deviceMemory) {
		onlineMemory("/sys")
		later = append(slices.Clone(late), "virtio_mem")
	}
	lateModules, err := mods.prepare(later...)
	if err != nil {
		return Result{}, err
	}
	plugModules, err := mods.prepare(plug...)
	if err != nil {
		return Result{}, err
	}
	loopModules, err := mods.prepare(loop...)
	if err != nil {
		return Result{}, err
	}
	nfsModules, err := mods.prepare(wantedNFS("/proc/cmdline")...)
	if err != nil {
		return Result{}, err
	}
	linkModules, err := mods.prepare(links...)
	if err != nil {
		return Result{}, err
	}
	disks, err := Disks()
	if err != nil {
		return Result{}, err
	}
	var xfsModules func() error
	if foreign(disks) {
		if xfsModules, err = mods.prepare(xfs...); err != nil {
			return Result{}, err
		}
	}
	r := Result{Late: lateModules, Plug: plugModules, Loop: loopModules, NFS: nfsModules, XFS: xfsModules, Links: linkModules, Check: openCheck(disks)}
	layers, err := findLayers(disks)
	if err != nil {
		return Result{}, err
	}
	if len(layers) == 0 && disks[serialCOW] == "" {
		return r, nil
	}
	if r.Disk, err = mountRoot(mods, layers, disks[serialCOW]); err != nil {
		return Result{}, err
	}
	r.HasRoot = true
	return r, nil
}

// wantedNFS returns the modules for NFS if the arguments of the kernel ask for them: they take memory while they are open.
func wantedNFS(cmdline string) []string {
	args, err := os.ReadFile(cmdline)
	if err != nil || !slices.Contains(strings.Fields(string(args)), vm.ArgNFS) {
		return nil
	}
	return nfs
}

const virtioDevices = "/sys/bus/virtio/devices"

// Numbers of virtio's devices for a folder that the host shares, for memory that grows and for a socket, as the kernel prints them. Their modules take
// memory, so guests without such a device do not load them.
const (
	deviceFS     = "0x001a"
	deviceMemory = "0x0018"
	deviceSocket = "0x0013"
)

// hasDevice reports whether the machine has a device of that kind.
func hasDevice(devices, kind string) bool {
	kinds, _ := filepath.Glob(devices + "/*/device") // the pattern is valid
	return slices.ContainsFunc(kinds, func(file string) bool {
		text, err := os.ReadFile(file)
		return err == nil && strings.TrimSpace(string(text)) == kind
	})
}

// openCheck opens e2fsck, which takes memory as long as it is open, if there is a foreign disk.
func openCheck(disks map[string]string) *os.File {
	if !foreign(disks) {
		return nil
	}
	f, err := os.Open(checkFile)
	if err != nil {
		return nil // the guest works without it
	}
	return f
}

// foreign reports whether there is a disk that is not of an image or the writable layer.
func foreign(disks map[string]string) bool {
	for serial := range disks {
		if serial != serialCOW && !strings.HasPrefix(serial, serialLayer) && !strings.HasPrefix(serial, serialContainerLayer) {
			return true
		}
	}
	return false
}

// mountRoot mounts an overlay of the image's layers, lowest first, and the writable one, and switches to it. Without layers, the
// root has only what is written. It returns
// the folder of the writable disk, if there is one.
func mountRoot(mods *modules, layers []string, upper string) (*os.File, error) {
	lower := ""
	if len(layers) == 0 { // the guest has no image of its own
		if err := os.MkdirAll(lowerDir+"/0/etc", 0o755); err != nil {
			return nil, fmt.Errorf("prepare an empty root: %w", err)
		}
		lower = lowerDir + "/0:"
	}
	for n, dev := range layers {
		dir := fmt.Sprintf("%s/%d", lowerDir, n)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("prepare the image's layers: %w", err)
		}
		if err := mountImage(mods, dev, dir); err != nil {
			return nil, fmt.Errorf("layer %d of the image: %w", n, err)
		}
		lower = dir + ":" + lower // overlayfs lists the highest first
	}
	if err := mountUpper(upper); err != nil {
		return nil, err
	}
	for _, dir := range []string{"upper", "work"} {
		if err := os.MkdirAll(filepath.Join(upperDir, dir), 0o755); err != nil {
			return nil, fmt.Errorf("prepare the writable layer: %w", err)
		}
	}
	if err := mods.load("overlay"); err != nil {
		return nil, err
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", strings.TrimSuffix(lower, ":"), upperDir, upperDir)
	if err := unix.Mount("overlay", rootDir, "overlay", 0, options); err != nil {
		return nil, fmt.Errorf("mount the writable layer over the image: %w", err)
	}
	_ = os.Remove(rootDir + "/lost+found") // of the layers' file systems, not of the image; one with content stays
	if upper == "" {
		return nil, switchRoot(rootDir)
	}
	disk, err := os.Open(upperDir)
	if err != nil {
		return nil, fmt.Errorf("open the writable disk: %w", err)
	}
	if err := grow(upper, disk); err != nil {
		fmt.Fprintf(os.Stderr, "cocoon-guest: %v\n", err) // the present size is usable all the same
	}
	return disk, switchRoot(rootDir)
}

// grow extends the file system of disk to all of dev: a clone's disk may be larger than its source's.
func grow(dev string, disk *os.File) error {
	smaller, err := ext4.Smaller(dev)
	if err != nil || !smaller {
		return err
	}
	return ext4.Grow(disk)
}

// mountImage mounts a layer's disk read-only. Its superblock tells the file system.
func mountImage(mods *modules, dev, dir string) error {
	kind, err := fileSystem(dev)
	if err != nil {
		return err
	}
	if kind != "ext4" { // ext4 is built in
		if err := mods.load(kind); err != nil {
			return err
		}
	}
	return mountLayer(dev, dir, kind)
}

// MountLayer mounts a layer's disk read-only after Root, which has loaded the modules for image file systems.
func MountLayer(dev, dir string) error {
	kind, err := fileSystem(dev)
	if err != nil {
		return err
	}
	return mountLayer(dev, dir, kind)
}

func mountLayer(dev, dir, kind string) error {
	options := ""
	if kind == "ext4" {
		options = "noload" // the disk is read-only and shared: the journal must not be replayed
	}
	if err := unix.Mount(dev, dir, kind, unix.MS_RDONLY|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount the image's %s file system on %s: %w", kind, dev, err)
	}
	return nil
}

// mountUpper mounts the writable disk, or memory if there is none.
func mountUpper(dev string) error {
	if dev == "" {
		if err := unix.Mount("tmpfs", upperDir, "tmpfs", 0, "mode=0755"); err != nil {
			return fmt.Errorf("mount a writable layer in memory: %w", err)
		}
		return nil
	}
	kind, err := fileSystem(dev)
	if err != nil {
		return err
	}
	if kind != "ext4" {
		return errdefs.DataLossf("the writable disk %s holds %s instead of ext4", dev, kind)
	}
	if err := unix.Mount(dev, upperDir, kind, unix.MS_NOATIME, "discard"); err != nil {
		return fmt.Errorf("mount the writable disk %s: %w", dev, err)
	}
	return nil
}

// switchRoot makes dir the root of this process and of all later ones. It empties the initramfs to free its memory.
func switchRoot(dir string) error {
	for _, m := range []string{"/dev", "/proc", "/sys", "/run"} {
		target := filepath.Join(dir, m)
		if err := folder(target, 0o755); err != nil {
			return fmt.Errorf("prepare %s in the image: %w", m, err)
		}
		if err := unix.Mount(m, target, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s into the image: %w", m, err)
		}
	}
	if err := folder(filepath.Join(dir, "tmp"), 0o1777); err != nil {
		return fmt.Errorf("prepare /tmp in the image: %w", err)
	}
	_ = os.RemoveAll(moduleDir)
	_ = os.Remove(checkFile)
	_ = os.Remove("/init")
	if err := os.Chdir(dir); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("make the image the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("make the image the root: %w", err)
	}
	return os.Chdir("/")
}

// folder makes path a folder. A symbolic link or a file of the image there is replaced in the writable layer.
func folder(path string, mode uint32) error {
	st, err := os.Lstat(path)
	if err == nil && st.IsDir() {
		return nil
	}
	if err == nil {
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	if err := unix.Mkdir(path, mode); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return unix.Chmod(path, mode) // independent of the umask
}

// mountKernel mounts the file systems that programs expect. Those that only some programs need may fail.
func mountKernel(root string) error {
	const safe = unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_NODEV
	for _, m := range []struct {
		kind, target string
		flags        uintptr
		options      string
		optional     bool
	}{
		{"devtmpfs", "dev", unix.MS_NOSUID, "mode=0755", false},
		{"proc", "proc", safe, "", false},
		{"sysfs", "sys", safe, "", false},
		{"tmpfs", "run", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755", false},
		{"devpts", "dev/pts", unix.MS_NOSUID | unix.MS_NOEXEC, "gid=5,mode=0620,ptmxmode=0666", false},
		{"tmpfs", "dev/shm", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777", false},
		{"mqueue", "dev/mqueue", safe, "", true},
		{"cgroup2", "sys/fs/cgroup", safe, "", true},
	} {
		target := filepath.Join(root, m.target)
		err := os.MkdirAll(target, 0o755)
		if err == nil {
			err = unix.Mount(m.kind, target, m.kind, m.flags, m.options)
		}
		if err != nil && !m.optional && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s on /%s: %w", m.kind, m.target, err)
		}
	}
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
	} {
		if err := os.Symlink(target, filepath.Join(root, "dev", name)); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("make /dev/%s: %w", name, err)
		}
	}
	return nil
}

package boot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/blockdev"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/filesystem/signature"
	"cocoonstack.io/cocoon/internal/vm"
)

// Disks maps the serials of the machine's disks to their devices.
func Disks() (map[string]string, error) { return findDisks("/sys/block", "/proc/cmdline") }

// findDisks maps the serials of the machine's disks to their devices. The arguments of the kernel may tell those of virtio disks (vm.ArgDisks), which then say
// something else themselves.
func findDisks(sysBlock, cmdline string) (map[string]string, error) {
	entries, err := os.ReadDir(sysBlock)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("look for disks: %w", err)
	}
	disks, told := map[string]string{}, toldDisks(cmdline)
	for _, e := range entries {
		serial, ok := told[e.Name()]
		if !ok {
			serial = blockdev.Serial(filepath.Join(sysBlock, e.Name()))
		}
		if serial != "" {
			disks[serial] = "/dev/" + e.Name()
		}
	}
	return disks, nil
}

// toldDisks maps virtio disks to the serials that the arguments of the kernel tell.
func toldDisks(cmdline string) map[string]string {
	args, err := os.ReadFile(cmdline)
	if err != nil {
		return nil
	}
	told := map[string]string{}
	for _, arg := range strings.Fields(string(args)) {
		serials, ok := strings.CutPrefix(arg, vm.ArgDisks)
		if !ok {
			continue
		}
		for n, serial := range strings.Split(serials, ",") {
			if n < 26 {
				told["vd"+string(rune('a'+n))] = serial
			}
		}
	}
	return told
}

// Rescan makes the kernel look for disks that were plugged. It returns when it has seen those that are there, but their
// devices may appear a moment later.
func Rescan() error {
	hosts, err := filepath.Glob("/sys/class/scsi_host/host*/scan")
	if err != nil {
		return err
	}
	for _, scan := range hosts {
		if err := os.WriteFile(scan, []byte("0 0 -"), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("look for plugged disks: %w", err)
		}
	}
	return nil
}

// rescanFor is Rescan unless the kernel has seen the disk with that serial. Its device then appears without another look, which would
// take longer than that.
func rescanFor(serial string) error {
	devices, err := filepath.Glob("/sys/class/scsi_device/*")
	if err != nil {
		return err
	}
	if slices.ContainsFunc(devices, func(dir string) bool { return blockdev.Serial(dir) == serial }) {
		return nil
	}
	return Rescan()
}

const plugPause = 10 * time.Millisecond // between two looks: no event announces every disk

// Await waits until the guest has the disks with these serials, which may just have been plugged, and returns all disks. plug loads
// what such disks need. When ctx ends first, missing is the first serial without a disk, and err is the end of ctx.
func Await(ctx context.Context, plug func() error, serials ...string) (disks map[string]string, missing string, err error) {
	tick := time.NewTicker(plugPause)
	defer tick.Stop()
	for {
		if disks, err = Disks(); err != nil {
			return nil, "", err
		}
		n := slices.IndexFunc(serials, func(s string) bool { return !appeared(disks[s]) })
		if n < 0 {
			return disks, "", nil
		}
		if err := errors.Join(plug(), rescanFor(serials[n])); err != nil {
			return nil, "", err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, serials[n], ctx.Err()
		}
	}
}

// appeared reports whether the disk dev can be opened. The kernel lists a new disk in sysfs a moment before it can be opened. Other
// errors count as appeared: the user of the disk reports them.
func appeared(dev string) bool {
	f, err := os.Open(dev)
	if err == nil {
		_ = f.Close()
	}
	return !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENXIO)
}

// Remeasure makes the kernel look at the size of the disk dev, of which some kinds of disks do not tell it.
func Remeasure(dev string) error { return tellDisk(dev, "rescan") }

// Forget makes the kernel forget the disk dev, so that it can be unplugged. Disks that were there at the boot stay.
func Forget(dev string) error { return tellDisk(dev, "delete") }

// tellDisk writes to a file of a SCSI disk in sysfs. Other disks have no such file.
func tellDisk(dev, file string) error {
	f, err := os.OpenFile(filepath.Join("/sys/block", filepath.Base(dev), "device", file), os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = f.WriteString("1")
	return errors.Join(err, f.Close())
}

// findLayers returns the devices with the layers of the image, lowest first; none when there is no image.
func findLayers(disks map[string]string) ([]string, error) {
	var layers []string
	for serial := range disks {
		if strings.HasPrefix(serial, serialLayer) {
			layers = append(layers, "")
		}
	}
	for n := range layers {
		serial := fmt.Sprintf("%s%03d", serialLayer, n)
		if layers[n] = disks[serial]; layers[n] == "" {
			return nil, errdefs.DataLossf("the image has %d layers, and the disk %s of one of them is missing", len(layers), serial)
		}
	}
	return layers, nil
}

// probeSize covers the signatures of the file systems of images, in bytes.
const probeSize = 2048

// fileSystem returns the kind of file system on dev.
func fileSystem(dev string) (string, error) {
	f, err := os.Open(dev)
	if err != nil {
		return "", fmt.Errorf("look for a file system: %w", err)
	}
	defer f.Close()
	head := make([]byte, probeSize)
	n, err := io.ReadFull(f, head)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return "", fmt.Errorf("look for a file system on %s: %w", dev, err)
	}
	if kind := signature.Identify(head[:n], nil); kind == signature.Ext4 || kind == signature.EROFS || kind == signature.SquashFS {
		return string(kind), nil
	}
	return "", errdefs.DataLossf("%s has no supported file system (ext4, erofs, squashfs)", dev)
}

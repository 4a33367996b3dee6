package boot

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Disks maps the serials of the machine's disks to their devices.
func Disks() (map[string]string, error) { return findDisks("/sys/block") }

// findDisks maps the serials of the machine's disks to their devices.
func findDisks(sysBlock string) (map[string]string, error) {
	entries, err := os.ReadDir(sysBlock)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("look for disks: %w", err)
	}
	disks := map[string]string{}
	for _, e := range entries {
		if serial := serialOf(filepath.Join(sysBlock, e.Name())); serial != "" {
			disks[serial] = "/dev/" + e.Name()
		}
	}
	return disks, nil
}

// pageHeader is the length of the header of a SCSI disk's page with its serial, in bytes.
const pageHeader = 4

// serialOf returns the serial of a disk; "" if it has none. dir is the disk's folder in sysfs.
func serialOf(dir string) string {
	serial, err := os.ReadFile(filepath.Join(dir, "serial"))
	if err != nil { // a disk that was plugged later is a SCSI disk
		page, err := os.ReadFile(filepath.Join(dir, "device/vpd_pg80"))
		if err != nil || len(page) < pageHeader {
			return ""
		}
		serial = page[pageHeader:]
	}
	return strings.TrimSpace(string(serial))
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

// probeSize covers every superblock that identify looks at, in bytes.
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
	if kind := identify(head[:n]); kind != "" {
		return kind, nil
	}
	return "", errdefs.DataLossf("%s has no supported file system (ext4, erofs, squashfs)", dev)
}

// identify recognises a file system by the magic number in its first bytes; "" for an unknown one.
func identify(head []byte) string {
	at := func(off, n int) []byte {
		if len(head) < off+n {
			return make([]byte, n)
		}
		return head[off : off+n]
	}
	switch {
	case binary.LittleEndian.Uint16(at(1024+56, 2)) == 0xef53:
		return "ext4"
	case binary.LittleEndian.Uint32(at(1024, 4)) == 0xe0f5e1e2:
		return "erofs"
	case bytes.Equal(at(0, 4), []byte("hsqs")):
		return "squashfs"
	}
	return ""
}

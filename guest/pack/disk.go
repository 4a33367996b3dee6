package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"embed"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// rootfs are the files of the demo disk's system, besides busybox and the modules.
//
//go:embed rootfs
var rootfs embed.FS

// diskModules are the kernel modules of the demo disk. They drive its disks and its network, and read the cloud-init seed. diskOptional are
// used if the kernel has them: for the power button, for memory that it gets while it runs, for disks and CD-ROMs on SCSI, SATA and USB, and for interfaces that are not virtio.
var (
	diskModules  = []string{"virtio_pci", "virtio_blk", "virtio_net", "virtio_rng", "isofs"}
	diskOptional = []string{"button", "evdev", "virtio_mem", "af_packet", "virtio_scsi", "ahci", "xhci_pci", "usb_storage", "e1000", "e1000e", "8139cp", "sd_mod", "sr_mod"}
)

const (
	sector    = 512
	partStart = 2048 // sectors: GRUB's core image is before it
	grubLimit = partStart * sector
	// bootDisk is a jump in boot.img that GRUB's installer replaces, so that GRUB believes the BIOS which disk it started from.
	bootDisk = 0x66
	// coreAt is the place in boot.img of the sector of core.img, and restAt that in the first sector of core.img of the sector of its rest.
	coreAt, restAt = 0x5c, 0x1f4
	// partTable is the first entry of the partition table in the first sector.
	partTable = 0x1be
	// efiSize is the size of the partition that UEFI starts from, in bytes.
	efiSize = 1 << 20
)

// packDisk writes the disk of a small system that a BIOS or UEFI starts: GRUB and a partition, which is a tar archive with the kernel,
// an initramfs and GRUB's menu. GRUB reads such archives, and the system lives in memory, so that only UEFI needs a file system, in a
// partition of its own, which firmwares of virtual machines find in a GPT only. grub is a folder with boot.img, core.img and bootx64.efi.
func packDisk(kernel, modules, busybox, grub, out string) error {
	initrd, err := diskInitramfs(modules, busybox)
	if err != nil {
		return err
	}
	linux, err := os.ReadFile(kernel)
	if err != nil {
		return err
	}
	var part bytes.Buffer
	w := tar.NewWriter(&part)
	for _, f := range []struct {
		name string
		data []byte
	}{{"grub.cfg", []byte(grubMenu)}, {"vmlinuz", linux}, {"initrd", initrd}} {
		err := w.WriteHeader(&tar.Header{Name: f.name, Mode: 0o644, Size: int64(len(f.data)), Format: tar.FormatUSTAR})
		if err == nil {
			_, err = w.Write(f.data)
		}
		if err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	boot, err := os.ReadFile(filepath.Join(grub, "boot.img"))
	if err != nil {
		return err
	}
	core, err := os.ReadFile(filepath.Join(grub, "core.img"))
	if err != nil {
		return err
	}
	loader, err := os.ReadFile(filepath.Join(grub, "bootx64.efi"))
	if err != nil {
		return err
	}
	efi, err := bootLoader(loader, efiSize)
	if err != nil {
		return err
	}
	disk, err := layOut(boot, core, part.Bytes(), efi)
	if err != nil {
		return err
	}
	return os.WriteFile(out, disk, 0o644)
}

// grubMenu starts the kernel, as quickly as an emulated CPU can.
const grubMenu = `linux /vmlinuz console=ttyS0 quiet net.ifnames=0 panic=10 tsc=reliable no_timer_check cryptomgr.notests
initrd /initrd
boot
`

// layOut is the disk, whose partitions are in a GPT: GRUB's first sector and core image, which a BIOS starts, part, and efi, which UEFI starts.
// It ends with a MiB for the second table.
func layOut(boot, core, part, efi []byte) ([]byte, error) {
	if len(boot) != sector || len(core) < sector || gptFirst*sector+len(core) > grubLimit {
		return nil, fmt.Errorf("boot.img of %d bytes and core.img of %d do not fit before the partition", len(boot), len(core))
	}
	const mib = 1 << 20
	whole := func(n int) int { return (n + mib - 1) / mib * mib }
	second := grubLimit + whole(len(part))
	disk := make([]byte, second+whole(len(efi))+mib)
	copy(disk, boot)
	copy(disk[bootDisk:], []byte{0x90, 0x90}) // no operation
	copy(disk[gptFirst*sector:], core)
	for _, f := range []struct{ place, was, is int }{{coreAt, 1, gptFirst}, {gptFirst*sector + restAt, 2, gptFirst + 1}} {
		at := disk[f.place:]
		if was := binary.LittleEndian.Uint64(at); was != uint64(f.was) { //nolint:gosec // it is small
			return nil, fmt.Errorf("this GRUB goes on at sector %d, and not at %d: its boot.img and core.img are not known", was, f.was)
		}
		binary.LittleEndian.PutUint64(at, uint64(f.is)) //nolint:gosec // it is small
	}
	copy(disk[grubLimit:], part)
	copy(disk[second:], efi)
	return disk, writeGPT(disk, []partition{
		{partGRUB, "bios", gptFirst, partStart},
		{partLinux, "system", partStart, second / sector},
		{partEFI, "efi", second / sector, (second + whole(len(efi))) / sector},
	})
}

// diskInitramfs is the system of the demo disk as a cpio archive.
func diskInitramfs(modules, busybox string) ([]byte, error) {
	order, err := loadOrder(filepath.Join(modules, "modules.dep"))
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	w := &archive{w: bufio.NewWriter(&out)}
	for _, dir := range []string{"bin", "dev", "etc", "etc/acpi", "etc/acpi/PWRF", "mnt", "modules", "proc", "root", "run", "sys", "tmp"} {
		w.add(entry{name: dir, mode: 0o040755})
	}
	w.add(entry{name: "dev/console", mode: 0o020600, major: 5, minor: 1})
	w.addFile("bin/busybox", busybox, 0o100755)
	w.add(entry{name: "etc/passwd", mode: 0o100644, data: []byte("root::0:0:root:/root:/bin/sh\n")})
	w.add(entry{name: "modules/order", mode: 0o100644, data: []byte(strings.Join(order, "\n") + "\n")})
	for _, m := range order {
		w.addFile("modules/"+m+".ko", filepath.Join(modules, m+".ko"), 0o100644)
	}
	err = fs.WalkDir(rootfs, "rootfs", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := rootfs.ReadFile(path)
		w.add(entry{name: strings.TrimPrefix(path, "rootfs/"), mode: 0o100755, data: data})
		return err
	})
	w.add(entry{name: "TRAILER!!!"})
	if w.err == nil {
		w.err = w.w.Flush()
	}
	return out.Bytes(), errors.Join(err, w.err)
}

// loadOrder lists all modules of a modules.dep (see collect), each after those that it needs.
func loadOrder(path string) ([]string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var order []string
	seen := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		for _, m := range append(words[1:], words[0]) {
			if !seen[m] {
				seen[m] = true
				order = append(order, m)
			}
		}
	}
	return order, nil
}

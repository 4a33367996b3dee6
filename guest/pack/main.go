// Command pack makes the kernel and the initramfs of OCI guests from the files of a Linux kernel package.
//
//	pack kernel VMLINUZ TREE OUTDIR         OUTDIR/vmlinux, and of the modules below TREE OUTDIR/modules/
//	pack initramfs AGENT MODULES CHECK OUT  a cpio archive with the agent as /init, and CHECK, e2fsck compressed with gzip
//	pack modules TREE OUTDIR                of the modules below TREE those of the disk
//	pack disk VMLINUZ MODULES BUSYBOX GRUB OUT  the disk of a small system, with the boot.img, core.img and bootx64.efi of GRUB
//
// It neither downloads nor compiles: guest/build.sh does.
package main

import (
	"errors"
	"fmt"
	"os"
)

// wanted are the modules that a guest may need; their dependencies are added. The kernel may have them built in. It may lack those in
// optional and rare. Few guests load those in rare, so they are compressed, with the modules that only they need.
var (
	wanted = []string{
		"virtio_pci", "virtio_blk", "virtio_console", "virtio_net", "overlay", "virtio_rng", "virtio_balloon",
	}
	optional = []string{"erofs", "squashfs", "button", "evdev", "virtio_scsi", "sd_mod", "loop", "virtiofs", "vmw_vsock_virtio_transport"}
	rare     = []string{"nfsv4", "xfs", "virtio_mem", "bridge", "veth"}
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "pack:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 4 && args[0] == "kernel":
		return packKernel(args[1], args[2], args[3])
	case len(args) == 3 && args[0] == "modules":
		return collect(args[1], args[2], diskModules, diskOptional, nil)
	case len(args) == 5 && args[0] == "initramfs":
		return packInitramfs(args[1], args[2], args[3], args[4])
	case len(args) == 6 && args[0] == "disk":
		return packDisk(args[1], args[2], args[3], args[4], args[5])
	}
	return errors.New("usage: pack kernel VMLINUZ TREE OUTDIR | pack initramfs AGENT MODULES CHECK OUT | pack modules TREE OUTDIR | pack disk VMLINUZ MODULES BUSYBOX GRUB OUT")
}

func packKernel(vmlinuz, modules, out string) error {
	image, err := os.ReadFile(vmlinuz)
	if err != nil {
		return err
	}
	elf, err := extract(image)
	if err != nil {
		return fmt.Errorf("extract the kernel from %s: %w", vmlinuz, err)
	}
	if err := os.WriteFile(out+"/vmlinux", elf, 0o644); err != nil {
		return err
	}
	return collect(modules, out+"/modules", wanted, optional, rare)
}

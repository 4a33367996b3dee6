// Package disk recognises disk images by content, checks that an image is complete and refers to nothing outside itself,
// and converts formats that our hypervisors cannot open to qcow2.
//
// It parses untrusted headers, so it allocates and reads only within checked limits, and does so before any other program
// sees an image. It does not convert by itself: qemu-img does, in a sandbox.
package disk

import (
	"bytes"
	"encoding/binary"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/qcow2"
	"cocoonstack.io/cocoon/internal/vm"
)

// HeadSize is how much of the start of an image Recognise needs.
const HeadSize = 128 << 10

// Formats that Recognise detects and that are converted before a VM boots from them. The names are QEMU's.
const (
	FormatVMDK vm.DiskFormat = "vmdk"
	FormatVHDX vm.DiskFormat = "vhdx"
	FormatVHD  vm.DiskFormat = "vpc"
)

// Recognise detects the format of a disk image from its first bytes.
// Errors: InvalidArgument when no VM could boot from it; the message says what it looks like and what helps.
func Recognise(head []byte) (vm.DiskFormat, error) {
	if bytes.HasPrefix(head, []byte(qcow2.Magic)) {
		return vm.DiskQCOW2, nil
	}
	for magic, format := range map[string]vm.DiskFormat{vmdkMagic: FormatVMDK, vhdxMagic: FormatVHDX, vhdMagic: FormatVHD} {
		if bytes.HasPrefix(head, []byte(magic)) {
			return format, nil
		}
	}
	for _, f := range foreign {
		if at(head, f.off, f.magic) {
			return "", errdefs.Invalidf("this is %s, which cannot be imported as it is: %s", f.what, f.help)
		}
	}
	for _, s := range bootable {
		if at(head, s.off, s.magic) {
			return vm.DiskRaw, nil
		}
	}
	return "", errdefs.Invalidf("unknown image format: neither an OCI or docker archive, nor a qcow2, VMDK or VHDX disk, nor a raw disk with a partition table or file system")
}

type signature struct {
	off   int
	magic string
}

// bootable lists the signatures of raw disks that hold something that can boot or be mounted.
var bootable = []signature{
	{510, "\x55\xaa"},          // MBR
	{512, "EFI PART"},          // GPT
	{extMagicAt, "\x53\xef"},   // ext2, 3, 4
	{0, "hsqs"},                // squashfs
	{1024, "\xe2\xe1\xf5\xe0"}, // erofs
	{0, "XFSB"},
	{0x10040, "_BHRfS_M"}, // btrfs
	{0x8001, "CD001"},     // ISO 9660
}

const convert = "convert it with `qemu-img convert -O qcow2`"

var foreign = []struct {
	signature
	what, help string
}{
	{signature{0, "# Disk DescriptorFile"}, "a VMware disk descriptor", convert},
	{signature{0, "QED\x00"}, "a QED disk", convert},
	{signature{0x40, "\x7f\x10\xda\xbe"}, "a VirtualBox disk", convert},
	{signature{0, "\xfd7zXZ\x00"}, "an xz file", "unpack it first"},
	{signature{0, "BZh"}, "a bzip2 file", "unpack it first"},
	{signature{0, "PK\x03\x04"}, "a zip file", "unpack it first"},
	{signature{0, "\x7fELF"}, "a program", "an image is a disk or a container archive"},
	{signature{0, "<!DOCTYPE"}, "a web page", "the download probably failed"},
	{signature{0, "<html"}, "a web page", "the download probably failed"},
}

func at(head []byte, off int, magic string) bool {
	return len(head) >= off+len(magic) && string(head[off:off+len(magic)]) == magic
}

const (
	extSuper   = 1024
	extMagicAt = extSuper + 56
)

// CheckRaw checks that a raw disk of size bytes is complete, as far as its own tables tell.
// Errors: DataLoss when they describe more than size bytes.
func CheckRaw(head []byte, size int64) error {
	truncated := func(what string, want uint64) error {
		return errdefs.DataLossf("the disk is truncated: its %s reaches to byte %d, but it has only %d; fetch it again", what, want, size)
	}
	switch {
	case at(head, 512, "EFI PART") && len(head) >= 1024:
		backup := binary.LittleEndian.Uint64(head[512+32:])
		if end := (backup + 1) * qcow2.SectorSize; backup < 1<<50 && end > uint64(size) {
			return truncated("partition table", end)
		}
	case at(head, extMagicAt, "\x53\xef"):
		sb := head[extSuper:]
		blocks := uint64(binary.LittleEndian.Uint32(sb[4:]))
		if len(sb) >= 0x154 && binary.LittleEndian.Uint32(sb[0x60:])&0x80 != 0 { // 64bit
			blocks |= uint64(binary.LittleEndian.Uint32(sb[0x150:])) << 32
		}
		shift := 10 + binary.LittleEndian.Uint32(sb[24:])
		if end := blocks << min(shift, 16); blocks < 1<<44 && end > uint64(size) {
			return truncated("file system", end)
		}
	case at(head, 510, "\x55\xaa"):
		if end := mbrStart(head); end > uint64(size) {
			return truncated("partition table", end)
		}
	}
	return nil
}

// mbrStart returns the byte at which the last partition of an MBR starts, or 0 when the sector has no valid table: boot
// sectors of file systems have the same signature. Ends are ignored: hybrid ISOs round them up.
func mbrStart(head []byte) (last uint64) {
	for e := head[446:510]; len(e) >= 16; e = e[16:] {
		if e[0] != 0 && e[0] != 0x80 {
			return 0
		}
		if e[4] == 0xee { // protective: its length may have any value
			return 0
		}
		if e[4] != 0 {
			last = max(last, uint64(binary.LittleEndian.Uint32(e[8:]))*qcow2.SectorSize)
		}
	}
	return last
}

// Package signature tells from the first and the last bytes of a disk what the disk holds.
//
// It reads nothing itself and does not look into file systems: it only recognises them.
package signature

import (
	"bytes"
	"encoding/binary"

	"cocoonstack.io/cocoon/internal/ext4"
)

// Kind is what a disk holds, in words for error messages.
type Kind string

// Kinds that callers treat in different ways. Other values of Kind only have words.
const (
	Blank      Kind = "nothing"
	Unfinished Kind = "a file system that was not finished" // ext4.Format was interrupted
	Ext4       Kind = "ext4"
	XFS        Kind = "xfs"
	EROFS      Kind = "erofs"
	SquashFS   Kind = "squashfs"
	Unknown    Kind = "data of an unknown kind"
)

// Window is how many bytes at the start and at the end of a disk Identify needs, unless the disk is smaller.
const Window = 1 << 20

// mark is a sequence of bytes at a fixed place.
type mark struct {
	kind Kind
	at   int
	text string
}

// marks are sorted: Identify returns the first one that fits. Marks of a whole disk come before those of its parts.
var marks = []mark{
	{"LUKS encryption", 0, "LUKS\xba\xbe"},
	{"LUKS encryption", 0x4000, "SKUL\xba\xbe"},
	{XFS, 0, "XFSB"},
	{SquashFS, 0, "hsqs"},
	{EROFS, 1024, "\xe2\xe1\xf5\xe0"},
	{Ext4, 1024 + 56, "\x53\xef"}, // also ext2 and ext3, which the kernel mounts as ext4
	{"f2fs", 1024, "\x10\x20\xf5\xf2"},
	{"btrfs", 0x10040, "_BHRfS_M"},
	{"swap space", 4096 - 10, "SWAPSPACE2"},
	{"swap space", 4096 - 10, "SWAP-SPACE"},
	{"swap space", 64<<10 - 10, "SWAPSPACE2"},
	{"an LVM volume", 0, "LABELONE"},
	{"an LVM volume", 512, "LABELONE"},
	{"an LVM volume", 1024, "LABELONE"},
	{"an LVM volume", 1536, "LABELONE"},
	{"a part of a RAID", 0, "\xfc\x4e\x2b\xa9"},
	{"a part of a RAID", 4096, "\xfc\x4e\x2b\xa9"},
	{"an ISO 9660 file system", 0x8001, "CD001"},
	{"a qcow2 image", 0, "QFI\xfb"},
	{"NTFS", 3, "NTFS    "},
	{"exFAT", 3, "EXFAT   "},
	{"FAT", 54, "FAT1"},
	{"FAT", 82, "FAT32"},
	{"a GPT partition table", 512, "EFI PART"},
	{"a GPT partition table", 4096, "EFI PART"},
	{"an MBR partition table or a boot sector", 510, "\x55\xaa"},
}

// tailMarks are at a distance from the end of the disk.
var tailMarks = []mark{
	{"a GPT partition table", 512, "EFI PART"},
	{"a GPT partition table", 4096, "EFI PART"},
	{"a part of a RAID", 8 << 10, "\xfc\x4e\x2b\xa9"},
	{"a part of a RAID", 64 << 10, "\xfc\x4e\x2b\xa9"},
}

// Identify tells what a disk holds whose first and last Window bytes are head and tail. A disk is Blank only if all of these are
// zero.
func Identify(head, tail []byte) Kind {
	if ext4.Unfinished(head) {
		return Unfinished
	}
	for _, m := range marks {
		if len(head) >= m.at+len(m.text) && string(head[m.at:m.at+len(m.text)]) == m.text {
			return m.kind
		}
	}
	for _, m := range tailMarks {
		if at := len(tail) - m.at; at >= 0 && bytes.HasPrefix(tail[at:], []byte(m.text)) {
			return m.kind
		}
	}
	if zero(head) && zero(tail) {
		return Blank
	}
	return Unknown
}

func zero(b []byte) bool {
	for len(b) >= 8 {
		if binary.NativeEndian.Uint64(b) != 0 {
			return false
		}
		b = b[8:]
	}
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

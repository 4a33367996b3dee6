// Package disk is the disk of Cocoon OS: its partition table, the group of volumes on its last partition, and how both grow with the disk.
//
// It overwrites nothing that it does not know. It mounts nothing, and it runs LVM by whoever may run programs.
package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/appliance/bootctl"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// Partitions of a disk of Cocoon OS. The slots are the second and the third.
const (
	BootPartition = 1
	DataPartition = 4

	typeEFI   = 0xef
	typeLinux = 0x83
	typeLVM   = 0x8e

	tables = 0x1be // offset of the four entries of a master boot record
	diskID = 0x1b8
)

// Signature is that of the disks of installed machines. It is in the command lines of their kernels.
const Signature = 0xb1a570ff

// Root is the disk that the system was started from, by the signature in its partition table.
type Root struct {
	Signature uint32
	Number    int // of the partition with the root
}

// SlotDevice returns the device of a slot of the disk from which the machine was started as cmdline, the kernel's command line, says.
// Errors: NotFound, FailedPrecondition.
func SlotDevice(cmdline string, slot bootctl.Slot) (string, error) {
	r, err := ParseRoot(cmdline)
	if err != nil {
		return "", err
	}
	number, ok := map[bootctl.Slot]int{bootctl.A: 2, bootctl.B: 3}[slot]
	if !ok {
		return "", errdefs.NotFoundf("there is no slot %q", slot)
	}
	return r.Partition("/sys/block", "/dev", number)
}

// ParseRoot reads root=PARTUUID=SIGNATURE-NUMBER in a kernel's command line.
func ParseRoot(cmdline string) (Root, error) {
	for word := range strings.FieldsSeq(cmdline) {
		id, ok := strings.CutPrefix(word, "root=PARTUUID=")
		if !ok {
			continue
		}
		signature, number, _ := strings.Cut(id, "-")
		s, err := strconv.ParseUint(signature, 16, 32)
		n, err2 := strconv.ParseUint(number, 16, 8)
		if err != nil || err2 != nil || len(signature) != 8 {
			return Root{}, errdefs.Invalidf("the command line has the root %q, which is no partition of a disk of Cocoon OS", id)
		}
		return Root{uint32(s), int(n)}, nil
	}
	return Root{}, errdefs.NotFoundf("the command line names no root partition")
}

// Entry is a partition of a master boot record, in sectors of 512 bytes.
type Entry struct {
	Kind        byte
	Start, Size uint32
}

// ReadTable reads the master boot record of a disk.
func ReadTable(disk io.ReaderAt) (signature uint32, entries [4]Entry, err error) {
	var b [512]byte
	if _, err := disk.ReadAt(b[:], 0); err != nil {
		return 0, entries, fmt.Errorf("read the partition table: %w", err)
	}
	if b[510] != 0x55 || b[511] != 0xaa {
		return 0, entries, errdefs.NotFoundf("the disk has no partition table")
	}
	for i := range entries {
		e := b[tables+16*i:]
		entries[i] = Entry{e[4], binary.LittleEndian.Uint32(e[8:]), binary.LittleEndian.Uint32(e[12:])}
	}
	return binary.LittleEndian.Uint32(b[diskID:]), entries, nil
}

// Partition returns the device of a partition of the disk. sysBlock is the folder of the kernel's disks, and dev that of their devices. Two disks with
// the signature are an error: one may be a copy, and nobody knows which.
func (r Root) Partition(sysBlock, dev string, number int) (string, error) {
	disk, entries, err := r.Find(sysBlock, dev)
	if err != nil {
		return "", err
	}
	if number == DataPartition && entries[number-1].Kind != typeLVM {
		return "", errdefs.Preconditionf("partition %d of %s has type %#x, and not %#x of LVM", number, disk, entries[number-1].Kind, typeLVM)
	}
	return PartitionOf(sysBlock, dev, disk, number)
}

// PartitionOf returns the device of a partition that the kernel has found on a disk. Errors: NotFound.
func PartitionOf(sysBlock, dev, disk string, number int) (string, error) {
	files, err := filepath.Glob(filepath.Join(sysBlock, disk, disk+"*", "partition"))
	if err != nil {
		return "", err
	}
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(text)) == strconv.Itoa(number) {
			return filepath.Join(dev, filepath.Base(filepath.Dir(file))), nil
		}
	}
	return "", errdefs.NotFoundf("disk %s has no partition %d", disk, number)
}

// Find returns the name of the disk with the signature, and its partitions.
func (r Root) Find(sysBlock, dev string) (name string, entries [4]Entry, err error) {
	if r.Signature == 0 {
		return "", entries, errdefs.NotFoundf("nobody knows which disk the system is on")
	}
	disks, err := os.ReadDir(sysBlock)
	if err != nil {
		return "", entries, err
	}
	for _, d := range disks {
		if Virtual(d.Name()) {
			continue
		}
		signature, table, err := tableOf(filepath.Join(dev, d.Name()))
		if err != nil || signature != r.Signature {
			continue
		}
		if name != "" {
			return "", entries, errdefs.Preconditionf("the disks %s and %s both have the signature %08x; remove one", name, d.Name(), signature)
		}
		name, entries = d.Name(), table
	}
	if name == "" {
		return "", entries, errdefs.NotFoundf("no disk has the signature %08x", r.Signature)
	}
	return name, entries, nil
}

// Virtual reports whether a block device of that name is one that the kernel makes of others or of memory.
func Virtual(name string) bool {
	for _, prefix := range []string{"loop", "ram", "dm-", "zram", "md", "nbd", "sr", "fd"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

func tableOf(device string) (uint32, [4]Entry, error) {
	f, err := os.Open(device)
	if err != nil {
		return 0, [4]Entry{}, err
	}
	defer f.Close()
	return ReadTable(f)
}

// blankBytes is how much of a partition must be zero for it to be one that nobody uses. It holds the labels of all file systems and of LVM.
const blankBytes = 1 << 20

// blank reports whether a device begins with zeros.
func blank(device string) (bool, error) {
	f, err := os.Open(device)
	if err != nil {
		return false, err
	}
	defer f.Close()
	b := make([]byte, blankBytes)
	if _, err := io.ReadFull(f, b); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return false, fmt.Errorf("read %s: %w", device, err)
	}
	for _, c := range b {
		if c != 0 {
			return false, nil
		}
	}
	return true, nil
}

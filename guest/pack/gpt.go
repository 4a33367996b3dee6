package main

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"unicode/utf16"
)

// The partition table of UEFI (GPT) at both ends of a disk: a header of one sector, and the entries, as many as each reader expects.
const (
	gptEntries   = 128
	gptEntrySize = 128
	gptTable     = gptEntries * gptEntrySize / sector // sectors
	gptFirst     = 2 + gptTable                       // the first sector that a partition may have
	gptHeader    = 92                                 // bytes
)

// The types of partitions as they are on a disk, where the first three numbers of an identifier are little-endian.
const (
	partGRUB  = "Hah!IdontNeedEFI"                                                 // 21686148-6449-6e6f-744e-656564454649: GRUB's core image, without a file system
	partLinux = "\xaf\x3d\xc6\x0f\x83\x84\x72\x47\x8e\x79\x3d\x69\xd8\x47\x7d\xe4" // 0fc63daf-8483-4772-8e79-3d69d8477de4
	partEFI   = "\x28\x73\x2a\xc1\x1f\xf8\xd2\x11\xba\x4b\x00\xa0\xc9\x3e\xc9\x3b" // c12a7328-f81f-11d2-ba4b-00a0c93ec93b
)

// partition is one of a GPT.
type partition struct {
	kind, name string
	from, to   int // sectors; to is the first behind it
}

// writeGPT writes the tables to both ends of a disk. It also writes the protective table of the first sector, for programs that know no GPT.
// All identifiers are made from the number of what they name, so that the same parts give the same disk.
func writeGPT(disk []byte, partitions []partition) error {
	end := len(disk)/sector - 1 - gptTable
	entries := make([]byte, gptTable*sector)
	at := gptFirst
	for n, p := range partitions {
		if p.from < at || p.to <= p.from || p.to > end {
			return fmt.Errorf("the partition %s from sector %d to %d is none between %d and %d", p.name, p.from, p.to, at, end)
		}
		at = p.to
		e := entries[n*gptEntrySize:]
		copy(e, p.kind)
		copy(e[16:], numbered(n+1))
		binary.LittleEndian.PutUint64(e[32:], uint64(p.from))
		binary.LittleEndian.PutUint64(e[40:], uint64(p.to-1))
		for i, c := range utf16.Encode([]rune(p.name)) {
			binary.LittleEndian.PutUint16(e[56+2*i:], c)
		}
	}
	header := func(at, other, table int) []byte {
		h := make([]byte, gptHeader)
		copy(h, "EFI PART\x00\x00\x01\x00")
		binary.LittleEndian.PutUint32(h[12:], gptHeader)
		for i, v := range []int{at, other, gptFirst, end - 1} {
			binary.LittleEndian.PutUint64(h[24+8*i:], uint64(v)) //nolint:gosec // sectors of the disk
		}
		copy(h[56:], numbered(0))
		binary.LittleEndian.PutUint64(h[72:], uint64(table)) //nolint:gosec // a sector of the disk
		binary.LittleEndian.PutUint32(h[80:], gptEntries)
		binary.LittleEndian.PutUint32(h[84:], gptEntrySize)
		binary.LittleEndian.PutUint32(h[88:], crc32.ChecksumIEEE(entries))
		binary.LittleEndian.PutUint32(h[16:], crc32.ChecksumIEEE(h))
		return h
	}
	last := len(disk)/sector - 1
	copy(disk[sector:], header(1, last, 2))
	copy(disk[2*sector:], entries)
	copy(disk[end*sector:], entries)
	copy(disk[last*sector:], header(last, 1, end))

	table := disk[partTable : partTable+64]
	clear(table)
	copy(table, []byte{0, 0, 2, 0, 0xee, 0xff, 0xff, 0xff})
	binary.LittleEndian.PutUint32(table[8:], 1)
	binary.LittleEndian.PutUint32(table[12:], uint32(last)) //nolint:gosec // a small disk
	disk[510], disk[511] = 0x55, 0xaa
	return nil
}

// numbered is an identifier of ours: "Cocoon", a version and variant of random ones, and a number.
func numbered(n int) []byte {
	b := [16]byte{'C', 'o', 'c', 'o', 'o', 'n', 0, 0x40, 0x80}
	binary.BigEndian.PutUint32(b[12:], uint32(n)) //nolint:gosec // the number of a partition
	return b[:]
}

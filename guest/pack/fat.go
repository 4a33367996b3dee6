package main

import (
	"encoding/binary"
	"fmt"
)

// The layout of the file system that UEFI starts from: FAT12 with clusters of one sector.
const (
	fatReserved = 1                                    // sectors, the first of which describes the file system
	fatSectors  = 12                                   // of each of its two tables, for maxClusters
	fatRoot     = 4                                    // sectors of the root folder
	fatData     = fatReserved + 2*fatSectors + fatRoot // sector of the first cluster, which has the number firstCluster
	maxClusters = fatSectors*sector*2/3 - firstCluster // of 12 bits each
	dirEntry    = 32                                   // bytes
	isFolder    = 0x10
	lastCluster = 0xfff

	firstCluster = 2
)

// bootLoader returns a file system of size bytes with one file, \EFI\BOOT\BOOTX64.EFI, which UEFI starts from a disk that it does not know.
func bootLoader(loader []byte, size int) ([]byte, error) {
	clusters := (len(loader) + sector - 1) / sector
	total := size / sector
	if has := min(total-fatData, maxClusters); clusters == 0 || clusters+2 > has {
		return nil, fmt.Errorf("a boot loader of %d bytes does not fit on a file system of %d", len(loader), size)
	}
	fs := make([]byte, size)
	copy(fs, []byte{0xeb, 0x3c, 0x90}) // a jump, by which firmware knows it
	copy(fs[3:], "COCOON  ")
	binary.LittleEndian.PutUint16(fs[11:], sector)
	fs[13], fs[14], fs[16] = 1, fatReserved, 2                               // sectors of a cluster, reserved sectors, tables
	binary.LittleEndian.PutUint16(fs[17:], fatRoot*sector/dirEntry)          // entries of the root folder
	binary.LittleEndian.PutUint16(fs[19:], uint16(total))                    //nolint:gosec // 12 bits of clusters and some sectors
	fs[21], fs[22], fs[24], fs[26], fs[38] = 0xf8, fatSectors, 63, 255, 0x29 // a hard disk, sectors of a table, geometry, the fields below are there
	copy(fs[43:], "COCOON     FAT12   ")
	fs[510], fs[511] = 0x55, 0xaa

	table := make([]byte, fatSectors*sector)
	next := func(cluster, to int) {
		at := cluster * 3 / 2
		v := binary.LittleEndian.Uint16(table[at:])
		if cluster%2 == 0 {
			v = v&0xf000 | uint16(to) //nolint:gosec // 12 bits
		} else {
			v = v&0x000f | uint16(to)<<4 //nolint:gosec // 12 bits
		}
		binary.LittleEndian.PutUint16(table[at:], v)
	}
	next(0, 0xff8)
	next(1, lastCluster)
	const efi, boot, file = firstCluster, firstCluster + 1, firstCluster + 2
	next(efi, lastCluster)
	next(boot, lastCluster)
	for i := range clusters {
		next(file+i, file+i+1)
	}
	next(file+clusters-1, lastCluster)
	copy(fs[fatReserved*sector:], table)
	copy(fs[(fatReserved+fatSectors)*sector:], table)

	cluster := func(n int) []byte { return fs[(fatData+n-firstCluster)*sector:] }
	copy(fs[(fatReserved+2*fatSectors)*sector:], fatEntry("EFI        ", isFolder, efi, 0))
	for folder, up := range map[int]int{efi: 0, boot: efi} {
		copy(cluster(folder), fatEntry(".          ", isFolder, folder, 0))
		copy(cluster(folder)[dirEntry:], fatEntry("..         ", isFolder, up, 0))
	}
	copy(cluster(efi)[2*dirEntry:], fatEntry("BOOT       ", isFolder, boot, 0))
	copy(cluster(boot)[2*dirEntry:], fatEntry("BOOTX64 EFI", 0, file, len(loader)))
	copy(cluster(file), loader)
	return fs, nil
}

// fatEntry is what a folder says of a file or folder.
func fatEntry(name string, attributes byte, cluster, size int) []byte {
	e := make([]byte, dirEntry)
	copy(e, name)
	e[11] = attributes
	binary.LittleEndian.PutUint16(e[24:], 1|1<<5)          // the first day of 1980
	binary.LittleEndian.PutUint16(e[26:], uint16(cluster)) //nolint:gosec // 12 bits
	binary.LittleEndian.PutUint32(e[28:], uint32(size))    //nolint:gosec // as many clusters
	return e
}

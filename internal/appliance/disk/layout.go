package disk

import (
	"encoding/binary"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// SectorSize is the number of bytes of a sector in a partition table.
const SectorSize = 512

const (
	sectorsPerMiB = mebibyte / SectorSize
	bootStart     = 2048 // sectors
	bootMiB       = 256
	maxSectors    = 1<<32 - 1 // of a disk that a master boot record can describe: 2 TiB
)

// MinimumSize is how large a disk must be for an installation, in bytes.
const MinimumSize = 16 * gibibyte

// Layout are the partitions of a disk.
type Layout [4]Entry

// Plan returns the partitions of an installation on a disk of that many bytes with slots of slotMiB: boot files, two slots, and data in the rest, of which the
// first 2 TiB count. Errors: InvalidArgument if the disk is too small.
func Plan(size, slotMiB int64) (Layout, error) {
	if slotMiB <= 0 || slotMiB > 1<<16 {
		return Layout{}, errdefs.Invalidf("a slot of %d MiB is none", slotMiB)
	}
	boot, slot := uint32(bootMiB*sectorsPerMiB), uint32(slotMiB*sectorsPerMiB)
	l := Layout{{typeEFI, bootStart, boot}, {typeLinux, bootStart + boot, slot}, {typeLinux, bootStart + boot + slot, slot}}
	data := bootStart + int64(boot) + 2*int64(slot)
	if size < MinimumSize || endOf(size)-data < 2*gibibyte/SectorSize {
		return Layout{}, errdefs.Invalidf("the disk has %d MiB; an installation with slots of %d MiB needs at least %d", size/mebibyte, slotMiB,
			max(MinimumSize, (data+2*gibibyte/SectorSize)*SectorSize)/mebibyte)
	}
	l[DataPartition-1] = Entry{typeLVM, uint32(data), uint32(endOf(size) - data)}
	return l, nil
}

// endOf returns where the last partition of a disk of that many bytes ends, in sectors: at a whole MiB, and where a table can say it.
func endOf(size int64) int64 {
	return min(size/SectorSize, maxSectors) / sectorsPerMiB * sectorsPerMiB
}

// Record returns the first sector of a disk with these partitions. It is all that makes a machine look for an operating system there.
func (l Layout) Record(signature uint32) [SectorSize]byte {
	var b [SectorSize]byte
	binary.LittleEndian.PutUint32(b[diskID:], signature)
	for i, e := range l {
		p := b[tables+16*i:]
		if i == BootPartition-1 {
			p[0] = 0x80
		}
		// Cylinders, heads and sectors: those numbers that mean "see the others".
		copy(p[1:], []byte{0xfe, 0xff, 0xff, e.Kind, 0xfe, 0xff, 0xff})
		binary.LittleEndian.PutUint32(p[8:], e.Start)
		binary.LittleEndian.PutUint32(p[12:], e.Size)
	}
	b[510], b[511] = 0x55, 0xaa
	return b
}

// grown returns the data partition of a disk that has that many bytes now. It is the same one if the disk has less than 64 MiB more.
// Errors: FailedPrecondition if the partition is not the last one, not of LVM, or behind the end of the disk.
func grown(entries [4]Entry, size int64) (Entry, error) {
	data := entries[DataPartition-1]
	start, end := int64(data.Start), int64(data.Start)+int64(data.Size)
	if data.Kind != typeLVM || data.Size == 0 {
		return data, errdefs.Preconditionf("partition %d has type %#x, and not %#x of LVM", DataPartition, data.Kind, typeLVM)
	}
	for i, e := range entries[:DataPartition-1] {
		if e.Size != 0 && int64(e.Start)+int64(e.Size) > start {
			return data, errdefs.Preconditionf("partition %d is behind partition %d, which therefore cannot grow", i+1, DataPartition)
		}
	}
	if end*SectorSize > size {
		return data, errdefs.Preconditionf("the disk has %d bytes, and its last partition ends after %d; it is not the disk that was installed", size, end*SectorSize)
	}
	const worth = 64 * sectorsPerMiB
	if more := endOf(size) - end; more >= worth {
		data.Size += uint32(more)
	}
	return data, nil
}

// growth returns the sizes that the volume of /perm and the pool shall have, in bytes. None is smaller than it is.
func growth(v volumes) (perm, thin int64, err error) {
	wish, err := PermSize(v.size, v.extent)
	if err != nil {
		return 0, 0, err
	}
	had, free := v.sizes[permVolume], v.free
	perm = max(had, min(wish, had+free))
	free -= perm - had
	thin = v.sizes[pool]
	part := func(n int64) int64 { return n / 100 * poolPercent / v.extent * v.extent }
	if wish := part(v.size - perm); wish > thin {
		thin += min(wish-thin, part(free)) // the pool's own records grow, too
	}
	return perm, thin, nil
}

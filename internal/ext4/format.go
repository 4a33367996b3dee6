package ext4

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"math/bits"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Disk is a block device, or a file, that Format writes to.
type Disk interface {
	io.WriterAt
	Sync() error
}

// Empty describes an empty file system.
type Empty struct {
	Size int64    // of the disk, in bytes
	ID   [16]byte // random: it also protects the journal from what the disk held before
	Mode uint16   // permissions of the root folder
	GID  uint32   // group of the root folder
	Now  time.Time
}

// Sizes of a disk that Format accepts, in bytes.
const (
	MinFormat = 16 << 20
	MaxFormat = 1<<44 - BlockSize
)

// unfinished stands at the start of the disk, where ext4 has nothing, while Format writes.
const unfinished = "cocoon makes an ext4 file system here\n"

// Unfinished reports whether head, the first bytes of a disk, shows that Format was interrupted.
func Unfinished(head []byte) bool {
	return len(head) >= len(unfinished) && string(head[:len(unfinished)]) == unfinished
}

// These are the features of the writable disks of VMs (package local), so the kernel grows both in the same way.
const (
	formatCompat   = 0x4 | 0x8 | 0x20                      // has_journal, ext_attr, dir_index
	formatIncompat = 0x2 | 0x40 | 0x80 | 0x200             // filetype, extent, 64bit, flex_bg
	formatRO       = 0x1 | 0x2 | 0x8 | 0x20 | 0x40 | 0x400 // sparse_super, large_file, huge_file, dir_nlink, extra_isize, metadata_csum

	formatDescriptor = 64    // bytes
	flexGroups       = 16    // groups whose tables are together
	bytesPerInode    = 16384 // as mke2fs
	journalInode     = 8

	flagInodeUninit = 1
	flagBlockUninit = 2
)

// Format makes an empty, writable file system with a journal on d. It writes little: a few blocks for every 2 GiB, and never zeros.
// The kernel initialises the rest when it is used. The root folder is empty; it has no lost+found, which only checkers make.
//
// A power failure at any point leaves a disk that Unfinished recognises, or a finished file system.
// Errors: InvalidArgument for a disk that is too small or too large, and those of d.
func Format(d Disk, e Empty) error {
	p, err := plan(e)
	if err != nil {
		return err
	}
	head := make([]byte, BlockSize)
	copy(head, unfinished)
	if err := p.put(d, head, 0); err != nil {
		return err
	}
	if err := d.Sync(); err != nil { // the mark must be there before anything else
		return fmt.Errorf("write an ext4 file system: %w", err)
	}
	if err := p.write(d); err != nil {
		return err
	}
	if err := d.Sync(); err != nil {
		return fmt.Errorf("write an ext4 file system: %w", err)
	}
	copy(head[superOffset:], p.super(0))
	if err := p.put(d, head, 0); err != nil {
		return err
	}
	if err := d.Sync(); err != nil {
		return fmt.Errorf("write an ext4 file system: %w", err)
	}
	clear(head[:len(unfinished)])
	if err := p.put(d, head, 0); err != nil {
		return err
	}
	if err := d.Sync(); err != nil {
		return fmt.Errorf("write an ext4 file system: %w", err)
	}
	return nil
}

// The kernel keeps a part of the blocks back when it mounts a file system: 1/keptPart, but at most maxKept.
const (
	keptPart = 50
	maxKept  = 4096
)

// SizeFor returns the size in bytes, a multiple of BlockSize, of a disk on which Format leaves at least room bytes free for files.
// Errors: InvalidArgument if no disk is large enough.
func SizeFor(room int64) (int64, error) {
	size := int64(MinFormat)
	for {
		if room < 0 || room > MaxFormat || size > MaxFormat {
			return 0, errdefs.Invalidf("no ext4 file system has %d bytes for files; at most %d are possible", room, int64(MaxFormat))
		}
		p, err := plan(Empty{Size: size})
		if err != nil {
			return 0, err
		}
		free := int64(p.free-min(p.blocks/keptPart, maxKept)) * BlockSize
		if free >= room {
			return size, nil
		}
		size += max(room-free, BlockSize) / BlockSize * BlockSize
	}
}

// formatting is the layout of an empty file system.
type formatting struct {
	Empty
	geometry
	seed    uint32 // of checksums
	gdt     uint32 // blocks of group descriptors
	tables  uint32 // blocks of one group's inode table
	journal uint32 // first block; the root folder follows it
	length  uint32 // blocks of the journal
	root    uint32 // block
	free    uint32 // blocks
	inode   [journalInode + 1]*Inode
}

func plan(e Empty) (*formatting, error) {
	if e.Size < MinFormat || e.Size > MaxFormat {
		return nil, errdefs.Invalidf("a disk of %d bytes cannot have an ext4 file system; it must have at least %d and at most %d bytes", e.Size, int64(MinFormat), int64(MaxFormat))
	}
	p := &formatting{Empty: e, seed: checksum(1<<32-1, e.ID[:])}
	p.blocks = uint32(e.Size / BlockSize)
	p.perGroup = min(blocksPerGroup, p.blocks) / (bytesPerInode / BlockSize) / inodesPerBlock * inodesPerBlock
	p.tables = p.perGroup / inodesPerBlock
	for { // a last group that is too small for its own tables is left out, as the kernel does when it grows a file system
		p.groups = (p.blocks-1)/blocksPerGroup + 1
		p.gdt = (p.groups*formatDescriptor-1)/BlockSize + 1
		last := p.groups - 1
		if p.blocks-last*blocksPerGroup > p.base(last)+2+p.tables+1 {
			break
		}
		p.blocks = last * blocksPerGroup
	}
	p.bitmaps = 1 + p.gdt
	p.table = p.bitmaps + 2*min(flexGroups, p.groups)
	p.journal, p.length = p.table+p.tables*min(flexGroups, p.groups), journalLength(p.blocks)
	p.root = p.journal + p.length
	p.inodes()
	for g := range p.groups {
		p.free += p.freeIn(g)
	}
	return p, nil
}

func journalLength(blocks uint32) uint32 {
	switch {
	case blocks < 256<<20/BlockSize:
		return 4 << 20 / BlockSize
	case blocks < 4<<30/BlockSize:
		return 16 << 20 / BlockSize
	}
	return 64 << 20 / BlockSize
}

// inodes makes those of the root folder and the journal.
func (p *formatting) inodes() {
	root := &Inode{Mode: TypeFolder | p.Mode&0o7777, GID: p.GID, ModTime: p.Now, number: rootInode, links: 2}
	journal := &Inode{Mode: TypeRegular | 0o600, ModTime: p.Now, number: journalInode, links: 1}
	for i, at := range map[*Inode][2]uint32{root: {p.root, 1}, journal: {p.journal, p.length}} {
		i.size, i.blocks, i.flags = int64(at[1])*BlockSize, at[1], flagExtents
		leaf(i.block[:], rootExtents, at[0], at[1])
		p.inode[i.number] = i
	}
}

// base is how many blocks a group has at its start for a copy of the superblock and the group descriptors.
func (p *formatting) base(group uint32) uint32 {
	power := func(of uint32) bool {
		n := of
		for n < group {
			n *= of
		}
		return n == group
	}
	if group <= 1 || power(3) || power(5) || power(7) {
		return 1 + p.gdt
	}
	return 0
}

// first is the first block of the tables for the groups whose tables are together with those of group.
func (p *formatting) first(group uint32) uint32 {
	lead := group - group%flexGroups
	return lead*blocksPerGroup + p.base(lead)
}

// together is how many groups have their tables together with those of group.
func (p *formatting) together(group uint32) uint32 {
	return min(flexGroups, p.groups-(group-group%flexGroups))
}

// used is how many blocks are in use at the start of a group.
func (p *formatting) used(group uint32) uint32 {
	n := p.base(group)
	if group%flexGroups == 0 {
		n += p.together(group) * (2 + p.tables)
	}
	if group == 0 {
		n = p.root + 1
	}
	return n
}

func (p *formatting) lengthOf(group uint32) uint32 {
	return min(blocksPerGroup, p.blocks-group*blocksPerGroup)
}

func (p *formatting) freeIn(group uint32) uint32 { return p.lengthOf(group) - p.used(group) }

// blockMap returns the bitmap of the blocks of a group; nil if the kernel can derive it.
func (p *formatting) blockMap(group uint32) []byte {
	if group%flexGroups != 0 && group != p.groups-1 {
		return nil
	}
	b := make([]byte, BlockSize)
	fill(b, 0, p.used(group))
	fill(b, p.lengthOf(group), blocksPerGroup)
	return b
}

// inodeMap returns the bitmap of the inodes of a group; nil if the kernel can derive it.
func (p *formatting) inodeMap(group uint32) []byte {
	if group != 0 {
		return nil
	}
	b := make([]byte, BlockSize)
	fill(b, 0, firstInode-1)
	fill(b, p.perGroup, maxPerGroup)
	return b
}

// fill sets the bits from to to-1.
func fill(b []byte, from, to uint32) {
	for ; from < to; from++ {
		b[from/8] |= 1 << (from % 8)
	}
}

// descriptors returns those of all groups.
func (p *formatting) descriptors() []byte {
	le := binary.LittleEndian
	all := make([]byte, p.gdt*BlockSize)
	for g := range p.groups {
		b := all[g*formatDescriptor : (g+1)*formatDescriptor]
		at, n, k := p.first(g), p.together(g), g%flexGroups
		le.PutUint32(b, at+k)
		le.PutUint32(b[4:], at+n+k)
		le.PutUint32(b[8:], at+2*n+k*p.tables)
		le.PutUint16(b[12:], uint16(p.freeIn(g)))
		unused, flags := p.perGroup, uint16(0)
		if m := p.blockMap(g); m != nil {
			sum := checksum(p.seed, m)
			le.PutUint16(b[24:], uint16(sum))
			le.PutUint16(b[56:], uint16(sum>>16))
		} else {
			flags |= flagBlockUninit
		}
		if m := p.inodeMap(g); m != nil {
			unused -= firstInode - 1
			le.PutUint16(b[16:], 1) // the root folder
			sum := checksum(p.seed, m[:p.perGroup/8])
			le.PutUint16(b[26:], uint16(sum))
			le.PutUint16(b[58:], uint16(sum>>16))
		} else {
			flags |= flagInodeUninit
		}
		le.PutUint16(b[14:], uint16(unused))
		le.PutUint16(b[28:], uint16(unused))
		le.PutUint16(b[18:], flags)
		le.PutUint16(b[30:], uint16(checksum(checksum(p.seed, le.AppendUint32(nil, g)), b)))
	}
	return all
}

// super returns the superblock, as it is kept in a group.
func (p *formatting) super(group uint32) []byte {
	le := binary.LittleEndian
	b := superblock(p.geometry, p.free, p.groups*p.perGroup-(firstInode-1), p.ID)
	now := uint32(p.Now.Unix())
	for off, v := range map[int]uint32{
		48: now, 64: now, 264: now, // written, checked, made
		92: formatCompat, 96: formatIncompat, 100: formatRO, 224: journalInode,
		256: 0xc, // extended attributes and ACLs
		352: 1,   // hashes of names are of signed characters
	} {
		le.PutUint32(b[off:], v)
	}
	le.PutUint16(b[54:], 1<<16-1) // never checked because of the number of mounts
	le.PutUint16(b[60:], 2)       // read-only after an error
	le.PutUint16(b[90:], uint16(group))
	le.PutUint16(b[254:], formatDescriptor)
	copy(b[236:252], p.ID[:])
	b[252], b[253] = 1, 1 // half MD4; the journal's inode is copied below
	journal := p.inode[journalInode]
	copy(b[268:], journal.block[:])
	le.PutUint32(b[268+64:], uint32(journal.size))
	b[372] = uint8(bits.Len(flexGroups) - 1)
	b[373] = 1 // CRC-32C
	le.PutUint32(b[1020:], checksum(1<<32-1, b[:1020]))
	return b
}

// write writes everything except the superblock.
func (p *formatting) write(d Disk) error {
	gdt := p.descriptors()
	for g := range p.groups {
		start := g * blocksPerGroup
		if p.base(g) > 0 {
			b := gdt
			if g > 0 {
				copied := make([]byte, BlockSize, BlockSize+len(gdt))
				copy(copied, p.super(g))
				b = append(copied, gdt...)
			} else {
				start++
			}
			if err := p.put(d, b, start); err != nil {
				return err
			}
		}
		if m := p.blockMap(g); m != nil {
			if err := p.put(d, m, p.first(g)+g%flexGroups); err != nil {
				return err
			}
		}
	}
	for _, part := range []struct {
		b  []byte
		at uint32
	}{
		{p.inodeMap(0), p.bitmaps + p.together(0)},
		{p.inodeTable(), p.table},
		{p.journalHead(), p.journal},
		{p.rootFolder(), p.root},
	} {
		if err := p.put(d, part.b, part.at); err != nil {
			return err
		}
	}
	return nil
}

func (p *formatting) put(d Disk, b []byte, block uint32) error {
	if _, err := d.WriteAt(b, int64(block)*BlockSize); err != nil {
		return fmt.Errorf("write an ext4 file system: %w", err)
	}
	return nil
}

// inodeTable returns the first block of the table. It holds all inodes in use.
func (p *formatting) inodeTable() []byte {
	le := binary.LittleEndian
	b := make([]byte, BlockSize)
	for n, i := range p.inode {
		if i == nil {
			continue
		}
		at := b[(n-1)*inodeSize : n*inodeSize]
		i.encode(at)
		sum := checksum(p.inodeSeed(i.number), at)
		le.PutUint16(at[124:], uint16(sum))
		le.PutUint16(at[130:], uint16(sum>>16))
	}
	return b
}

// inodeSeed starts the checksums of an inode, whose generation is 0, and of its folder blocks.
func (p *formatting) inodeSeed(number uint32) uint32 {
	return checksum(p.seed, binary.LittleEndian.AppendUint64(nil, uint64(number)))
}

// rootFolder returns the block of the root folder.
func (p *formatting) rootFolder() []byte {
	const tail = BlockSize - 12
	le := binary.LittleEndian
	b := make([]byte, BlockSize)
	le.PutUint32(b, rootInode)
	le.PutUint16(b[4:], 12)
	copy(b[6:], "\x01\x02.")
	le.PutUint32(b[12:], rootInode)
	le.PutUint16(b[16:], tail-12)
	copy(b[18:], "\x02\x02..")
	le.PutUint16(b[tail+4:], 12)
	b[tail+7] = 0xde // not an entry, but the checksum
	le.PutUint32(b[tail+8:], checksum(p.inodeSeed(rootInode), b[:tail]))
	return b
}

// journalHead returns the superblock of an empty journal. What the disk held before can follow it: the kernel adds checksums that
// depend on the id.
func (p *formatting) journalHead() []byte {
	b := make([]byte, BlockSize)
	for off, v := range map[int]uint32{
		0: 0xc03b3998, 4: 4, 12: BlockSize, 16: p.length, 20: 1,
		24: 1 + binary.BigEndian.Uint32(p.ID[:])>>1, // of the first transaction
		64: 1,                                       // file system uses it
	} {
		binary.BigEndian.PutUint32(b[off:], v)
	}
	copy(b[48:], p.ID[:])
	return b
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checksum continues the checksum sum with b, in the form of ext4, which does not invert the result.
func checksum(sum uint32, b []byte) uint32 { return ^crc32.Update(^sum, castagnoli, b) }

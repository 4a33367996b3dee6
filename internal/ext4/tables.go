package ext4

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// geometry is how blocks and inodes are grouped.
type geometry struct {
	groups   uint32
	perGroup uint32 // inodes
	table    uint32 // first block of the inode tables, which are contiguous
	bitmaps  uint32 // first block of the bitmaps: for each group first the block bitmap, then the inode bitmap
	blocks   uint32 // of the file system
}

func layout(table uint32, inodes int) (geometry, error) {
	g := geometry{groups: 1, table: table}
	for {
		g.perGroup = (uint32(inodes)+g.groups-1)/g.groups + inodesPerBlock - 1
		g.perGroup -= g.perGroup % inodesPerBlock
		tables := int64(g.groups) * int64(g.perGroup) / inodesPerBlock
		end := int64(table) + tables + 2*int64(g.groups)
		if end > maxBlocks {
			return g, errdefs.Exhaustedf("the content needs a file system larger than %d bytes", int64(maxBlocks)*BlockSize)
		}
		need := uint32((end + blocksPerGroup - 1) / blocksPerGroup)
		if g.perGroup > maxPerGroup {
			need = max(need, g.groups+1)
		}
		if need <= g.groups {
			g.bitmaps = table + uint32(tables)
			g.blocks = max(uint32(end), (g.groups-1)*blocksPerGroup+1)
			return g, nil
		}
		g.groups = need
	}
}

// metadata writes inode tables, bitmaps, group descriptors and the superblock, and returns the total size.
func (w *Writer) metadata(id [16]byte) (int64, error) {
	g, err := layout(w.block(), len(w.inodes))
	if err != nil {
		return 0, err
	}
	table := make([]byte, inodeSize)
	for _, i := range w.inodes {
		clear(table)
		if i != nil {
			i.encode(table)
		}
		w.write(table)
	}
	w.pad()
	w.skip(int64(g.bitmaps) - int64(w.block()))
	descriptors := (g.groups*descriptorSize + BlockSize - 1) / BlockSize
	w.mark(0, 1+descriptors)
	w.mark(g.table, g.bitmaps-g.table+2*g.groups)
	w.used = slices.Grow(w.used, int(g.groups)*BlockSize)[:int(g.groups)*BlockSize]
	for b := g.blocks; b < g.groups*blocksPerGroup; b++ { // blocks after the end are not free
		w.used[b/8] |= 1 << (b % 8)
	}
	var gdt []byte
	var freeBlocks, freeInodes uint32
	for n := range g.groups {
		blockMap := w.used[n*BlockSize : (n+1)*BlockSize]
		inodeMap := make([]byte, BlockSize)
		var used, folders uint32
		for j := range uint32(maxPerGroup) {
			number := n*g.perGroup + j + 1
			if j < g.perGroup {
				if number >= firstInode && (number > uint32(len(w.inodes)) || w.inodes[number-1] == nil) {
					continue
				}
				used++
				if number <= uint32(len(w.inodes)) && w.inodes[number-1] != nil && w.inodes[number-1].IsFolder() {
					folders++
				}
			}
			inodeMap[j/8] |= 1 << (j % 8)
		}
		free := uint32(blocksPerGroup)
		for _, b := range blockMap {
			free -= uint32(bits.OnesCount8(b))
		}
		w.write(blockMap)
		w.write(inodeMap)
		freeBlocks += free
		freeInodes += g.perGroup - used
		gdt = binary.LittleEndian.AppendUint32(gdt, g.bitmaps+2*n)
		gdt = binary.LittleEndian.AppendUint32(gdt, g.bitmaps+2*n+1)
		gdt = binary.LittleEndian.AppendUint32(gdt, g.table+n*(g.perGroup/inodesPerBlock))
		gdt = binary.LittleEndian.AppendUint16(gdt, uint16(free))
		gdt = binary.LittleEndian.AppendUint16(gdt, uint16(g.perGroup-used))
		gdt = binary.LittleEndian.AppendUint16(gdt, uint16(folders))
		gdt = append(gdt, make([]byte, descriptorSize-18)...)
	}
	w.flush()
	if w.err == nil {
		_, w.err = w.f.WriteAt(gdt, BlockSize)
	}
	if w.err == nil {
		_, w.err = w.f.WriteAt(superblock(g, freeBlocks, freeInodes, id), superOffset)
	}
	return int64(g.blocks) * BlockSize, w.err
}

// superOffset is where the superblock starts, in bytes.
const superOffset = 1024

func superblock(g geometry, freeBlocks, freeInodes uint32, id [16]byte) []byte {
	b := make([]byte, superOffset)
	for off, v := range map[int]uint32{
		0: g.groups * g.perGroup, 4: g.blocks, 12: freeBlocks, 16: freeInodes, 24: 2, 28: 2, 32: blocksPerGroup, 36: blocksPerGroup,
		40: g.perGroup, 76: 1, 84: firstInode, 92: featureCompat, 96: featureIncompat, 100: featureRO,
	} {
		binary.LittleEndian.PutUint32(b[off:], v)
	}
	for off, v := range map[int]uint16{56: superMagic, 58: 1, 60: 1, 88: inodeSize, 348: extraSize, 350: extraSize} {
		binary.LittleEndian.PutUint16(b[off:], v)
	}
	copy(b[104:], id[:])
	b[372] = 31 // the tables of all groups are together
	return b
}

func (i *Inode) encode(b []byte) {
	le := binary.LittleEndian
	mode := i.Mode
	if mode&TypeMask == TypeSymlink {
		mode |= 0o777
	}
	le.PutUint16(b, mode)
	le.PutUint16(b[2:], uint16(i.UID))
	le.PutUint32(b[4:], uint32(i.size))
	t, extra := stamp(i.ModTime)
	for _, off := range []int{8, 12, 16, 144} { // access, change, modification, birth
		le.PutUint32(b[off:], t)
	}
	for _, off := range []int{132, 136, 140, 148} {
		le.PutUint32(b[off:], extra)
	}
	le.PutUint16(b[24:], uint16(i.GID))
	le.PutUint16(b[26:], uint16(i.links))
	le.PutUint32(b[28:], i.blocks*(BlockSize/512)) // cannot overflow: MaxFile is far below the limit
	le.PutUint32(b[32:], i.flags)
	copy(b[40:100], i.block[:])
	le.PutUint32(b[104:], i.xblock)
	le.PutUint32(b[108:], uint32(i.size>>32))
	le.PutUint16(b[120:], uint16(i.UID>>16))
	le.PutUint16(b[122:], uint16(i.GID>>16))
	le.PutUint16(b[128:], extraSize)
	copy(b[128+extraSize:], i.inline)
}

// stamp converts a time to the form of inodes: seconds, and nanoseconds with two more bits of seconds.
func stamp(t time.Time) (sec, extra uint32) {
	const first, last = -1 << 31, 1<<34 - 1<<31 - 1
	s := min(max(t.Unix(), first), last)
	ns := uint32(t.Nanosecond())
	if t.IsZero() || s != t.Unix() {
		ns = 0
	}
	if t.IsZero() {
		s = 0
	}
	return uint32(s), ns<<2 | uint32((s-int64(int32(uint32(s))))>>32)&3
}

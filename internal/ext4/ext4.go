// Package ext4 writes read-only ext4 file systems in one pass, and reads back those it wrote. It also makes empty, writable file
// systems on disks.
//
// The writer writes the content of files as it arrives and everything else at the end, so a stream of unknown length
// becomes a file system without a scratch copy, a mount or a privilege. It knows nothing of images. The reader is only for
// file systems of this writer: it does not understand journals or hashed folders, and reports anything else as DataLoss.
package ext4

import (
	"io"
	"time"
)

// Modes of Linux: the type of a file.
const (
	TypeMask    = 0o170000
	TypeFIFO    = 0o010000
	TypeChar    = 0o020000
	TypeFolder  = 0o040000
	TypeRegular = 0o100000
	TypeSymlink = 0o120000
)

// Inode is a file of any type. The device number of a TypeChar is 0:0, which overlayfs calls a whiteout.
type Inode struct {
	Mode     uint16 // type and permissions
	UID, GID uint32
	ModTime  time.Time
	Link     string // target of a symbolic link
	Content  Extent // of a regular file, from Writer.Content
	Xattrs   map[string]string

	number uint32
	links  uint32
	block  [60]byte // i_block
	flags  uint32
	size   int64
	blocks uint32 // blocks in use
	xblock uint32 // block with extended attributes
	inline []byte // extended attributes in the inode
}

// Node is a name of an inode. Hard links are nodes that share an inode.
type Node struct {
	*Inode
	Children map[string]*Node // of a folder
}

// IsFolder reports whether the inode is a folder.
func (i *Inode) IsFolder() bool { return i.Mode&TypeMask == TypeFolder }

// Extent is a contiguous range of content in the file system.
type Extent struct {
	Block uint32 // the first block, 0 when there is no content
	Size  int64  // bytes
}

// Offset returns where the content starts in the file system, in bytes.
func (e Extent) Offset() int64 { return int64(e.Block) * BlockSize }

// File is the file to which a file system is written. Bytes that were never written must read as zeros.
type File interface {
	io.WriterAt
	Truncate(size int64) error
}

// BlockSize is the unit of allocation, bytes.
const BlockSize = 4096

const (
	blocksPerGroup  = 8 * BlockSize
	inodeSize       = 256
	inodesPerBlock  = BlockSize / inodeSize
	maxPerGroup     = 8 * BlockSize // inodes, as many as the bitmap has bits
	descriptorSize  = 32
	reservedTable   = 64 // blocks kept for group descriptors: enough for 1 TiB
	firstInode      = 11
	rootInode       = 2
	extraSize       = 32 // of the inode beyond the original 128 bytes
	inlineXattrs    = inodeSize - 128 - extraSize
	maxExtent       = 0x8000 // blocks
	rootExtents     = 4
	leafExtents     = (BlockSize - 12) / 12
	maxFastLink     = 59
	superMagic      = 0xef53
	extentMagic     = 0xf30a
	xattrMagic      = 0xea020000
	flagExtents     = 0x80000
	featureCompat   = 0x200 | 0x8                  // sparse_super2, ext_attr
	featureIncompat = 0x2 | 0x40 | 0x200           // filetype, extent, flex_bg
	featureRO       = 0x2 | 0x8 | 0x40 | 0x1000    // large_file, huge_file, extra_isize, read-only
	maxLinks        = 65000                        // of one inode, including the sub-folders of a folder
	maxBlocks       = reservedTable * 128 * 0x8000 // what the group descriptors can describe
)

// MaxFile is the maximum size of a file, in bytes.
const MaxFile = int64(leafExtents) * maxExtent * BlockSize

package ext4

import (
	"encoding/binary"
	"errors"
	"io"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// FS is a file system of Writer, opened for reading. It is safe for concurrent use.
type FS struct {
	r      io.ReaderAt
	table  int64 // offset of the inode tables
	inodes uint32
}

// Entry is an inode as it was read.
type Entry struct {
	Inode
	Number uint32

	fs     *FS
	listed map[string]uint32
}

// maxFolder limits what is read of one folder, in bytes.
const maxFolder = 1 << 30

func damaged(what string) error {
	return errdefs.DataLossf("the stored file system is damaged: %s", what)
}

// Open reads the head of a file system.
func Open(r io.ReaderAt) (*FS, error) {
	b := make([]byte, BlockSize+descriptorSize)
	if _, err := r.ReadAt(b, 0); err != nil {
		return nil, readError(err)
	}
	s := b[superOffset:]
	if binary.LittleEndian.Uint16(s[56:]) != superMagic || binary.LittleEndian.Uint32(s[96:]) != featureIncompat || binary.LittleEndian.Uint16(s[88:]) != inodeSize {
		return nil, damaged("its superblock has unexpected values")
	}
	return &FS{r: r, table: int64(binary.LittleEndian.Uint32(b[BlockSize+8:])) * BlockSize, inodes: binary.LittleEndian.Uint32(s)}, nil
}

func readError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return damaged("it is cut short")
	}
	return err
}

// Root returns the root folder.
func (f *FS) Root() (*Entry, error) { return f.inode(rootInode) }

func (f *FS) inode(number uint32) (*Entry, error) {
	if number == 0 || number > f.inodes {
		return nil, damaged("an inode that does not exist")
	}
	b := make([]byte, inodeSize)
	if _, err := f.r.ReadAt(b, f.table+int64(number-1)*inodeSize); err != nil {
		return nil, readError(err)
	}
	le := binary.LittleEndian
	e := &Entry{Number: number, fs: f, Inode: Inode{
		Mode:  le.Uint16(b),
		UID:   uint32(le.Uint16(b[2:])) | uint32(le.Uint16(b[120:]))<<16,
		GID:   uint32(le.Uint16(b[24:])) | uint32(le.Uint16(b[122:]))<<16,
		size:  int64(le.Uint32(b[4:])) | int64(le.Uint32(b[108:]))<<32,
		links: uint32(le.Uint16(b[26:])), flags: le.Uint32(b[32:]), xblock: le.Uint32(b[104:]), inline: b[128+extraSize:],
	}}
	sec, extra := le.Uint32(b[16:]), le.Uint32(b[136:])
	e.ModTime = time.Unix(int64(int32(sec))+int64(extra&3)<<32, int64(extra>>2))
	copy(e.block[:], b[40:100])
	if err := e.content(); err != nil {
		return nil, err
	}
	return e, e.attributes()
}

// content finds where the bytes are; they are always contiguous.
func (e *Entry) content() error {
	kind := e.Mode & TypeMask
	if kind == TypeSymlink && e.size <= maxFastLink {
		if e.size < 0 {
			return damaged("a symbolic link without a target")
		}
		e.Link = string(e.block[:e.size])
		return nil
	}
	if kind != TypeRegular && kind != TypeFolder && kind != TypeSymlink || e.size == 0 {
		return nil
	}
	b := e.block[:]
	if binary.LittleEndian.Uint16(b) != extentMagic {
		return damaged("a file without extents")
	}
	if binary.LittleEndian.Uint16(b[6:]) > 0 {
		leaf := make([]byte, 24)
		if _, err := e.fs.r.ReadAt(leaf, int64(binary.LittleEndian.Uint32(b[16:]))*BlockSize); err != nil {
			return readError(err)
		}
		b = leaf
	}
	e.Content = Extent{Block: binary.LittleEndian.Uint32(b[20:]), Size: e.size}
	if kind == TypeSymlink {
		if e.size >= BlockSize {
			return damaged("a symbolic link with a huge target")
		}
		target := make([]byte, e.size)
		if _, err := e.fs.r.ReadAt(target, e.Content.Offset()); err != nil {
			return readError(err)
		}
		e.Link = string(target)
	}
	return nil
}

func (e *Entry) attributes() error {
	all := map[string]string{}
	if binary.LittleEndian.Uint32(e.inline) == xattrMagic {
		if err := unpack(e.inline[4:], 0, all); err != nil {
			return err
		}
	}
	if e.xblock != 0 {
		b := make([]byte, BlockSize)
		if _, err := e.fs.r.ReadAt(b, int64(e.xblock)*BlockSize); err != nil {
			return readError(err)
		}
		if err := unpack(b[32:], 32, all); err != nil {
			return err
		}
	}
	if len(all) > 0 {
		e.Xattrs = all
	}
	return nil
}

// Open returns the content of a regular file.
func (e *Entry) Open() *io.SectionReader {
	return io.NewSectionReader(e.fs.r, e.Content.Offset(), e.Content.Size)
}

// Lookup returns the entry of a name in a folder, or nil.
func (e *Entry) Lookup(name string) (*Entry, error) {
	list, err := e.List()
	if err != nil || list[name] == 0 {
		return nil, err
	}
	return e.fs.inode(list[name])
}

// List returns the inode numbers of a folder's names.
func (e *Entry) List() (map[string]uint32, error) {
	if e.listed != nil {
		return e.listed, nil
	}
	if !e.IsFolder() || e.size < 0 || e.size > maxFolder {
		return nil, damaged("an inode that must be a folder is not a folder")
	}
	b := make([]byte, e.size)
	if _, err := e.fs.r.ReadAt(b, e.Content.Offset()); err != nil {
		return nil, readError(err)
	}
	list := map[string]uint32{}
	for len(b) >= 8 {
		number, size, name := binary.LittleEndian.Uint32(b), int(binary.LittleEndian.Uint16(b[4:])), int(b[6])
		if size < 8 || size > len(b) || 8+name > size {
			return nil, damaged("a folder with an entry that extends beyond its end")
		}
		if n := string(b[8 : 8+name]); number != 0 && n != "." && n != ".." {
			list[n] = number
		}
		b = b[size:]
	}
	e.listed = list
	return list, nil
}

// FS returns the file system of the entry.
func (e *Entry) FS() *FS { return e.fs }

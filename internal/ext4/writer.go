package ext4

import (
	"encoding/binary"
	"io"
	"maps"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Writer writes one file system. Content may be called any number of times, then Finish once.
type Writer struct {
	f    File
	buf  []byte // not written yet, ends at next
	at   int64  // file offset of buf
	zero []byte

	inodes []*Inode // by number-1
	used   []byte   // bitmap of blocks
	err    error
}

const bufferSize = 1 << 20

// NewWriter returns a writer to f, which must be empty.
func NewWriter(f File) *Writer {
	return &Writer{f: f, at: (1 + reservedTable) * BlockSize, buf: make([]byte, 0, bufferSize), zero: make([]byte, BlockSize)}
}

func (w *Writer) pos() int64    { return w.at + int64(len(w.buf)) }
func (w *Writer) block() uint32 { return uint32(w.pos() / BlockSize) }

func (w *Writer) flush() {
	if w.err == nil && len(w.buf) > 0 {
		_, w.err = w.f.WriteAt(w.buf, w.at)
	}
	w.at += int64(len(w.buf))
	w.buf = w.buf[:0]
}

func (w *Writer) write(p []byte) {
	for len(p) > 0 {
		n := copy(w.buf[len(w.buf):cap(w.buf)], p)
		w.buf = w.buf[:len(w.buf)+n]
		p = p[n:]
		if len(w.buf) == cap(w.buf) {
			w.flush()
		}
	}
}

// pad fills the last block with zeros.
func (w *Writer) pad() {
	if rest := int(w.pos() % BlockSize); rest != 0 {
		w.write(w.zero[:BlockSize-rest])
	}
}

// skip leaves a hole of that many blocks.
func (w *Writer) skip(blocks int64) {
	w.flush()
	w.at += blocks * BlockSize
}

// Content copies exactly size bytes of r. It uses blocks even if the caller drops the extent; they are then free in the
// file system.
// Errors are those of r, io.ErrUnexpectedEOF when r is shorter, those of the file, and ResourceExhausted.
func (w *Writer) Content(r io.Reader, size int64) (Extent, error) {
	switch {
	case size == 0:
		return Extent{}, nil
	case size > MaxFile || w.pos()+size > maxBlocks*BlockSize:
		return Extent{}, errdefs.Exhaustedf("a file of %d bytes does not fit into the file system", size)
	}
	e := Extent{Block: w.block(), Size: size}
	for left := size; left > 0 && w.err == nil; {
		room := w.buf[len(w.buf):cap(w.buf)]
		n, err := io.ReadFull(r, room[:min(int64(len(room)), left)])
		w.buf = w.buf[:len(w.buf)+n]
		left -= int64(n)
		if len(w.buf) == cap(w.buf) {
			w.flush()
		}
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return Extent{}, err
		}
	}
	w.pad()
	return e, w.err
}

// Stream lets fill write content whose length nobody knows before. It uses blocks even after an error.
// Errors are those of fill, those of the file, and ResourceExhausted.
func (w *Writer) Stream(fill func(io.Writer) error) (Extent, error) {
	c := content{w: w, start: w.pos()}
	err := fill(&c)
	e := Extent{Block: w.block(), Size: w.pos() - c.start}
	if e.Size > 0 {
		e.Block = uint32(c.start / BlockSize)
	}
	w.pad()
	if err == nil {
		w.flush()
		err = w.err
	}
	return e, err
}

// content is the content of one file in progress.
type content struct {
	w     *Writer
	start int64 // where it starts in the file system
}

func (c *content) Write(p []byte) (int, error) {
	if end := c.w.pos() + int64(len(p)); end-c.start > MaxFile || end > maxBlocks*BlockSize {
		return 0, errdefs.Exhaustedf("a file of more than %d bytes does not fit into the file system", end-c.start-int64(len(p)))
	}
	c.w.write(p)
	return len(p), c.w.err
}

// Finish writes the tree and completes the file system, which then has size bytes. id makes it distinguishable. Equal
// calls give equal bytes.
// Errors: InvalidArgument for what ext4 cannot hold, ResourceExhausted when it is too large, and those of the file.
func (w *Writer) Finish(root *Node, id [16]byte) (size int64, err error) {
	if _, ok := root.Children["lost+found"]; !ok { // file system checkers require it
		root = &Node{Inode: root.Inode, Children: maps.Clone(root.Children)}
		if root.Children == nil {
			root.Children = map[string]*Node{}
		}
		root.Children["lost+found"] = &Node{Inode: &Inode{Mode: TypeFolder | 0o700, ModTime: time.Unix(0, 0)}}
	}
	if err := w.number(root); err != nil {
		return 0, err
	}
	for _, i := range w.inodes {
		if i != nil {
			if err := w.place(i); err != nil {
				return 0, err
			}
		}
	}
	if err := w.folders(root, root); err != nil {
		return 0, err
	}
	size, err = w.metadata(id)
	if err == nil {
		w.flush()
		err = w.err
	}
	if err == nil {
		err = w.f.Truncate(size)
	}
	return size, err
}

// number gives every inode its number, in the order of names, and counts links.
func (w *Writer) number(root *Node) error {
	w.inodes = make([]*Inode, firstInode-1)
	root.number, root.links = rootInode, 1
	w.inodes[rootInode-1] = root.Inode
	var walk func(path string, dir *Node) error
	walk = func(path string, dir *Node) error {
		dir.links++ // its own "."
		for _, name := range Names(dir) {
			c := dir.Children[name]
			if c.number == 0 {
				w.inodes = append(w.inodes, c.Inode)
				c.number, c.links = uint32(len(w.inodes)), 0
			}
			if c.links++; c.links > maxLinks {
				return errdefs.Invalidf("%q has more than %d names; ext4 cannot hold that", path+"/"+name, maxLinks)
			}
			if !c.IsFolder() {
				continue
			}
			if dir.links++; dir.links > maxLinks {
				return errdefs.Invalidf("the folder %q holds more than %d folders; ext4 cannot hold that", path+"/", maxLinks-2)
			}
			if err := walk(path+"/"+name, c); err != nil {
				return err
			}
		}
		return nil
	}
	return walk("", root)
}

// Names returns the names in a folder, sorted.
func Names(dir *Node) []string { return slices.Sorted(maps.Keys(dir.Children)) }

// place writes the parts of an inode that are stored outside of it, except the entries of folders.
func (w *Writer) place(i *Inode) error {
	if err := w.attributes(i); err != nil {
		return err
	}
	switch i.Mode & TypeMask {
	case TypeRegular:
		w.extents(i, i.Content.Block, i.Content.Size)
	case TypeSymlink:
		if i.size = int64(len(i.Link)); i.size <= maxFastLink {
			copy(i.block[:], i.Link)
			return nil
		}
		if i.size >= BlockSize {
			return errdefs.Invalidf("a symbolic link has a target of %d bytes; ext4 cannot hold that", i.size)
		}
		b := w.block()
		w.write([]byte(i.Link))
		w.pad()
		w.extents(i, b, i.size)
	}
	return w.err
}

func blocksOf(size int64) uint32 { return uint32((size + BlockSize - 1) / BlockSize) }

// extents sets size bytes, starting at block, as the content of i.
func (w *Writer) extents(i *Inode, block uint32, size int64) {
	i.size, i.flags = size, i.flags|flagExtents
	n := blocksOf(size)
	w.mark(block, n)
	i.blocks += n
	if n <= rootExtents*maxExtent {
		leaf(i.block[:], rootExtents, block, n)
		return
	}
	b := make([]byte, BlockSize)
	leaf(b, leafExtents, block, n)
	header(i.block[:], 1, rootExtents, 1)
	binary.LittleEndian.PutUint32(i.block[16:], w.block())
	w.mark(w.block(), 1)
	i.blocks++
	w.write(b)
}

// leaf sets in b, which has room for that many extents, those of n blocks that start at block.
func leaf(b []byte, room int, block, n uint32) {
	count := (n + maxExtent - 1) / maxExtent
	header(b, int(count), room, 0)
	for k := range count {
		from := k * maxExtent
		e := b[12+12*k:]
		binary.LittleEndian.PutUint32(e, from)
		binary.LittleEndian.PutUint16(e[4:], uint16(min(maxExtent, n-from)))
		binary.LittleEndian.PutUint32(e[8:], block+from)
	}
}

func header(b []byte, entries, room, depth int) {
	binary.LittleEndian.PutUint16(b, extentMagic)
	binary.LittleEndian.PutUint16(b[2:], uint16(entries))
	binary.LittleEndian.PutUint16(b[4:], uint16(room))
	binary.LittleEndian.PutUint16(b[6:], uint16(depth))
}

// mark marks blocks as used.
func (w *Writer) mark(block, n uint32) {
	if need := int(block+n)/8 + 1; need > len(w.used) {
		w.used = append(w.used, make([]byte, need-len(w.used))...)
	}
	for b := block; b < block+n; b++ {
		if b%8 == 0 && b+8 <= block+n {
			w.used[b/8] = 0xff
			b += 7
			continue
		}
		w.used[b/8] |= 1 << (b % 8)
	}
}

var kinds = map[uint16]byte{TypeRegular: 1, TypeFolder: 2, TypeChar: 3, TypeFIFO: 5, TypeSymlink: 7}

// folders writes the entries of dir and of all folders below it.
func (w *Writer) folders(dir, parent *Node) error {
	var b []byte
	start, last := w.block(), 0 // last entry of the current block
	blocks := uint32(0)
	end := func() { // the last entry extends to the end of its block
		binary.LittleEndian.PutUint16(b[last+4:], uint16(BlockSize-last))
		w.write(b)
		w.write(w.zero[:BlockSize-len(b)])
		b, last = b[:0], 0
		blocks++
	}
	entry := func(i *Inode, name string) {
		size := (8 + len(name) + 3) &^ 3
		if len(b)+size > BlockSize {
			end()
		}
		last = len(b)
		b = binary.LittleEndian.AppendUint32(b, i.number)
		b = binary.LittleEndian.AppendUint16(b, uint16(size))
		b = append(b, byte(len(name)), kinds[i.Mode&TypeMask])
		b = append(b, name...)
		b = append(b, w.zero[:size-8-len(name)]...)
	}
	entry(dir.Inode, ".")
	entry(parent.Inode, "..")
	names := Names(dir)
	for _, name := range names {
		entry(dir.Children[name].Inode, name)
	}
	end()
	w.extents(dir.Inode, start, int64(blocks)*BlockSize)
	if w.err != nil {
		return w.err
	}
	for _, name := range names {
		if c := dir.Children[name]; c.IsFolder() {
			if err := w.folders(c, dir); err != nil {
				return err
			}
		}
	}
	return nil
}

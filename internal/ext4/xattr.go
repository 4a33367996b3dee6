package ext4

import (
	"cmp"
	"encoding/binary"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// prefixes are the name spaces that ext4 stores as a number. The first match is used.
var prefixes = []struct {
	index  byte
	prefix string
}{
	{2, "system.posix_acl_access"},
	{3, "system.posix_acl_default"},
	{8, "system.richacl"},
	{7, "system."},
	{1, "user."},
	{4, "trusted."},
	{6, "security."},
}

type xattr struct {
	index byte
	name  string // without the prefix
	value string
}

func (x xattr) entry() int { return 16 + (len(x.name)+3)&^3 }
func (x xattr) room() int  { return x.entry() + (len(x.value)+3)&^3 }

// attributes puts the extended attributes of i into the inode, and what does not fit into a separate block.
func (w *Writer) attributes(i *Inode) error {
	if len(i.Xattrs) == 0 {
		return nil
	}
	var all []xattr
	for full, value := range i.Xattrs {
		x := xattr{name: full, value: value}
		for _, p := range prefixes {
			if rest, ok := strings.CutPrefix(full, p.prefix); ok {
				x.index, x.name = p.index, rest
				break
			}
		}
		if x.index == 0 || len(x.name) > 255 {
			return errdefs.Invalidf("the extended attribute %.80q has no name that ext4 can hold", full)
		}
		all = append(all, x)
	}
	slices.SortFunc(all, func(a, b xattr) int {
		return cmp.Or(cmp.Compare(a.index, b.index), cmp.Compare(len(a.name), len(b.name)), cmp.Compare(a.name, b.name))
	})
	var inside, outside []xattr
	left, leftBlock := inlineXattrs-8, BlockSize-36 // magic or header, and the end mark
	for _, x := range all {
		switch {
		case x.room() <= left:
			inside = append(inside, x)
			left -= x.room()
		case x.room() <= leftBlock:
			outside = append(outside, x)
			leftBlock -= x.room()
		default:
			return errdefs.Invalidf("the extended attributes of a file have more than %d bytes (%.80q does not fit); ext4 cannot hold that", BlockSize, x.name)
		}
	}
	if len(inside) > 0 {
		i.inline = make([]byte, inlineXattrs)
		binary.LittleEndian.PutUint32(i.inline, xattrMagic)
		pack(i.inline[4:], inside, 0)
	}
	if len(outside) > 0 {
		b := make([]byte, BlockSize)
		binary.LittleEndian.PutUint32(b, xattrMagic)
		binary.LittleEndian.PutUint32(b[4:], 1) // reference count: one file
		binary.LittleEndian.PutUint32(b[8:], 1) // blocks
		pack(b[32:], outside, 32)
		i.xblock = w.block()
		i.blocks++
		w.mark(i.xblock, 1)
		w.write(b)
	}
	return w.err
}

// pack writes entries from the front and values from the back of b. Offsets are relative to the byte delta bytes before b.
func pack(b []byte, list []xattr, delta int) {
	at, end := 0, len(b)
	for _, x := range list {
		end -= (len(x.value) + 3) &^ 3
		copy(b[end:], x.value)
		e := b[at:]
		e[0], e[1] = byte(len(x.name)), x.index
		binary.LittleEndian.PutUint16(e[2:], uint16(end+delta))
		binary.LittleEndian.PutUint32(e[8:], uint32(len(x.value)))
		binary.LittleEndian.PutUint32(e[12:], x.hash())
		copy(e[16:], x.name)
		at += x.entry()
	}
}

func (x xattr) hash() uint32 {
	var h uint32
	for i := range len(x.name) {
		h = h<<5 ^ h>>27 ^ uint32(x.name[i])
	}
	value := x.value + strings.Repeat("\x00", -len(x.value)&3)
	for ; value != ""; value = value[4:] {
		h = h<<16 ^ h>>16 ^ binary.LittleEndian.Uint32([]byte(value[:4]))
	}
	return h
}

// unpack reads what pack wrote.
func unpack(b []byte, delta int, into map[string]string) error {
	for at := 0; ; {
		if len(b) < at+16 || b[at] == 0 && b[at+1] == 0 {
			return nil
		}
		e := b[at:]
		name := int(e[0])
		off := int(binary.LittleEndian.Uint16(e[2:])) - delta
		size := int(binary.LittleEndian.Uint32(e[8:]))
		if off < 0 || size < 0 || off+size > len(b) || at+16+name > len(b) {
			return damaged("an extended attribute extends beyond its block")
		}
		for _, p := range prefixes {
			if p.index == e[1] {
				into[p.prefix+string(e[16:16+name])] = string(b[off : off+size])
			}
		}
		at += 16 + (name+3)&^3
	}
}

package seed

import (
	"encoding/binary"
	"maps"
	"path"
	"slices"
	"strings"
	"unicode/utf16"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// The image has two trees over the same data: ISO 9660 with Rock Ridge for Unix, and Joliet for Windows. Both keep the
// names as they are. Sources: ECMA-119, IEEE P1281/P1282, the Joliet specification.

const (
	sector = 2048

	sectorPrimary = 16 // where the standard puts the volume descriptors
	sectorJoliet  = 17
	sectorEnd     = 18
	sectorTables  = 19 // four path tables, a sector each
	sectorTree    = 23
)

// Everything in the image has the same date: equal documents give equal bytes.
var (
	stamp     = [7]byte{100, 1, 1, 0, 0, 0, 0} // 2000-01-01 UTC
	longStamp = "2000010100000000\x00"
	noStamp   = "0000000000000000\x00"
)

// node is a file or folder.
type node struct {
	name     string
	data     []byte
	children []*node // of a folder, sorted by name
	folder   bool
	parent   *node

	at     uint32    // sector of a file's data
	tree   [2]uint32 // sector of a folder's first records, in each tree
	size   [2]uint32 // bytes of a folder's records, whole sectors
	number [2]uint16 // of a folder, in each tree's path table
}

// variant is one of the two trees.
type variant int

const (
	rockRidge variant = iota
	joliet
)

// encode returns an image called label with files, by path.
func encode(label string, files map[string][]byte) ([]byte, error) {
	root := &node{folder: true}
	root.parent = root
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := root.add(name, files[name]); err != nil {
			return nil, err
		}
	}
	folders := root.folders()
	next := uint32(sectorTree)
	for v := range 2 {
		for i, d := range folders {
			d.tree[v], d.number[v] = next, uint16(i+1)
			d.size[v] = uint32(len(d.records(variant(v)))) // it does not depend on what is in the records
			next += d.size[v] / sector
		}
	}
	for _, d := range folders {
		for _, c := range d.children {
			if !c.folder {
				c.at = next
				next += uint32((len(c.data) + sector - 1) / sector)
			}
		}
	}
	img := make([]byte, int(next)*sector)
	put := func(at uint32, b []byte) { copy(img[int(at)*sector:], b) }
	for v := rockRidge; v <= joliet; v++ {
		little, big := pathTables(folders, v)
		if len(little) > sector {
			return nil, errdefs.Invalidf("seed: %d folders are too many", len(folders))
		}
		put(sectorTables+2*uint32(v), little)
		put(sectorTables+2*uint32(v)+1, big)
		put(sectorPrimary+uint32(v), descriptor(v, label, next, uint32(len(little)), root))
		for _, d := range folders {
			put(d.tree[v], d.records(v))
		}
	}
	put(sectorEnd, []byte("\xffCD001\x01"))
	for _, d := range folders {
		for _, c := range d.children {
			put(c.at, c.data)
		}
	}
	return img, nil
}

// add adds a file below d, and the folders on its path. Files must come sorted by path.
func (d *node) add(name string, data []byte) error {
	first, rest, deeper := strings.Cut(name, "/")
	if first == "" || len(first) > 60 || strings.ContainsFunc(first, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return errdefs.Invalidf("seed: %q cannot name a file", name)
	}
	if !deeper {
		d.children = append(d.children, &node{name: first, data: data, parent: d})
		return nil
	}
	i := slices.IndexFunc(d.children, func(c *node) bool { return c.name == first && c.folder })
	if i < 0 {
		i = len(d.children)
		d.children = append(d.children, &node{name: first, folder: true, parent: d})
	}
	return d.children[i].add(rest, data)
}

// folders lists d and the folders below it in the order of path tables: by depth, then by parent, then by name.
func (d *node) folders() []*node {
	all := []*node{d}
	for i := 0; i < len(all); i++ {
		for _, c := range all[i].children {
			if c.folder {
				all = append(all, c)
			}
		}
	}
	return all
}

// id is n's name as tree v writes it.
func (n *node) id(v variant) []byte {
	if v == joliet {
		name := n.name
		if !n.folder {
			name += ";1"
		}
		return ucs2(name)
	}
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' {
			return r - 'a' + 'A'
		}
		if r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, strings.TrimSuffix(n.name, path.Ext(n.name)))
	if n.folder {
		return []byte(name)
	}
	return []byte(name + "." + strings.ToUpper(strings.TrimPrefix(path.Ext(n.name), ".")) + ";1")
}

func ucs2(s string) []byte {
	var b []byte
	for _, u := range utf16.Encode([]rune(s)) {
		b = binary.BigEndian.AppendUint16(b, u)
	}
	return b
}

// records is the content of folder d in tree v: whole sectors, because no record crosses from one to the next.
func (d *node) records(v variant) []byte {
	b := record(d, v, []byte{0}, d.systemUse(v, "", d.parent == d))
	b = append(b, record(d.parent, v, []byte{1}, d.parent.systemUse(v, "", false))...)
	for _, c := range sorted(d.children, v) {
		r := record(c, v, c.id(v), c.systemUse(v, c.name, false))
		if len(b)%sector+len(r) > sector {
			b = whole(b)
		}
		b = append(b, r...)
	}
	return whole(b)
}

// whole fills the last sector of b.
func whole(b []byte) []byte {
	if rest := len(b) % sector; rest > 0 {
		b = append(b, make([]byte, sector-rest)...)
	}
	return b
}

func sorted(list []*node, v variant) []*node {
	return slices.SortedFunc(slices.Values(list), func(a, b *node) int { return slices.Compare(a.id(v), b.id(v)) })
}

// record is the directory record of n, with the name id.
func record(n *node, v variant, id, use []byte) []byte {
	at, size, flags := n.at, uint32(len(n.data)), byte(0)
	if n.folder {
		at, size, flags = n.tree[v], n.size[v], 2
	}
	b := []byte{0, 0}
	b = both32(b, at)
	b = both32(b, size)
	b = append(b, stamp[:]...)
	b = append(b, flags, 0, 0)
	b = both16(b, 1) // volume
	b = append(b, byte(len(id)))
	b = append(b, id...)
	b = even(b)
	b = even(append(b, use...))
	b[0] = byte(len(b))
	return b
}

// systemUse is the Rock Ridge data of n: the mark that Rock Ridge is used, only in the root's own record; mode and owner;
// dates; the name.
func (n *node) systemUse(v variant, name string, root bool) []byte {
	if v == joliet {
		return nil
	}
	var b []byte
	if root {
		b = append(b, "SP\x07\x01\xbe\xef\x00"...)
		const id, text = "RRIP_1991A", "THE ROCK RIDGE INTERCHANGE PROTOCOL PROVIDES SUPPORT FOR POSIX FILE SYSTEM SEMANTICS"
		b = append(b, 'E', 'R', byte(8+len(id)+len(text)), 1, byte(len(id)), byte(len(text)), 0, 1)
		b = append(b, id+text...)
	}
	mode, links := uint32(0o100400), uint32(1)
	if n.folder {
		mode, links = 0o040500, 2
	}
	b = append(b, 'P', 'X', 36, 1)
	for _, x := range []uint32{mode, links, 0, 0} {
		b = both32(b, x)
	}
	b = append(b, 'T', 'F', 5+3*7, 1, 0x0e) // modified, read, changed
	for range 3 {
		b = append(b, stamp[:]...)
	}
	if name != "" {
		b = append(b, 'N', 'M', byte(5+len(name)), 1, 0)
		b = append(b, name...)
	}
	return b
}

// pathTables returns the path tables of tree v in both byte orders.
func pathTables(folders []*node, v variant) (little, big []byte) {
	for i, d := range folders {
		id := d.id(v)
		if i == 0 {
			id = []byte{0}
		}
		little = append(little, byte(len(id)), 0)
		little = binary.LittleEndian.AppendUint32(little, d.tree[v])
		little = binary.LittleEndian.AppendUint16(little, d.parent.number[v])
		little = even(append(little, id...))
		big = append(big, byte(len(id)), 0)
		big = binary.BigEndian.AppendUint32(big, d.tree[v])
		big = binary.BigEndian.AppendUint16(big, d.parent.number[v])
		big = even(append(big, id...))
	}
	return little, big
}

// descriptor is the volume descriptor of tree v in an image of the given number of sectors.
func descriptor(v variant, label string, sectors, table uint32, root *node) []byte {
	text := func(b []byte, s string, n int) []byte {
		t, blank := []byte(s), []byte(" ")
		if v == joliet {
			t, blank = ucs2(s), ucs2(" ")
		}
		for len(t)+len(blank) <= n {
			t = append(t, blank...)
		}
		return append(b, append(t, make([]byte, n)...)[:n]...)
	}
	b := []byte("\x01CD001\x01\x00")
	if v == joliet {
		b[0] = 2
	}
	b = text(b, "", 32)    // system
	b = text(b, label, 32) // volume
	b = append(b, make([]byte, 8)...)
	b = both32(b, sectors)
	var escape [32]byte
	if v == joliet {
		copy(escape[:], "%/E") // UCS-2 level 3
	}
	b = append(b, escape[:]...)
	b = both16(b, 1) // volumes in the set
	b = both16(b, 1) // this one
	b = both16(b, sector)
	b = both32(b, table)
	b = binary.LittleEndian.AppendUint32(b, sectorTables+2*uint32(v))
	b = append(b, 0, 0, 0, 0)
	b = binary.BigEndian.AppendUint32(b, sectorTables+2*uint32(v)+1)
	b = append(b, 0, 0, 0, 0)
	b = append(b, record(root, v, []byte{0}, nil)...)
	for _, n := range []int{128, 128, 128, 128, 37, 37, 37} { // set, publisher, preparer, application, three files
		b = text(b, "", n)
	}
	b = append(b, longStamp+longStamp+noStamp+longStamp+"\x01\x00"...)
	return append(b, make([]byte, sector-len(b))...)
}

func even(b []byte) []byte {
	if len(b)%2 != 0 {
		return append(b, 0)
	}
	return b
}

// both32 and both16 append a number in both byte orders, as the standard requires.
func both32(b []byte, n uint32) []byte {
	return binary.BigEndian.AppendUint32(binary.LittleEndian.AppendUint32(b, n), n)
}

func both16(b []byte, n uint16) []byte {
	return binary.BigEndian.AppendUint16(binary.LittleEndian.AppendUint16(b, n), n)
}

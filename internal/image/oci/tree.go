package oci

import (
	"archive/tar"
	"io"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Bounds of one file system entry. They are those of Linux and ext4.
const (
	maxComponent = 255
	maxPath      = 4096
	maxSymlinks  = 40
	maxLink      = 4095
	maxTreeMeta  = 256 << 20 // bytes of all names, link targets and attributes of an image
)

// Tree is the flattened file system of an image: the layers applied over each other.
type Tree struct {
	root    *node
	spool   io.ReaderAt // holds the content of the files
	lim     Limits
	bytes   int64 // written to the spool so far
	meta    int64 // bytes of names, link targets and attributes
	entries int
	devices int // device nodes left out
}

// node is one name's place in the tree. Hard links are two nodes with one inode.
type node struct {
	*inode
	layer    int // the last layer that set this name
	children map[string]*node
}

type inode struct {
	typ      byte // tar type: TypeReg, TypeDir, TypeSymlink, TypeFifo
	mode     int64
	uid, gid int
	mtime    time.Time
	link     string // target of a symbolic link
	off      int64  // of the content in the spool
	size     int64
	xattrs   map[string]string
	path     string // where it was written first, for hard links; set while writing
}

func newDir(layer int) *node {
	return &node{inode: &inode{typ: tar.TypeDir, mode: 0o755, mtime: time.Unix(0, 0)}, layer: layer, children: map[string]*node{}}
}

func (n *node) isDir() bool { return n.typ == tar.TypeDir }

// names returns the children in the order they are written.
func (n *node) names() []string { return slices.Sorted(maps.Keys(n.children)) }

// layerPath splits the name of a layer's entry into components. Names are relative to the image's root: a leading
// slash is dropped as every container runtime does (ko writes such layers); a ".." has no honest use.
func layerPath(name string) ([]string, error) {
	if len(name) > maxPath || strings.ContainsRune(name, 0) {
		return nil, errdefs.Invalidf("a layer holds a name of %d bytes; %d are possible", len(name), maxPath)
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
		case part == "..":
			return nil, errdefs.Invalidf("a layer holds %q, which climbs out of its folder: refused", name)
		case len(part) > maxComponent:
			return nil, errdefs.Invalidf("a layer holds a name with a component of %d bytes; %d are possible", len(part), maxComponent)
		default:
			parts = append(parts, part)
		}
	}
	return parts, nil
}

// folder returns the folder that parts lead to, following symbolic links inside the image as a kernel with this root
// would. What is missing is made for the layer, or, when make is false, reported as nil.
func (t *Tree) folder(parts []string, layer int, make bool) (*node, error) {
	stack := []*node{t.root}
	todo := slices.Clone(parts)
	for hops := 0; len(todo) > 0; {
		part := todo[0]
		todo = todo[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			stack = stack[:max(1, len(stack)-1)]
			continue
		}
		next := stack[len(stack)-1].children[part]
		switch {
		case next == nil && !make:
			return nil, nil
		case next == nil:
			if len(part) > maxComponent || len(stack) > maxPath/2 {
				return nil, errdefs.Invalidf("a layer holds a path that no file system can: %q", path.Join(parts...))
			}
			if err := t.count(len(part)); err != nil {
				return nil, err
			}
			next = newDir(layer)
			stack[len(stack)-1].children[part] = next
		case next.typ == tar.TypeSymlink:
			if hops++; hops > maxSymlinks {
				return nil, errdefs.Invalidf("a layer writes to %q through a loop of symbolic links: refused", path.Join(parts...))
			}
			if strings.HasPrefix(next.link, "/") {
				stack = stack[:1]
			}
			todo = append(strings.Split(next.link, "/"), todo...)
			continue
		case !next.isDir():
			return nil, errdefs.Invalidf("a layer writes to %q, but %q is not a folder", path.Join(parts...), part)
		}
		stack = append(stack, next)
	}
	return stack[len(stack)-1], nil
}

// count books one more entry with so many bytes of names and attributes.
func (t *Tree) count(meta int) error {
	t.entries++
	t.meta += int64(meta)
	if t.entries > t.lim.Entries || t.meta > maxTreeMeta {
		return errdefs.Exhaustedf("the image has more than %d files, or more than %d bytes of names and attributes: refused", t.lim.Entries, maxTreeMeta)
	}
	return nil
}

// lookup finds a name without following a symbolic link at its end; nil when there is none.
func (t *Tree) lookup(parts []string) *node {
	if len(parts) == 0 {
		return t.root
	}
	dir, err := t.folder(parts[:len(parts)-1], 0, false)
	if err != nil || dir == nil {
		return nil
	}
	return dir.children[parts[len(parts)-1]]
}

// set puts n at parts. A folder over a folder keeps its children; anything else replaces what was there.
func (t *Tree) set(parts []string, n *node) error {
	if len(parts) == 0 {
		if !n.isDir() {
			return errdefs.Invalidf("a layer replaces the root folder by something else: refused")
		}
		t.root.inode, t.root.layer = n.inode, n.layer
		return nil
	}
	dir, err := t.folder(parts[:len(parts)-1], n.layer, true)
	if err != nil {
		return err
	}
	name := parts[len(parts)-1]
	if old := dir.children[name]; old != nil && old.isDir() && n.isDir() {
		old.inode, old.layer = n.inode, n.layer
		return nil
	}
	dir.children[name] = n
	return nil
}

// hide applies a whiteout: what lower layers put at parts goes, what this layer put there stays.
func (t *Tree) hide(parts []string, layer int) {
	if len(parts) == 0 {
		return
	}
	dir, err := t.folder(parts[:len(parts)-1], layer, false)
	if err != nil || dir == nil {
		return // nothing there to hide
	}
	name := parts[len(parts)-1]
	if n := dir.children[name]; n != nil && !n.keep(layer) {
		delete(dir.children, name)
	}
}

// opaque hides what lower layers put into the folder at parts.
func (t *Tree) opaque(parts []string, layer int) {
	dir, err := t.folder(parts, layer, false)
	if err != nil || dir == nil {
		return
	}
	maps.DeleteFunc(dir.children, func(_ string, n *node) bool { return !n.keep(layer) })
}

// keep prunes what is below layer and reports whether anything of the layer remains.
func (n *node) keep(layer int) bool {
	maps.DeleteFunc(n.children, func(_ string, c *node) bool { return !c.keep(layer) })
	return n.layer == layer || len(n.children) > 0
}

package oci

import (
	"errors"
	"maps"
	"path"
	"slices"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ext4"
)

// xattrOpaque is the overlayfs mark of a folder that hides the same folder in lower layers.
const xattrOpaque = "trusted.overlay.opaque"

// Stack is the merged view of the layers built so far.
type Stack struct{ root view }

// NewStack opens the file systems of layers, the lowest first.
func NewStack(layers []*ext4.FS) (*Stack, error) {
	s := &Stack{}
	for _, l := range slices.Backward(layers) {
		r, err := l.Root()
		if err != nil {
			return nil, err
		}
		s.root = append(s.root, r)
	}
	return s, nil
}

// view is one folder of a stack: the folders of all layers that are merged there, the highest first.
type view []*ext4.Entry

// child returns the visible entry of a name, nil if there is none, and its own view if it is a folder.
func (v view) child(name string) (*ext4.Entry, view, error) {
	var sub view
	for _, dir := range v {
		e, err := dir.Lookup(name)
		if err != nil {
			return nil, nil, err
		}
		switch {
		case e == nil:
			continue
		case !e.IsFolder() && sub != nil || e.Mode&ext4.TypeMask == ext4.TypeChar:
		case !e.IsFolder():
			return e, nil, nil
		default:
			sub = append(sub, e)
			if e.Xattrs[xattrOpaque] == "" {
				continue
			}
		}
		break
	}
	if sub == nil {
		return nil, nil, nil
	}
	return sub[0], sub, nil
}

// names returns all names that may be visible in the folder, sorted; child decides which are.
func (v view) names() ([]string, error) {
	all := map[string]bool{}
	for _, dir := range v {
		list, err := dir.List()
		if err != nil {
			return nil, err
		}
		for name := range list {
			all[name] = true
		}
	}
	return slices.Sorted(maps.Keys(all)), nil
}

// File returns the regular file at path as a kernel with this root would find it: no symbolic link leads out of the image.
// Errors: NotFound, InvalidArgument (no regular file).
func (s *Stack) File(path string) (*ext4.Entry, error) {
	e, err := s.walk(strings.Split(path, "/"), true)
	switch {
	case err != nil:
		return nil, err
	case e == nil:
		return nil, errdefs.NotFoundf("there is no file %s", path)
	case e.Mode&ext4.TypeMask != ext4.TypeRegular:
		return nil, errdefs.Invalidf("%s is not a regular file", path)
	}
	return e, nil
}

// lookup follows parts through the stack and resolves symbolic links on the way, but not the last part.
func (s *Stack) lookup(parts []string) (*ext4.Entry, error) { return s.walk(parts, false) }

// walk follows parts through the stack and resolves symbolic links on the way. With last, it resolves the last part, too.
func (s *Stack) walk(parts []string, last bool) (*ext4.Entry, error) {
	stack, todo := []view{s.root}, slices.Clone(parts)
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
		e, sub, err := stack[len(stack)-1].child(part)
		switch {
		case err != nil || e == nil || len(todo) == 0 && (!last || e.Mode&ext4.TypeMask != ext4.TypeSymlink):
			return e, err
		case e.Mode&ext4.TypeMask == ext4.TypeSymlink:
			if hops++; hops > maxSymlinks {
				return nil, nil
			}
			if strings.HasPrefix(e.Link, "/") {
				stack = stack[:1]
			}
			todo = append(strings.Split(e.Link, "/"), todo...)
		case sub == nil:
			return nil, nil
		default:
			stack = append(stack, sub)
		}
	}
	return nil, nil
}

// move is a folder of the layer that is a symbolic link in the layers below.
type move struct {
	n      *node
	target []string
}

// settle adapts the layer's tree to the stack below it. A folder that the layer only implies gets the attributes that it
// has below; if it is a symbolic link below, its content moves to the link's target. Whiteouts stay only where they hide
// something: in a folder that only one layer has, overlayfs would show them as broken names.
func (b *build) settle(s *Stack) error {
	if b.root.opaque { // overlayfs ignores the mark on the root folder
		names, err := s.root.names()
		if err != nil {
			return err
		}
		for _, name := range names {
			if c := b.root.children[name]; c == nil {
				b.root.children[name] = newWhiteout()
			} else if c.IsFolder() {
				c.opaque = true
			}
		}
		b.root.opaque = false
	}
	for range maxSymlinks {
		b.moves = nil
		if err := b.merge(b.root, s.root, nil); err != nil {
			return err
		}
		if len(b.moves) == 0 {
			return nil
		}
		for _, m := range b.moves {
			dir, err := b.folder(m.target, true)
			if err != nil {
				return err
			}
			graft(dir, m.n)
		}
	}
	return errdefs.Invalidf("a layer writes through a loop of symbolic links: refused")
}

func (b *build) merge(n *node, v view, at []string) error {
	if n.opaque {
		v = nil
	}
	for _, name := range slices.Sorted(maps.Keys(n.children)) {
		c := n.children[name]
		e, sub, err := v.child(name)
		if err != nil {
			return err
		}
		full := append(slices.Clone(at), name)
		switch {
		case c.whiteout:
			if e == nil {
				delete(n.children, name)
			}
			continue
		case !c.IsFolder():
			continue
		case c.implied && (e == nil || !e.IsFolder()) && !c.substance():
			delete(n.children, name) // whiteouts that hide nothing
			continue
		case c.implied && e != nil && e.Mode&ext4.TypeMask == ext4.TypeSymlink:
			target := append(slices.Clone(at), strings.Split(e.Link, "/")...)
			if strings.HasPrefix(e.Link, "/") {
				target = strings.Split(e.Link, "/")
			}
			delete(n.children, name)
			b.moves = append(b.moves, move{c, target})
			continue
		case c.implied && e != nil && !e.IsFolder():
			return errdefs.Invalidf("a layer writes to %q, but that is not a folder", path.Join(full...)+"/")
		case c.implied && e != nil:
			c.Inode = attributesOf(e)
		}
		c.implied = false
		if err := b.merge(c, sub, full); err != nil {
			return err
		}
	}
	return nil
}

// attributesOf returns the inode of a folder with the attributes of a folder below.
func attributesOf(e *ext4.Entry) *ext4.Inode {
	x := maps.Clone(e.Xattrs)
	delete(x, xattrOpaque)
	return &ext4.Inode{Mode: e.Mode, UID: e.UID, GID: e.GID, ModTime: e.ModTime, Xattrs: x}
}

// graft moves the content of from into dir.
func graft(dir, from *node) {
	dir.opaque = dir.opaque || from.opaque
	for name, c := range from.children {
		if old := dir.children[name]; old != nil && old.IsFolder() && c.IsFolder() {
			if !c.implied {
				old.Inode, old.implied = c.Inode, false
			}
			graft(old, c)
			continue
		}
		dir.children[name] = c
	}
}

// borrow completes hard links to files of lower layers: the layer gets its own copy.
func (b *build) borrow(s *Stack) error {
	for _, l := range b.links {
		e, err := s.lookup(l.target)
		switch {
		case err != nil:
			return err
		case e == nil:
			return errdefs.Invalidf("a layer holds %q as a hard link to %q, which does not exist: refused", l.name, path.Join(l.target...))
		case e.IsFolder():
			return errdefs.Invalidf("a layer holds %q as a hard link to the folder %q: refused", l.name, path.Join(l.target...))
		}
		*l.inode = ext4.Inode{Mode: e.Mode, UID: e.UID, GID: e.GID, ModTime: e.ModTime, Link: e.Link, Xattrs: e.Xattrs}
		if e.Mode&ext4.TypeMask == ext4.TypeRegular {
			if l.inode.Content, err = b.copy(e); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *build) copy(e *ext4.Entry) (ext4.Extent, error) {
	if err := b.budget.bytes(e.Content.Size); err != nil {
		return ext4.Extent{}, err
	}
	return b.w.Content(e.Open(), e.Content.Size)
}

// ErrNotADisk says that a container image does not wrap a disk.
var ErrNotADisk = errors.New("not a disk")

// diskFolder is the folder where a container image holds the disk of a virtual machine.
const diskFolder = "disk"

// Disk returns the one regular file in /disk, if the image has nothing else.
func (s *Stack) Disk() (*ext4.Entry, error) {
	top, err := s.root.names()
	if err != nil {
		return nil, err
	}
	for _, name := range top {
		if name != diskFolder && name != "lost+found" {
			return nil, ErrNotADisk
		}
	}
	_, v, err := s.root.child(diskFolder)
	if err != nil {
		return nil, err
	}
	names, err := v.names()
	if err != nil {
		return nil, err
	}
	var found *ext4.Entry
	for _, name := range names {
		e, _, err := v.child(name)
		switch {
		case err != nil:
			return nil, err
		case e == nil:
		case found != nil || e.Mode&ext4.TypeMask != ext4.TypeRegular:
			return nil, ErrNotADisk
		default:
			found = e
		}
	}
	if found == nil {
		return nil, ErrNotADisk
	}
	return found, nil
}

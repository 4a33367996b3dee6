package oci

import (
	"path"
	"slices"
	"strings"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ext4"
)

// Limits of one file system entry. They are those of Linux and ext4.
const (
	maxComponent = 255
	maxPath      = 4096
	maxSymlinks  = 40
	maxLink      = 4095
)

// node is one name in a layer. Hard links are nodes that share an inode.
type node struct {
	*ext4.Inode
	children map[string]*node // of a folder

	whiteout bool // hides the name of lower layers and has no content
	opaque   bool // a folder that hides its content in lower layers
	implied  bool // a folder that the layer names only as the parent of an entry
}

func newFolder(implied bool) *node {
	return &node{
		Inode:    &ext4.Inode{Mode: ext4.TypeFolder | 0o755, ModTime: time.Unix(0, 0)},
		children: map[string]*node{}, implied: implied,
	}
}

func newWhiteout() *node { return &node{Inode: &ext4.Inode{Mode: ext4.TypeChar}, whiteout: true} }

// layerPath splits the name of a layer's entry into components. Names are relative to the image's root. A leading slash is
// dropped, as in every container runtime (ko writes such layers). A ".." is refused: it has no honest use.
func layerPath(name string) ([]string, error) {
	if len(name) > maxPath || strings.ContainsRune(name, 0) {
		return nil, errdefs.Invalidf("a layer holds a name of %d bytes; at most %d are allowed", len(name), maxPath)
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
		case part == "..":
			return nil, errdefs.Invalidf("a layer holds %q, which points outside of its folder: refused", name)
		case len(part) > maxComponent:
			return nil, errdefs.Invalidf("a layer holds a name with a component of %d bytes; at most %d are allowed", len(part), maxComponent)
		default:
			parts = append(parts, part)
		}
	}
	return parts, nil
}

// folder returns the folder at parts. It follows the layer's own symbolic links as a kernel with this root would. If make
// is true, it creates missing folders; else it returns nil for them.
func (b *build) folder(parts []string, make bool) (*node, error) {
	stack := []*node{b.root}
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
		dir := stack[len(stack)-1]
		next := dir.children[part]
		switch {
		case (next == nil || next.whiteout) && !make:
			return nil, nil
		case next == nil || next.whiteout:
			if len(part) > maxComponent || len(stack) > maxPath/2 {
				return nil, errdefs.Invalidf("a layer holds a path that no file system can store: %q", path.Join(parts...))
			}
			if err := b.budget.entry(len(part)); err != nil {
				return nil, err
			}
			hidden := next != nil
			next = newFolder(!hidden)
			next.opaque = hidden
			dir.children[part] = next
		case next.Mode&ext4.TypeMask == ext4.TypeSymlink:
			if hops++; hops > maxSymlinks {
				return nil, errdefs.Invalidf("a layer writes to %q through a loop of symbolic links: refused", path.Join(parts...))
			}
			if strings.HasPrefix(next.Link, "/") {
				stack = stack[:1]
			}
			todo = append(strings.Split(next.Link, "/"), todo...)
			continue
		case !next.IsFolder():
			return nil, errdefs.Invalidf("a layer writes to %q, but %q is not a folder", path.Join(parts...), part)
		}
		stack = append(stack, next)
	}
	return stack[len(stack)-1], nil
}

// lookup finds a name of the layer without following a symbolic link at its end; nil if it does not exist.
func (b *build) lookup(parts []string) *node {
	if len(parts) == 0 {
		return b.root
	}
	dir, err := b.folder(parts[:len(parts)-1], false)
	if err != nil || dir == nil {
		return nil
	}
	return dir.children[parts[len(parts)-1]]
}

// set puts n at parts. A folder over a folder keeps its children; anything else replaces the old entry.
func (b *build) set(parts []string, n *node) error {
	if len(parts) == 0 {
		if !n.IsFolder() {
			return errdefs.Invalidf("a layer replaces the root folder by something else: refused")
		}
		b.root.Inode = n.Inode
		return nil
	}
	dir, err := b.folder(parts[:len(parts)-1], true)
	if err != nil {
		return err
	}
	name := parts[len(parts)-1]
	old := dir.children[name]
	switch {
	case old != nil && old.IsFolder() && n.IsFolder():
		old.Inode, old.implied = n.Inode, false
		return nil
	case old != nil && n.IsFolder():
		n.opaque = true // the replaced entry already hid the lower layers
	}
	dir.children[name] = n
	return nil
}

// hide applies a whiteout: it hides what lower layers have at parts and keeps what this layer has there.
func (b *build) hide(parts []string) error {
	if len(parts) == 0 {
		return nil
	}
	dir, err := b.folder(parts[:len(parts)-1], true)
	if err != nil {
		return nil //nolint:nilerr // below something that is no folder there is nothing to hide
	}
	name := parts[len(parts)-1]
	switch n := dir.children[name]; {
	case n == nil:
		dir.children[name] = newWhiteout()
	case n.IsFolder():
		if n.implied {
			n.Inode, n.implied = newFolder(false).Inode, false
		}
		n.opaque = true
	}
	return nil
}

// conceal hides what lower layers have in the folder at parts.
func (b *build) conceal(parts []string) error {
	dir, err := b.folder(parts, true)
	if err != nil {
		return nil //nolint:nilerr // as for hide
	}
	dir.opaque = true
	return nil
}

// clear removes what is at parts, whichever layer put it there.
func (b *build) clear(parts []string) error {
	if len(parts) == 0 {
		return nil
	}
	dir, err := b.folder(parts[:len(parts)-1], true)
	if err == nil {
		dir.children[parts[len(parts)-1]] = newWhiteout()
	}
	return err
}

// substance reports whether n holds anything other than whiteouts.
func (n *node) substance() bool {
	if n.whiteout || !n.IsFolder() || !n.implied {
		return !n.whiteout
	}
	for _, c := range n.children {
		if c.substance() {
			return true
		}
	}
	return false
}

// dependent reports whether the result of n depends on lower layers.
func (n *node) dependent() bool {
	for _, c := range n.children {
		if c.implied || c.whiteout && !n.opaque || c.dependent() {
			return true
		}
	}
	return false
}

// tree returns n in the form that the file system's writer takes.
func (n *node) tree() *ext4.Node {
	out := &ext4.Node{Inode: n.Inode}
	if n.opaque {
		i := *n.Inode
		i.Xattrs = map[string]string{xattrOpaque: "y"}
		for k, v := range n.Xattrs {
			i.Xattrs[k] = v
		}
		out.Inode = &i
	}
	if n.IsFolder() {
		out.Children = make(map[string]*ext4.Node, len(n.children))
		for name, c := range n.children {
			out.Children[name] = c.tree()
		}
	}
	return out
}

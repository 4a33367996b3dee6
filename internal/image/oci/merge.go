package oci

import (
	"context"
	"crypto/sha256"
	"path"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ext4"
)

// merger writes the merged view of a stack as one file system.
type merger struct {
	ctx  context.Context
	b    *build
	byID map[inodeKey]*ext4.Inode
	n    int
}

type inodeKey struct {
	fs     *ext4.FS
	number uint32
}

// Merge writes the merged view of a stack as one file system that needs no layers below. key makes it distinguishable.
func Merge(ctx context.Context, s *Stack, out ext4.File, key string, budget *Budget) (size int64, err error) {
	m := &merger{ctx: ctx, b: &build{w: ext4.NewWriter(out), budget: budget}, byID: map[inodeKey]*ext4.Inode{}}
	root := newFolder(false)
	if len(s.root) > 0 {
		root.Inode = attributesOf(s.root[0])
	}
	if err := m.fill(root, s.root, ""); err != nil {
		return 0, err
	}
	sum := sha256.Sum256([]byte(key))
	return m.b.w.Finish(root.tree(), [16]byte(sum[:16]))
}

func (m *merger) fill(dir *node, v view, at string) error {
	names, err := v.names()
	if err != nil {
		return err
	}
	for _, name := range names {
		if m.n++; m.n > m.b.budget.lim.Entries {
			return errdefs.Exhaustedf("the image has more than %d files: refused", m.b.budget.lim.Entries)
		}
		if err := m.ctx.Err(); err != nil {
			return err
		}
		e, sub, err := v.child(name)
		if err != nil {
			return err
		}
		if e == nil {
			continue
		}
		n := &node{}
		if e.IsFolder() {
			n.Inode, n.children = attributesOf(e), map[string]*node{}
			if err := m.fill(n, sub, path.Join(at, name)); err != nil {
				return err
			}
		} else if n.Inode, err = m.inode(e); err != nil {
			return err
		}
		dir.children[name] = n
	}
	return nil
}

func (m *merger) inode(e *ext4.Entry) (*ext4.Inode, error) {
	id := inodeKey{e.FS(), e.Number}
	if i := m.byID[id]; i != nil {
		return i, nil
	}
	i := &ext4.Inode{Mode: e.Mode, UID: e.UID, GID: e.GID, ModTime: e.ModTime, Link: e.Link, Xattrs: e.Xattrs}
	if e.Mode&ext4.TypeMask == ext4.TypeRegular {
		var err error
		if i.Content, err = m.b.copy(e); err != nil {
			return nil, err
		}
	}
	m.byID[id] = i
	return i, nil
}

package oci

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/Microsoft/hcsshim/ext4/tar2ext4"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	maxHardLinks = 65000 // of one ext4 inode, sub-folders of a folder included
	ext4Slack    = 64 << 20
	ext4PerInode = 3 * 4096 // the inode, a partly used last block, and an attribute or directory block
)

// WriteExt4 writes the tree as a read-only ext4 file system. Equal trees give equal bytes: names are sorted, there is no
// random identifier, and the only times are those of the files.
func (t *Tree) WriteExt4(ctx context.Context, w io.ReadWriteSeeker) error {
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := t.writeTar(ctx, pw)
		pw.CloseWithError(err) // nil is a plain EOF
		done <- err
	}()
	size := t.bytes + int64(t.entries)*ext4PerInode + ext4Slack
	err := tar2ext4.ConvertTarToExt4(pr, w, tar2ext4.MaximumDiskSize(size))
	pr.CloseWithError(errors.Join(err, io.ErrClosedPipe)) // release the writer when the conversion gave up
	if werr := <-done; werr != nil && !errors.Is(werr, io.ErrClosedPipe) {
		err = werr
	}
	if err == nil {
		err = padInodeBitmaps(w)
	}
	if err == nil {
		return nil
	}
	if errdefs.ClassOf(err) == errdefs.Internal && !isSystem(err) {
		err = errdefs.As(errdefs.InvalidArgument, err)
	}
	return fmt.Errorf("build the image's file system: %w", err)
}

// padInodeBitmaps sets the bits behind the last inode of each group's bitmap, which the converter leaves zero: harmless
// to kernels, but e2fsck calls the file system unclean.
func padInodeBitmaps(f io.ReadWriteSeeker) error {
	const (
		block, super, descriptor = 4096, 1024, 32
		blocksPerGroup           = 8 * block
	)
	at := func(off int64, p []byte, do func([]byte) (int, error)) error {
		if _, err := f.Seek(off, io.SeekStart); err != nil {
			return err
		}
		_, err := do(p)
		return err
	}
	read := func(p []byte) (int, error) { return io.ReadFull(f, p) }
	sb := make([]byte, 256)
	if err := at(super, sb, read); err != nil {
		return err
	}
	blocks, perGroup := binary.LittleEndian.Uint32(sb[4:]), binary.LittleEndian.Uint32(sb[40:])
	groups := (int64(blocks) + blocksPerGroup - 1) / blocksPerGroup
	table := make([]byte, groups*descriptor)
	if err := at(block, table, read); err != nil {
		return err
	}
	ones := bytes.Repeat([]byte{0xff}, block-int(perGroup/8))
	for ; len(table) > 0; table = table[descriptor:] {
		bitmap := int64(binary.LittleEndian.Uint32(table[4:]))
		if err := at(bitmap*block+int64(perGroup/8), ones, f.Write); err != nil {
			return err
		}
	}
	return nil
}

type treeWriter struct {
	ctx   context.Context
	tw    *tar.Writer
	tree  *Tree
	links map[*inode]int
}

func (t *Tree) writeTar(ctx context.Context, w io.Writer) error {
	tw := &treeWriter{ctx: ctx, tw: tar.NewWriter(w), tree: t, links: map[*inode]int{}}
	if err := tw.node("./", t.root); err != nil {
		return err
	}
	return tw.tw.Close()
}

func (w *treeWriter) node(name string, n *node) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	h := &tar.Header{Typeflag: n.typ, Name: name, Mode: n.mode, Uid: n.uid, Gid: n.gid, Format: tar.FormatPAX}
	h.ModTime = n.mtime
	if n.mtime.IsZero() {
		h.ModTime = time.Unix(0, 0)
	}
	h.AccessTime, h.ChangeTime = h.ModTime, h.ModTime
	if !n.isDir() {
		if w.links[n.inode]++; w.links[n.inode] > maxHardLinks {
			return errdefs.Invalidf("the image has more than %d hard links to %q; ext4 cannot hold that", maxHardLinks, n.path)
		}
		if w.links[n.inode] > 1 {
			h.Typeflag, h.Linkname = tar.TypeLink, n.path
			return w.tw.WriteHeader(h)
		}
		n.path = name
	}
	h.PAXRecords = map[string]string{}
	for k, v := range n.xattrs {
		if converted, ok := ext4Xattr(k, v); ok {
			h.PAXRecords[xattrPrefix+k] = converted
		}
	}
	switch n.typ {
	case tar.TypeSymlink:
		h.Linkname = n.link
	case tar.TypeReg:
		h.Size = n.size
	}
	if err := w.tw.WriteHeader(h); err != nil {
		return fmt.Errorf("%q: %w", name, err)
	}
	if n.typ == tar.TypeReg {
		if _, err := io.Copy(w.tw, io.NewSectionReader(w.tree.spool, n.off, n.size)); err != nil {
			return err
		}
	}
	return w.children(name, n)
}

func (w *treeWriter) children(name string, n *node) error {
	folders := 0
	for _, child := range n.names() {
		c := n.children[child]
		full := name + child
		if c.isDir() {
			full += "/"
			if folders++; folders > maxHardLinks-2 {
				return errdefs.Invalidf("the image's folder %q has more than %d sub-folders; ext4 cannot hold that", name, maxHardLinks-2)
			}
		}
		if err := w.node(full, c); err != nil {
			return err
		}
	}
	return nil
}

// ext4Xattr turns the value of an extended attribute as system calls show it into what ext4 stores: POSIX access lists
// have a form of their own on disk. A list that cannot be read is left out.
func ext4Xattr(name, value string) (string, bool) {
	if name != "system.posix_acl_access" && name != "system.posix_acl_default" {
		return value, true
	}
	const (
		headerLen, entryLen  = 4, 8
		callVersion, version = 2, 1
		tagUser, tagGroup    = 0x02, 0x08
	)
	b := []byte(value)
	if len(b) < headerLen || (len(b)-headerLen)%entryLen != 0 || binary.LittleEndian.Uint32(b) != callVersion {
		return "", false
	}
	out := binary.LittleEndian.AppendUint32(nil, version)
	for b = b[headerLen:]; len(b) > 0; b = b[entryLen:] {
		keep := entryLen / 2 // tag and permission
		if tag := binary.LittleEndian.Uint16(b); tag == tagUser || tag == tagGroup {
			keep = entryLen // and the id
		}
		out = append(out, b[:keep]...)
	}
	return string(out), true
}

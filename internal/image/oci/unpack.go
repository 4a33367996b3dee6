package oci

import (
	"archive/tar"
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/compress"
)

const (
	whiteout       = ".wh."
	whiteoutMeta   = ".wh..wh." // aufs bookkeeping, no content
	whiteoutOpaque = ".wh..wh..opq"
	xattrPrefix    = "SCHILY.xattr."
)

// Unpack applies the layers over each other, lowest first, writing the content of their files to spool, and checks each
// layer against the digest that the configuration promises.
func (i *Image) Unpack(ctx context.Context, spool Spool, lim Limits) (*Tree, error) {
	t := &Tree{root: newDir(-1), spool: spool, lim: lim}
	for n, l := range i.layers {
		if err := t.apply(ctx, n, i.archive.open(l.blob), l, spool); err != nil {
			return nil, fmt.Errorf("unpack layer %d of %d: %w", n+1, len(i.layers), err)
		}
	}
	return t, nil
}

func (t *Tree) apply(ctx context.Context, n int, compressed io.Reader, l layer, spool io.Writer) error {
	plain, err := Decompress(bufio.NewReaderSize(compressed, 1<<18))
	if err != nil {
		return damaged("layer", err)
	}
	defer plain.Close()
	sum := sha256.New()
	// The tar around the files costs at most a few blocks an entry; twice the room for files is beyond any real layer.
	limit := 2*t.lim.Unpacked + 1<<20
	src := &limited{ctx: ctx, r: io.TeeReader(plain, sum), left: limit, limit: limit, what: "a layer"}
	tr := tar.NewReader(src)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return damaged("layer", err)
		}
		if err := t.entry(n, h, tr, spool); err != nil {
			return err
		}
	}
	if _, err := io.Copy(io.Discard, src); err != nil {
		return damaged("layer", err)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); l.diffID.Algorithm != "sha256" || got != l.diffID.Hex {
		return errdefs.DataLossf("its content has the digest sha256:%s, the image promises %s: the archive is damaged", got, l.diffID)
	}
	return nil
}

// entry applies one entry of a layer.
func (t *Tree) entry(layer int, h *tar.Header, content io.Reader, spool io.Writer) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	parts, err := layerPath(h.Name)
	if err != nil {
		return err
	}
	xattrs, size := attributes(h.PAXRecords)
	if err := t.count(len(h.Name) + len(h.Linkname) + size); err != nil {
		return err
	}
	if len(parts) > 0 {
		if base, dir := parts[len(parts)-1], parts[:len(parts)-1]; strings.HasPrefix(base, whiteout) {
			switch {
			case base == whiteoutOpaque:
				t.opaque(dir, layer)
			case strings.HasPrefix(base, whiteoutMeta):
			case base == whiteout || base == whiteout+"." || base == whiteout+"..":
				return errdefs.Invalidf("a layer holds the whiteout %q of no name: refused", h.Name)
			default:
				t.hide(append(append([]string{}, dir...), strings.TrimPrefix(base, whiteout)), layer)
			}
			return nil
		}
	}
	switch h.Typeflag {
	case tar.TypeLink:
		return t.hardLink(layer, h, parts)
	case tar.TypeChar, tar.TypeBlock:
		// The guest's devtmpfs makes its devices. What was there before is gone all the same.
		t.devices++
		t.remove(parts)
		return nil
	}
	n, err := newNode(layer, h, xattrs)
	if err != nil {
		return err
	}
	if h.Typeflag == tar.TypeReg || h.Typeflag == tar.TypeGNUSparse {
		if err := t.store(n.inode, h, content, spool); err != nil {
			return err
		}
	}
	return t.set(parts, n)
}

func newNode(layer int, h *tar.Header, xattrs map[string]string) (*node, error) {
	n := &node{layer: layer, inode: &inode{typ: h.Typeflag, mode: h.Mode & 0o7777, uid: h.Uid, gid: h.Gid, mtime: h.ModTime, xattrs: xattrs}}
	if h.Uid < 0 || h.Gid < 0 || h.Uid >= math.MaxUint32 || h.Gid >= math.MaxUint32 {
		return nil, errdefs.Invalidf("a layer holds %q with the owner %d:%d, which Linux cannot have", h.Name, h.Uid, h.Gid)
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeFifo:
	case tar.TypeGNUSparse:
		n.typ = tar.TypeReg
	case tar.TypeDir:
		n.children = map[string]*node{}
	case tar.TypeSymlink:
		if h.Linkname == "" || len(h.Linkname) > maxLink || strings.ContainsRune(h.Linkname, 0) {
			return nil, errdefs.Invalidf("a layer holds the symbolic link %q with a target of %d bytes: refused", h.Name, len(h.Linkname))
		}
		n.link = h.Linkname
	default:
		return nil, errdefs.Invalidf("a layer holds %q of the unknown type %q: refused", h.Name, h.Typeflag)
	}
	return n, nil
}

func (t *Tree) store(n *inode, h *tar.Header, content io.Reader, spool io.Writer) error {
	if h.Size > t.lim.File {
		return errdefs.Exhaustedf("the file %q has %d bytes; the limit for one file of an image is %d", h.Name, h.Size, t.lim.File)
	}
	if t.bytes+h.Size > t.lim.Unpacked {
		return errdefs.Exhaustedf("the image unpacks to more than the limit of %d bytes", t.lim.Unpacked)
	}
	n.off, n.size = t.bytes, h.Size
	written, err := io.Copy(spool, content)
	t.bytes += written
	switch {
	case err != nil:
		return damaged("layer", err)
	case written != h.Size:
		return errdefs.DataLossf("the file %q has %d bytes instead of %d: the archive is damaged", h.Name, written, h.Size)
	}
	return nil
}

// hardLink gives a name the inode of another. The target may lie in a lower layer.
func (t *Tree) hardLink(layer int, h *tar.Header, parts []string) error {
	target, err := layerPath(h.Linkname)
	if err != nil {
		return err
	}
	old := t.lookup(target)
	switch {
	case old == nil:
		return errdefs.Invalidf("a layer holds %q as a hard link to %q, which does not exist: refused", h.Name, h.Linkname)
	case old.isDir():
		return errdefs.Invalidf("a layer holds %q as a hard link to the folder %q: refused", h.Name, h.Linkname)
	case len(parts) == 0:
		return errdefs.Invalidf("a layer replaces the root folder by a hard link: refused")
	case path.Join(parts...) == path.Join(target...):
		return nil
	}
	return t.set(parts, &node{inode: old.inode, layer: layer})
}

// remove forgets a name whatever layer set it.
func (t *Tree) remove(parts []string) {
	if len(parts) == 0 {
		return
	}
	if dir, err := t.folder(parts[:len(parts)-1], 0, false); err == nil && dir != nil {
		delete(dir.children, parts[len(parts)-1])
	}
}

// attributes picks the extended attributes that mean something inside a guest. Those of overlayfs would let an image
// rearrange the guest's own root, so they stay out.
func attributes(pax map[string]string) (map[string]string, int) {
	var out map[string]string
	size := 0
	for k, v := range pax {
		name, ok := strings.CutPrefix(k, xattrPrefix)
		if !ok || strings.HasPrefix(name, "trusted.overlay.") || strings.HasPrefix(name, "user.overlay.") {
			continue
		}
		if out == nil {
			out = map[string]string{}
		}
		out[name] = v
		size += len(name) + len(v)
	}
	return out, size
}

// Decompress undoes what compress.Reader knows and passes anything else through.
func Decompress(r *bufio.Reader) (io.ReadCloser, error) {
	plain, _, err := compress.Reader(r)
	return plain, err
}

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
	"sync/atomic"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ext4"
	"cocoonstack.io/cocoon/internal/image/compress"
)

const (
	whiteout       = ".wh."
	whiteoutMeta   = ".wh..wh." // aufs bookkeeping without content
	whiteoutOpaque = ".wh..wh..opq"
	xattrPrefix    = "SCHILY.xattr."
	maxTreeMeta    = 256 << 20 // bytes of all names, link targets and attributes of an image
)

// Budget is the shared limit for all layers of one image. Several goroutines may use it.
type Budget struct {
	lim           Limits
	unpacked      atomic.Int64
	entries, meta atomic.Int64
}

// NewBudget returns a budget with the limits lim.
func NewBudget(lim Limits) *Budget { return &Budget{lim: lim} }

// entry counts one more entry with that many bytes of names and attributes.
func (b *Budget) entry(meta int) error {
	if b.entries.Add(1) > int64(b.lim.Entries) || b.meta.Add(int64(meta)) > maxTreeMeta {
		return errdefs.Exhaustedf("the image has more than %d files, or more than %d bytes of names and attributes: refused", b.lim.Entries, maxTreeMeta)
	}
	return nil
}

func (b *Budget) bytes(n int64) error {
	if b.unpacked.Add(n) > b.lim.Unpacked {
		return errdefs.Exhaustedf("the image unpacks to more than the limit of %d bytes", b.lim.Unpacked)
	}
	return nil
}

// Target is the destination of a layer.
type Target struct {
	FS     ext4.File                             // the file system for overlayfs
	Recipe io.Writer                             // what Restore needs in addition to rebuild the layer; nil: not kept
	Below  func(context.Context) (*Stack, error) // the layers below, requested only when the layer depends on them
	Budget *Budget
}

// Layer describes a built layer.
type Layer struct {
	DiffID    string // sha256:<hex> of the uncompressed tar
	Dependent bool   // the file system is valid only on top of the layers that were below
	Size      int64  // bytes of the file system
	TarSize   int64  // bytes of the uncompressed tar
}

// build is a layer that is being built.
type build struct {
	w      *ext4.Writer
	budget *Budget
	root   *node
	links  []pending
	moves  []move
}

// pending is a hard link to a file that the layer itself does not hold.
type pending struct {
	name   string
	target []string
	inode  *ext4.Inode
}

// BuildLayer reads a layer, compressed or not, to its end and writes it as a read-only file system with whiteouts in the
// form of overlayfs. Content is written as it arrives. want is the digest from the image, sha256:<hex>. Equal layers give
// equal bytes.
// Errors: InvalidArgument for hostile content, DataLoss for damaged or other content, ResourceExhausted beyond a limit;
// errors of r and of the files are returned unchanged.
func BuildLayer(ctx context.Context, r io.Reader, want string, to Target) (Layer, error) {
	plain, _, err := compress.Reader(bufio.NewReaderSize(r, 1<<18))
	if err != nil {
		return Layer{}, damaged("layer", err)
	}
	defer plain.Close()
	// The tar adds at most a few blocks per entry to the files. No real layer needs more than twice the space of its files.
	limit := 2*to.Budget.lim.Unpacked + 1<<20
	fast := readAhead(plain)
	defer fast.stop()
	src := &limited{ctx: ctx, r: fast, left: limit, limit: limit, what: "a layer"}
	tape, err := newTape(src, to.Recipe)
	if err != nil {
		return Layer{}, err
	}
	b := &build{w: ext4.NewWriter(to.FS), budget: to.Budget, root: newFolder(false)}
	tr := tar.NewReader(tape)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return Layer{}, damaged("layer", err)
		}
		if err := b.entry(h, tr, tape); err != nil {
			return Layer{}, err
		}
	}
	if _, err := io.Copy(io.Discard, tape); err != nil {
		return Layer{}, damaged("layer", err)
	}
	if err := tape.close(); err != nil {
		return Layer{}, err
	}
	sum := tape.sum.Sum(nil)
	l := Layer{DiffID: "sha256:" + hex.EncodeToString(sum), TarSize: tape.n}
	if l.DiffID != want {
		return l, errdefs.DataLossf("its content has the digest %s, expected %s: it is damaged", l.DiffID, want)
	}
	return l, b.finish(ctx, to, &l, [sha256.Size]byte(sum))
}

func (b *build) finish(ctx context.Context, to Target, l *Layer, sum [sha256.Size]byte) (err error) {
	if l.Dependent = len(b.links) > 0 || b.root.opaque || b.root.dependent(); l.Dependent {
		below, err := to.Below(ctx)
		if err == nil {
			err = b.borrow(below)
		}
		if err == nil {
			err = b.settle(below)
		}
		if err != nil {
			return err
		}
	} else if err := b.merge(b.root, nil, nil); err != nil { // removes whiteouts in opaque folders
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if l.Size, err = b.w.Finish(b.root.tree(), [16]byte(sum[:16])); err != nil {
		return fmt.Errorf("build the layer's file system: %w", err)
	}
	return nil
}

// entry adds one entry of a layer.
func (b *build) entry(h *tar.Header, content io.Reader, tape *tape) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	parts, err := layerPath(h.Name)
	if err != nil {
		return err
	}
	xattrs, size := attributes(h.PAXRecords)
	if err := b.budget.entry(len(h.Name) + len(h.Linkname) + size); err != nil {
		return err
	}
	if len(parts) > 0 {
		if base, dir := parts[len(parts)-1], parts[:len(parts)-1]; strings.HasPrefix(base, whiteout) {
			switch {
			case base == whiteoutOpaque:
				return b.conceal(dir)
			case strings.HasPrefix(base, whiteoutMeta):
				return nil
			case base == whiteout || base == whiteout+"." || base == whiteout+"..":
				return errdefs.Invalidf("a layer holds the whiteout %q without a name: refused", h.Name)
			}
			return b.hide(append(append([]string{}, dir...), strings.TrimPrefix(base, whiteout)))
		}
	}
	switch h.Typeflag {
	case tar.TypeLink:
		return b.hardLink(h, parts)
	case tar.TypeChar, tar.TypeBlock:
		return b.clear(parts) // the guest's devtmpfs makes its devices
	}
	n, err := newNode(h, xattrs)
	if err != nil {
		return err
	}
	if n.Mode&ext4.TypeMask == ext4.TypeRegular {
		if n.Content, err = b.store(h, content, tape); err != nil {
			return err
		}
	}
	return b.set(parts, n)
}

func newNode(h *tar.Header, xattrs map[string]string) (*node, error) {
	if h.Uid < 0 || h.Gid < 0 || h.Uid >= math.MaxUint32 || h.Gid >= math.MaxUint32 {
		return nil, errdefs.Invalidf("a layer holds %q with the owner %d:%d, which Linux cannot have", h.Name, h.Uid, h.Gid)
	}
	n := &node{Inode: &ext4.Inode{Mode: uint16(h.Mode & 0o7777), UID: uint32(h.Uid), GID: uint32(h.Gid), ModTime: h.ModTime, Xattrs: xattrs}}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		n.Mode |= ext4.TypeRegular
	case tar.TypeFifo:
		n.Mode |= ext4.TypeFIFO
	case tar.TypeDir:
		n.Mode |= ext4.TypeFolder
		n.children = map[string]*node{}
	case tar.TypeSymlink:
		n.Mode |= ext4.TypeSymlink
		if h.Linkname == "" || len(h.Linkname) > maxLink || strings.ContainsRune(h.Linkname, 0) {
			return nil, errdefs.Invalidf("a layer holds the symbolic link %q with a target of %d bytes: refused", h.Name, len(h.Linkname))
		}
		n.Link = h.Linkname
	default:
		return nil, errdefs.Invalidf("a layer holds %q of the unknown type %q: refused", h.Name, h.Typeflag)
	}
	return n, nil
}

func (b *build) store(h *tar.Header, content io.Reader, tape *tape) (ext4.Extent, error) {
	if h.Size > b.budget.lim.File {
		return ext4.Extent{}, errdefs.Exhaustedf("the file %q has %d bytes; the limit for one file of an image is %d", h.Name, h.Size, b.budget.lim.File)
	}
	if err := b.budget.bytes(h.Size); err != nil {
		return ext4.Extent{}, err
	}
	plain := h.Typeflag == tar.TypeReg && !sparse(h)
	if plain {
		tape.pause()
	}
	e, err := b.w.Content(content, h.Size)
	if err != nil {
		return e, damaged("layer", err)
	}
	if plain {
		tape.resume(e)
	}
	return e, tape.err
}

// sparse reports whether the content of h is stored in the tar in a sparse form.
func sparse(h *tar.Header) bool {
	_, old := h.PAXRecords["GNU.sparse.map"]
	_, major := h.PAXRecords["GNU.sparse.major"]
	return old || major || h.PAXRecords["GNU.sparse.size"] != "" || h.PAXRecords["GNU.sparse.realsize"] != ""
}

// hardLink makes a name share the inode of another name, which may be in a lower layer.
func (b *build) hardLink(h *tar.Header, parts []string) error {
	target, err := layerPath(h.Linkname)
	if err != nil {
		return err
	}
	old := b.lookup(target)
	switch {
	case len(parts) == 0:
		return errdefs.Invalidf("a layer replaces the root folder by a hard link: refused")
	case old != nil && old.whiteout:
		return errdefs.Invalidf("a layer holds %q as a hard link to %q, which does not exist: refused", h.Name, h.Linkname)
	case old != nil && old.IsFolder():
		return errdefs.Invalidf("a layer holds %q as a hard link to the folder %q: refused", h.Name, h.Linkname)
	case path.Join(parts...) == path.Join(target...):
		return nil
	case old == nil:
		i := &ext4.Inode{Mode: ext4.TypeRegular}
		b.links = append(b.links, pending{name: h.Name, target: target, inode: i})
		return b.set(parts, &node{Inode: i})
	}
	return b.set(parts, &node{Inode: old.Inode})
}

// attributes selects the extended attributes that have a meaning inside a guest. It leaves out those of overlayfs: with
// them, an image could rearrange the guest's own root.
func attributes(pax map[string]string) (map[string]string, int) {
	var out map[string]string
	size := 0
	for k, v := range pax {
		name, ok := strings.CutPrefix(k, xattrPrefix)
		if !ok || strings.HasPrefix(name, "trusted.overlay.") || strings.HasPrefix(name, "user.overlay.") {
			continue
		}
		if v, ok = ext4Xattr(name, v); !ok {
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

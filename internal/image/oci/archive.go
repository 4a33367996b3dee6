// Package oci reads container images from archives (OCI image layout, docker save) and turns each layer into its own
// read-only file system, without mounts and without privileges. overlayfs stacks these file systems in the guest.
//
// It trusts nothing it reads: every blob is checked against its digest, every size against a limit. It does not keep
// images: the store decides where the result goes, under which name and for how long.
package oci

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Limits limit the resources that one archive may use. All are inclusive.
type Limits struct {
	Archive  int64 // bytes of the archive, decompressed
	Unpacked int64 // bytes of all files of all layers, unpacked
	File     int64 // bytes of one file of a layer
	Entries  int   // entries of all layers
}

// DefaultLimits are generous for real images, and small enough to refuse a bomb before it fills a typical disk.
func DefaultLimits() Limits {
	return Limits{Archive: 64 << 30, Unpacked: 64 << 30, File: 32 << 30, Entries: 2 << 20}
}

const (
	maxBlobs    = 100_000  // entries of the outer archive
	maxMetadata = 8 << 20  // bytes of one index, manifest or configuration
	maxNames    = 64 << 20 // bytes of all names in the outer archive
)

// Spool is a scratch file of the caller: written once from the start, then read at any offset.
type Spool interface {
	io.Writer
	io.ReaderAt
}

// Archive is an archive that was read to its end. Its content is in the spool that Read got.
type Archive struct {
	spool io.ReaderAt
	blobs map[string]blob
	links map[string]string // old docker save stores a repeated layer as a link to the first one
	ended bool              // the archive has its end mark, so it was not cut between two entries
}

type blob struct {
	off, size int64
	sum       [sha256.Size]byte
}

func (b blob) digest() string { return "sha256:" + hex.EncodeToString(b.sum[:]) }

// IsArchive reports whether head is the start of a tar archive. head must have at least 512 bytes.
func IsArchive(head []byte) bool {
	const block, field, width = 512, 148, 8
	if len(head) < block {
		return false
	}
	want, err := strconv.ParseInt(strings.Trim(string(head[field:field+width]), " \x00"), 8, 64)
	if err != nil {
		return false
	}
	sum := int64(width * ' ')
	for i, b := range head[:block] {
		if i < field || i >= field+width {
			sum += int64(b)
		}
	}
	return sum == want
}

// Read reads the archive from r, the decompressed tar stream, to its end.
// Errors: InvalidArgument for hostile content, DataLoss for a truncated or damaged archive, ResourceExhausted beyond a limit.
func Read(ctx context.Context, r io.Reader, spool Spool, lim Limits) (*Archive, error) {
	a := &Archive{spool: spool, blobs: map[string]blob{}, links: map[string]string{}}
	src := &limited{ctx: ctx, r: r, left: lim.Archive, what: "the archive", limit: lim.Archive}
	tr := tar.NewReader(src)
	var off, names, last int64 // last is the end of the last entry with its padding
	for n := 0; ; n++ {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, damaged("archive", err)
		}
		if names += int64(len(h.Name) + len(h.Linkname)); n >= maxBlobs || names > maxNames {
			return nil, errdefs.Invalidf("the archive has too many entries to be an image (more than %d)", n)
		}
		size, err := a.add(h, tr, spool, off)
		if err != nil {
			return nil, err
		}
		off += size
		last = (src.read + 511) &^ 511
	}
	if _, err := io.Copy(io.Discard, src); err != nil { // the compression format has its checksums at the very end
		return nil, damaged("archive", err)
	}
	a.ended = src.read > last
	return a, nil
}

func (a *Archive) add(h *tar.Header, content io.Reader, spool io.Writer, off int64) (int64, error) {
	name, err := archiveName(h.Name)
	if err != nil {
		return 0, err
	}
	switch h.Typeflag {
	case tar.TypeDir, tar.TypeXGlobalHeader:
		return 0, nil
	case tar.TypeReg, tar.TypeSymlink, tar.TypeLink:
	default:
		return 0, errdefs.Invalidf("the archive holds %q, which is neither file nor folder: not an image", h.Name)
	}
	if _, dup := a.blobs[name]; dup || a.links[name] != "" {
		return 0, errdefs.Invalidf("the archive holds %q twice: refused, because readers would disagree about it", name)
	}
	if h.Typeflag != tar.TypeReg {
		target := h.Linkname
		if h.Typeflag == tar.TypeSymlink {
			target = path.Join(path.Dir(name), h.Linkname)
		}
		if target, err = archiveName(target); err != nil || path.IsAbs(h.Linkname) {
			return 0, errdefs.Invalidf("the archive holds a link %q that leads outside of it (to %q)", name, h.Linkname)
		}
		a.links[name] = target
		return 0, nil
	}
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(spool, sum), content)
	if err != nil {
		return 0, damaged("archive", err)
	}
	b := blob{off: off, size: n}
	sum.Sum(b.sum[:0])
	a.blobs[name] = b
	return n, nil
}

// archiveName cleans the name of an entry of the outer archive. Names that point outside are hostile.
func archiveName(name string) (string, error) {
	clean := path.Clean(name)
	if path.IsAbs(name) || clean == ".." || strings.HasPrefix(clean, "../") || strings.ContainsRune(name, 0) {
		return "", errdefs.Invalidf("the archive holds %q, which points outside of it: refused", name)
	}
	return clean, nil
}

// find returns the entry called name. It follows at most a few links.
func (a *Archive) find(name string) (blob, bool) {
	name = path.Clean(name)
	for range 8 {
		if b, ok := a.blobs[name]; ok {
			return b, true
		}
		target, ok := a.links[name]
		if !ok {
			break
		}
		name = target
	}
	return blob{}, false
}

func (a *Archive) open(b blob) *io.SectionReader { return io.NewSectionReader(a.spool, b.off, b.size) }

// metadata reads a whole small blob.
func (a *Archive) metadata(b blob, what string) (*bytes.Reader, error) {
	if b.size > maxMetadata {
		return nil, errdefs.Invalidf("%s is %d bytes long; at most %d are allowed", what, b.size, maxMetadata)
	}
	buf := make([]byte, b.size)
	if _, err := io.ReadFull(a.open(b), buf); err != nil {
		return nil, fmt.Errorf("read %s back: %w", what, err)
	}
	return bytes.NewReader(buf), nil
}

// limited reads until its limit is used up or its context ends.
type limited struct {
	ctx   context.Context
	r     io.Reader
	left  int64
	limit int64
	what  string
	read  int64
}

func (l *limited) Read(p []byte) (int, error) {
	if err := l.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := l.r.Read(p)
	if l.left -= int64(n); l.left < 0 {
		return 0, errdefs.Exhaustedf("%s is larger than the limit of %d bytes", l.what, l.limit)
	}
	l.read += int64(n)
	return n, err
}

// damaged turns an error of a decompressor or tar reader into DataLoss. Errors that already have a class, and errors of
// the disk that we write to, stay as they are.
func damaged(what string, err error) error {
	switch {
	case errdefs.ClassOf(err) != errdefs.Internal || isSystem(err):
		return fmt.Errorf("read the %s: %w", what, err)
	case errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF):
		return errdefs.DataLossf("the %s is truncated: it ends in the middle of an entry; fetch it again", what)
	}
	return errdefs.DataLossf("the %s is damaged (%w); fetch it again", what, err)
}

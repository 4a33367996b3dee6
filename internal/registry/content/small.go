package content

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/objects"
)

// small is the largest blob that is handled in memory, in bytes: nearly all blobs of snapshots.
const small = 4 << 20

var pieces = sync.Pool{New: func() any { b := make([]byte, small); return &b }}

// putSmall stores a blob that fits in memory: it writes nothing before the digest is verified.
func (c *Content) putSmall(ctx context.Context, repo string, d digest.Digest, r io.Reader, length int) error {
	buf := pieces.Get().(*[]byte)
	defer pieces.Put(buf)
	data := (*buf)[:length]
	if n, err := io.ReadFull(r, data); errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return code(SizeInvalid, errdefs.Invalidf("%d bytes were announced and %d arrived", length, n))
	} else if err != nil {
		return code(BlobUploadInvalid, errdefs.Unavailablef("the body of the request broke off after %d bytes: %w", n, err))
	}
	if n, _ := io.ReadFull(r, make([]byte, 1)); n > 0 {
		return code(SizeInvalid, errdefs.Invalidf("%d bytes were announced and more arrived", length))
	}
	if got := digest.FromBytes(data); got != d {
		return code(DigestInvalid, errdefs.Invalidf("the %d bytes that arrived have the digest %s, not %s", length, got, d))
	}
	if err := c.reserve(int64(length)); err != nil {
		return err
	}
	defer c.staged.Add(-int64(length))
	path := filepath.Join(c.store.Staging(), strings.ToLower(rand.Text()))
	if err := writeFile(path, data); err != nil {
		return objects.DiskFull(fmt.Errorf("store blob %s: %w", d, err))
	}
	if err := c.take(ctx, repo, d, path, int64(length)); err != nil {
		_ = os.Remove(path) // taken or not; the next start removes leftovers
		return err
	}
	return nil
}

// writeFile creates a file and makes the kernel begin its write-back to disk.
func writeFile(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		_ = unix.SyncFileRange(int(f.Fd()), 0, int64(len(data)), unix.SYNC_FILE_RANGE_WRITE) // only a hint
	}
	if err = errors.Join(err, f.Close()); err != nil {
		_ = os.Remove(path)
	}
	return err
}

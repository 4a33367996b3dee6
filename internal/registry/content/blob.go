package content

import (
	"context"
	"hash"
	"io"

	"github.com/opencontainers/go-digest"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/registry/objects"
)

func blobUnknown(repo string, d digest.Digest) error {
	return code(BlobUnknown, errdefs.NotFoundf("repository %s has no blob %s", repo, d))
}

// Blob describes a blob of a repository. The blob is not collected for the grace period.
func (c *Content) Blob(ctx context.Context, repo string, d digest.Digest) (objects.Info, error) {
	defer c.leases.pin(d)()
	return c.blob(ctx, repo, d)
}

func (c *Content) blob(ctx context.Context, repo string, d digest.Digest) (info objects.Info, err error) {
	if _, err = c.store.Stat(ctx, linkKey(repo, d)); err == nil {
		info, err = c.statBlob(ctx, d)
	}
	if errdefs.IsNotFound(err) {
		err = blobUnknown(repo, d)
	}
	return info, err
}

// OpenBlob opens a blob of a repository for reading.
func (c *Content) OpenBlob(ctx context.Context, repo string, d digest.Digest) (f io.ReadSeekCloser, info objects.Info, err error) {
	defer c.leases.pin(d)()
	if _, err = c.store.Stat(ctx, linkKey(repo, d)); err == nil {
		f, info, err = c.openBlob(ctx, d)
	}
	if errdefs.IsNotFound(err) {
		err = blobUnknown(repo, d)
	}
	return f, info, err
}

func (c *Content) openBlob(ctx context.Context, d digest.Digest) (f io.ReadSeekCloser, info objects.Info, err error) {
	err = c.find(ctx, d, func(key string) (err error) {
		f, info, err = c.store.Open(ctx, key)
		return err
	})
	return f, info, err
}

// Verifying wraps a blob's reader, so that a caller that reads all of a damaged blob never gets the last bytes: the
// read fails instead, and the blob is moved to quarantine. Partial reads are not verified.
func (c *Content) Verifying(ctx context.Context, f io.ReadSeekCloser, d digest.Digest, info objects.Info) io.ReadSeekCloser {
	return &verifying{ReadSeekCloser: f, digest: d, size: info.Size, sum: d.Algorithm().Hash(), damaged: func() error {
		return c.corruptedBlob(context.WithoutCancel(ctx), d, info)
	}}
}

type verifying struct {
	io.ReadSeekCloser
	digest  digest.Digest
	size    int64
	pos     int64 // -1: not read from the beginning
	sum     hash.Hash
	damaged func() error
}

func (v *verifying) Seek(offset int64, whence int) (int64, error) {
	n, err := v.ReadSeekCloser.Seek(offset, whence)
	v.pos = -1
	if n == 0 {
		v.pos = 0
		v.sum.Reset()
	}
	return n, err
}

func (v *verifying) Read(p []byte) (int, error) {
	n, err := v.ReadSeekCloser.Read(p)
	if v.pos < 0 {
		return n, err
	}
	v.sum.Write(p[:n])
	v.pos += int64(n)
	if (v.pos >= v.size || err == io.EOF) && digest.NewDigest(v.digest.Algorithm(), v.sum) != v.digest { //nolint:errorlint // io.Reader returns io.EOF itself
		v.pos = -1
		return 0, v.damaged()
	}
	return n, err
}

// Mount adds the blob of another repository to a repository. Preconditions: the client may pull from the other one.
func (c *Content) Mount(ctx context.Context, from, to string, d digest.Digest) error {
	defer c.leases.pin(d)()
	if _, err := c.blob(ctx, from, d); err != nil {
		return err
	}
	return c.store.Write(ctx, linkKey(to, d), nil)
}

// RemoveBlob removes a blob from a repository. Its bytes are collected once no repository has it.
func (c *Content) RemoveBlob(ctx context.Context, repo string, d digest.Digest) error {
	if _, err := c.Blob(ctx, repo, d); err != nil {
		return err
	}
	if err := c.store.Remove(ctx, linkKey(repo, d)); err != nil {
		return err
	}
	return c.store.Sync(ctx)
}

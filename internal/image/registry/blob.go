package registry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// blob reads one blob. When the connection breaks or stalls, it resumes at the same byte. If the content does not match
// the digest, the last Read fails.
type blob struct {
	r        *remote
	ctx      context.Context //nolint:containedctx // of the one transfer that this value is
	d        v1.Descriptor
	progress func(int64)

	body   io.ReadCloser
	cancel context.CancelFunc
	watch  *time.Timer
	sum    hash.Hash
	at     int64
	fails  int // in a row, without a byte between them
	err    error
}

const maxFails = 4

func (r *remote) blob(ctx context.Context, d v1.Descriptor) *blob {
	return &blob{r: r, ctx: ctx, d: d, sum: sha256.New()}
}

func (b *blob) Read(p []byte) (int, error) {
	for b.err == nil {
		if b.body == nil {
			if b.at == b.d.Size && b.at > 0 {
				b.err = b.verify()
				break
			}
			if b.err = b.open(); b.err != nil {
				break
			}
		}
		b.watch.Reset(b.r.c.cfg.Stall)
		n, err := b.body.Read(p)
		if int64(n) > b.d.Size-b.at {
			b.err = errdefs.DataLossf("the blob %s is longer than the %d bytes its descriptor says", b.d.Digest, b.d.Size)
			break
		}
		if n > 0 {
			b.sum.Write(p[:n])
			b.at, b.fails = b.at+int64(n), 0
			if b.progress != nil {
				b.progress(int64(n))
			}
		}
		if err != nil {
			b.hangUp()
			if b.at == b.d.Size && errors.Is(err, io.EOF) {
				b.err = b.verify()
			} else if b.at < b.d.Size {
				b.pause(err)
			}
		}
		if n > 0 {
			return n, nil
		}
	}
	b.hangUp()
	return 0, b.err
}

func (b *blob) verify() error {
	if got := "sha256:" + hex.EncodeToString(b.sum.Sum(nil)); got != b.d.Digest.String() {
		return errdefs.DataLossf("the blob %s has the digest %s: %s serves something else", b.d.Digest, got, b.r.repo.RegistryStr())
	}
	return io.EOF
}

// pause records that a transfer broke, and waits before the next attempt.
func (b *blob) pause(err error) {
	if b.ctx.Err() != nil {
		b.err = b.ctx.Err()
		return
	}
	if b.fails++; b.fails >= maxFails {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			b.err = errdefs.DataLossf("the blob %s is truncated: %s sends %d of %d bytes", b.d.Digest, b.r.repo.RegistryStr(), b.at, b.d.Size)
			return
		}
		b.err = errdefs.Unavailablef("the transfer of %s from %s breaks at %d of %d bytes: %w", b.d.Digest, b.r.repo.RegistryStr(), b.at, b.d.Size, bare(err))
		return
	}
	t := time.NewTimer(b.r.c.cfg.Backoff << (b.fails - 1))
	defer t.Stop()
	select {
	case <-t.C:
	case <-b.ctx.Done():
		b.err = b.ctx.Err()
	}
}

// open starts or resumes the transfer.
func (b *blob) open() error {
	ctx, cancel := context.WithCancel(b.ctx)
	header := http.Header{}
	if b.at > 0 {
		header.Set("Range", fmt.Sprintf("bytes=%d-", b.at))
	}
	resp, err := b.r.do(ctx, http.MethodGet, "blobs/"+b.d.Digest.String(), header)
	if err != nil {
		cancel()
		return err
	}
	switch {
	case resp.StatusCode == http.StatusPartialContent && b.at > 0 && resp.Header.Get("Content-Range") != "" && !startsAt(resp, b.at):
		err = errdefs.DataLossf("%s answers a request for bytes from %d of %s with others", resp.Request.URL.Host, b.at, b.d.Digest)
	case resp.StatusCode == http.StatusPartialContent && b.at > 0:
	case resp.StatusCode == http.StatusOK: // the whole blob, when ranges are not supported: skip what we have
		if b.at > 0 {
			watch := time.AfterFunc(b.r.c.cfg.Stall, cancel)
			_, err = io.CopyN(io.Discard, resp.Body, b.at)
			watch.Stop()
			if err != nil {
				err = errdefs.Unavailablef("the transfer of %s from %s cannot be continued: %w", b.d.Digest, resp.Request.URL.Host, bare(err))
			}
		}
	default:
		err = explain(resp, "blob "+b.d.Digest.String())
	}
	if err != nil {
		resp.Body.Close()
		cancel()
		return err
	}
	b.body, b.cancel, b.watch = resp.Body, cancel, time.AfterFunc(b.r.c.cfg.Stall, cancel)
	return nil
}

func startsAt(resp *http.Response, at int64) bool {
	var from int64
	_, err := fmt.Sscanf(resp.Header.Get("Content-Range"), "bytes %d-", &from)
	return err == nil && from == at
}

func (b *blob) hangUp() {
	if b.body == nil {
		return
	}
	b.watch.Stop()
	b.body.Close()
	b.cancel()
	b.body = nil
}

// Close ends the transfer.
func (b *blob) Close() error {
	b.hangUp()
	if b.err == nil {
		b.err = io.ErrClosedPipe
	}
	return nil
}

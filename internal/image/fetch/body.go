package fetch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	// chunk is the read size when the caller does not choose one.
	chunk = 1 << 20
	// progress is the number of bytes that a connection must deliver before earlier failures no longer count.
	progress = 64 << 10
)

var (
	errStalled = errors.New("the server sent no data for too long")
	errClosed  = errors.New("the body was closed")
)

// Body is a file that is being fetched. Reads continue after lost connections. io.EOF comes only after all bytes were read
// and match the requested digest: a caller that stores the bytes must read up to io.EOF, or call Drain.
//
// It is for one goroutine. To end a blocked read, end the context of Get. It must be closed.
type Body struct {
	s      *session
	ctx    context.Context // of Get: the body is a running request
	cancel func()
	from   location
	want   string // hex digits of the digest, "" if any is accepted

	conn    io.ReadCloser // the response that is read; nil when there is none
	hangUp  context.CancelCauseFunc
	watch   *time.Timer // closes the connection when a read stalls
	tries   int         // requests in a row that delivered almost nothing
	pauses  *backoff.ExponentialBackOff
	arrived int64 // bytes from this connection

	fetched bool // a response with content was accepted once
	same    bool // the response was: not modified
	off     int64
	size    int64 // -1: unknown
	now     validators
	hash    hasher
	sum     string
	err     error // returned by all further reads
}

// validators identify a version of a file.
type validators struct{ etag, modified string }

// strong is the validator for If-Range, "" if there is none.
func (v validators) strong() string {
	if v.etag != "" && !strings.HasPrefix(v.etag, "W/") {
		return v.etag
	}
	return v.modified
}

// NotModified reports that the server has nothing newer than the version named in the request. Such a body cannot be read.
func (b *Body) NotModified() bool { return b.same }

// Size is the number of bytes served, -1 if the server does not say. It may change until the first byte was read.
func (b *Body) Size() int64 { return b.size }

// ETag is the server's ETag, "" if there is none.
func (b *Body) ETag() string { return b.now.etag }

// LastModified is the server's header as it was sent, "" if there is none.
func (b *Body) LastModified() string { return b.now.modified }

// Sum is "sha256:<hex>" of the bytes as served, after all of them were read; "" before.
func (b *Body) Sum() string { return b.sum }

// Read implements io.Reader.
func (b *Body) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for b.err == nil {
		if b.size >= 0 && int64(len(p)) > b.size-b.off {
			p = p[:max(b.size-b.off, 1)] // one byte more, to detect a body that is too long
		}
		b.watch.Reset(b.s.c.opts.Stall)
		n, err := b.conn.Read(p)
		b.watch.Stop()
		if n > 0 {
			b.take(p[:n])
			if b.err != nil {
				break
			}
			return n, nil // an error of this read returns at the next one
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF) && (b.size < 0 || b.off == b.size):
			b.err = b.finish()
		default:
			b.err = b.resume(err)
		}
	}
	return 0, b.err
}

// take counts the received bytes.
func (b *Body) take(p []byte) {
	b.off += int64(len(p))
	b.arrived += int64(len(p))
	if b.size >= 0 && b.off > b.size {
		b.err = errdefs.Unavailablef("fetch %s: the server sends more than it announced; try again", b.from)
		return
	}
	b.hash.write(p)
}

// finish handles the end of the file: io.EOF, or an error if the digest is not the requested one.
func (b *Body) finish() error {
	b.disconnect(nil)
	sum := b.hash.sum()
	if b.want != "" && sum != b.want {
		return mismatch(b.from, b.want, sum)
	}
	b.sum = "sha256:" + sum
	return io.EOF
}

func mismatch(l location, want, got string) error {
	return errdefs.DataLossf("fetch %s: digest mismatch: the server has sha256:%s, expected sha256:%s", l, got, want)
}

// WriteTo implements io.WriterTo with large reads.
func (b *Body) WriteTo(w io.Writer) (int64, error) {
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{b}, make([]byte, chunk)) // neither may choose the size of reads
}

// Drain reads the rest. It returns nil if the whole file was read and is the requested one.
func (b *Body) Drain() error {
	_, err := b.WriteTo(io.Discard)
	return err
}

// Close ends the fetch. It may be called more than once.
func (b *Body) Close() error {
	b.disconnect(errClosed)
	b.cancel()
	b.hash.close()
	if b.err == nil {
		b.err = errClosed
	}
	return nil
}

// resume replaces a lost connection.
func (b *Body) resume(cause error) error {
	b.disconnect(nil)
	if err := contextError(b.ctx, b.from); err != nil {
		return err
	}
	if b.arrived >= progress {
		b.tries = 0
		b.pauses.Reset()
	}
	of := ""
	if b.size >= 0 {
		of = fmt.Sprintf(" of %d", b.size)
	}
	why := errdefs.Unavailablef("fetch %s: the connection was lost after %d%s bytes (%w)", b.from, b.off, of, cause)
	if b.off > 0 && b.now.strong() == "" && b.want == "" {
		return fmt.Errorf("%w, and the server gives no ETag, so the fetch cannot be resumed; try again", why)
	}
	return b.connect(b.ctx, validators{}, &failure{err: why, retry: true})
}

// disconnect closes the connection.
func (b *Body) disconnect(cause error) {
	if b.conn == nil {
		return
	}
	b.watch.Stop()
	b.hangUp(cause)
	b.conn.Close()
	b.conn = nil
}

// connect sends requests until a response can be read from b.off on. last is why that is needed, nil the first time.
func (b *Body) connect(ctx context.Context, have validators, last *failure) error {
	for {
		if last != nil {
			if err := b.pause(ctx, last); err != nil {
				return err
			}
		}
		b.tries++
		if last = b.request(ctx, have); last == nil {
			return nil
		}
	}
}

// pause waits before another attempt, or returns why there will be none.
func (b *Body) pause(ctx context.Context, f *failure) error {
	o := b.s.c.opts
	switch {
	case !f.retry:
		return f.err
	case b.tries >= o.Attempts:
		return fmt.Errorf("%w (tried %d times)", f.err, b.tries)
	}
	wait := b.wait(f.after)
	o.Log.WarnContext(ctx, "retrying fetch", "op", "fetch", "dur", wait, "err", f.err)
	select {
	case <-time.After(wait):
		return nil
	case <-ctx.Done():
		return contextError(ctx, b.from)
	}
}

// request makes one attempt.
func (b *Body) request(ctx context.Context, have validators) *failure {
	h := http.Header{}
	switch {
	case b.off > 0:
		h.Set("Range", fmt.Sprintf("bytes=%d-", b.off))
		set(h, "If-Range", b.now.strong())
	case !b.fetched:
		set(h, "If-None-Match", have.etag)
		set(h, "If-Modified-Since", have.modified)
	}
	ctx, hangUp := context.WithCancelCause(ctx)
	res, at, f := b.s.exchange(ctx, b.from, h)
	if f != nil {
		hangUp(nil)
		return f
	}
	if f := b.accept(res, at, have); f != nil {
		discard(res)
		hangUp(nil)
		return f
	}
	b.conn, b.hangUp, b.arrived = res.Body, hangUp, 0
	b.watch = time.AfterFunc(time.Hour, func() { hangUp(errStalled) })
	b.watch.Stop()
	if b.same {
		b.disconnect(nil)
		b.err = errdefs.Preconditionf("fetch %s: it was not modified, there is nothing to read", b.from)
	}
	return nil
}

func set(h http.Header, key, value string) {
	if value != "" {
		h.Set(key, value)
	}
}

// accept checks the status and header of a response.
func (b *Body) accept(res *http.Response, at location, have validators) *failure {
	got := validators{etag: res.Header.Get("ETag"), modified: res.Header.Get("Last-Modified")}
	switch {
	case b.off == 0 && res.StatusCode == http.StatusOK:
		b.fetched, b.now, b.size = true, got, res.ContentLength
		return nil
	case b.off == 0 && res.StatusCode == http.StatusNotModified && !b.fetched && have != (validators{}):
		b.same = true
		b.now = validators{etag: cmp.Or(got.etag, have.etag), modified: cmp.Or(got.modified, have.modified)}
		return nil
	case b.off == 0:
		return statusFailure(res, at)
	case res.StatusCode == http.StatusPartialContent && b.continues(res, got):
		return nil
	case res.StatusCode == http.StatusOK && got == b.now && got.strong() != "":
		return &failure{err: errdefs.Unavailablef("fetch %s: the connection was lost, and the server cannot resume the transfer; try again", at)}
	case res.StatusCode == http.StatusOK, res.StatusCode == http.StatusPartialContent,
		res.StatusCode == http.StatusRequestedRangeNotSatisfiable, res.StatusCode == http.StatusPreconditionFailed:
		return &failure{err: errdefs.Unavailablef("fetch %s: the file changed during the fetch; try again", at)}
	}
	return statusFailure(res, at)
}

// continues reports whether a partial response is the rest of what was read so far.
func (b *Body) continues(res *http.Response, got validators) bool {
	r, ok := parseContentRange(res.Header.Get("Content-Range"))
	if !ok || r.first != b.off {
		return false
	}
	if r.total >= 0 && b.size >= 0 && r.total != b.size || r.last >= r.total && r.total >= 0 {
		return false
	}
	if got.etag != "" && b.now.etag != "" && got.etag != b.now.etag {
		return false
	}
	return got.modified == "" || b.now.modified == "" || got.modified == b.now.modified
}

package ociclient

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Digest returns "sha256:<hex>" of data.
func Digest(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// DigestOf reads r to its end and returns "sha256:<hex>" of its bytes.
func DigestOf(ctx context.Context, r io.Reader) (string, error) {
	sum := sha256.New()
	if _, err := io.CopyBuffer(sum, &cancelled{ctx, r}, make([]byte, 1<<20)); err != nil {
		return "", err
	}
	return "sha256:" + hex.EncodeToString(sum.Sum(nil)), nil
}

// cancelled is a reader that fails when its context ends.
type cancelled struct {
	ctx context.Context //nolint:containedctx // of the one copy that this value is for
	r   io.Reader
}

func (c *cancelled) Read(b []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(b)
}

// Sender sends the blobs of one push, each of them once. If a call fails, the push must fail. It is safe for concurrent use.
type Sender struct {
	*Session

	claimed sync.Map // digests of blobs that the registry has or will have
}

// Claim reports whether the caller is the first to handle a blob.
func (s *Sender) Claim(digest string) bool {
	_, claimed := s.claimed.LoadOrStore(digest, true)
	return !claimed
}

// Send is PutBlob for a blob that nobody has claimed and that the registry does not have.
func (s *Sender) Send(ctx context.Context, digest string, size int64, body func() io.Reader) error {
	if !s.Claim(digest) {
		return nil
	}
	if have, err := s.HasBlob(ctx, digest); err != nil || have {
		return err
	}
	return s.PutBlob(ctx, digest, size, body)
}

// HasBlob asks whether the repository has a blob.
func (s *Session) HasBlob(ctx context.Context, digest string) (bool, error) {
	what := "blob " + digest
	resp, err := s.do(ctx, request{method: http.MethodHead, url: s.base + "blobs/" + digest, what: what})
	if err != nil {
		return false, err
	}
	discard(resp)
	switch resp.StatusCode {
	case http.StatusOK:
		return true, nil
	case http.StatusNotFound:
		return false, nil
	}
	return false, s.explain(resp, what)
}

// PutBlob stores a blob of size bytes. body returns a new reader of all its bytes at each call; it is called again
// when a connection breaks. The registry refuses content that does not have the digest.
func (s *Session) PutBlob(ctx context.Context, digest string, size int64, body func() io.Reader) error {
	what := "blob " + digest
	again := false
	_, err := retry(ctx, s, s.cfg.Attempts, func() (done bool, err error) {
		if again {
			if have, err := s.HasBlob(ctx, digest); err == nil && have { // only the answer was lost
				return true, nil
			}
		}
		again = true
		if err = s.put(ctx, digest, size, body, what); s.permanent(ctx, err) {
			err = backoff.Permanent(err)
		}
		return true, err
	})
	return err
}

// put is one attempt: a single request if the registry supports that, otherwise an upload session: opened, filled,
// closed.
func (s *Session) put(ctx context.Context, digest string, size int64, body func() io.Reader, what string) error {
	if size <= maxSingle && !s.sessions.Load() {
		if done, err := s.putSingle(ctx, digest, size, body, what); done || err != nil {
			return err
		}
		s.sessions.Store(true)
	}
	resp, err := s.do(ctx, request{method: http.MethodPost, url: s.base + "blobs/uploads/", what: what, single: true})
	if err != nil {
		return err
	}
	discard(resp)
	if resp.StatusCode != http.StatusAccepted {
		return s.refused(resp, what)
	}
	to, err := resp.Location()
	if err != nil {
		return errdefs.Unavailablef("%s opens an upload but does not say where", s.ref.Host)
	}
	q := to.RawQuery
	if q != "" {
		q += "&"
	}
	to.RawQuery = q + "digest=" + url.QueryEscape(digest)
	resp, err = s.do(ctx, request{
		method: http.MethodPut, url: to.String(), what: what, single: true, body: body, size: size,
		header: http.Header{"Content-Type": {"application/octet-stream"}},
	})
	if err != nil {
		return err
	}
	defer discard(resp)
	switch {
	case resp.StatusCode == http.StatusCreated || resp.StatusCode == http.StatusNoContent:
		return nil
	case resp.StatusCode == http.StatusNotFound || resp.StatusCode == http.StatusRequestedRangeNotSatisfiable: // the session is gone; another may work
		return errdefs.Unavailablef("%s lost the upload of the %s; try again", s.ref.Host, what)
	case resp.StatusCode == http.StatusBadRequest && mentions(resp, "DIGEST_INVALID", "SIZE_INVALID"):
		return errdefs.DataLossf("%s reports that the %s arrived with a wrong digest", s.ref.Host, what)
	}
	return s.refused(resp, what)
}

// maxSingle is the largest blob, in bytes, that is sent in a single request without opening an upload session first.
const maxSingle = 64 << 20

// putSingle sends a blob with the request that opens the upload. Registries need not support that. One that does not
// opens a session, or rejects the request as invalid. Then done is false, and that session is left to expire. Until
// the registry is known to support it, it is asked before the bytes are sent.
func (s *Session) putSingle(ctx context.Context, digest string, size int64, body func() io.Reader, what string) (done bool, err error) {
	header := http.Header{"Content-Type": {"application/octet-stream"}}
	if !s.singles.Load() {
		header.Set("Expect", "100-continue")
	}
	resp, err := s.do(ctx, request{
		method: http.MethodPost, url: s.base + "blobs/uploads/?digest=" + url.QueryEscape(digest), what: what, single: true, body: body, size: size, header: header,
	})
	if err != nil {
		return false, err
	}
	defer discard(resp)
	switch resp.StatusCode {
	case http.StatusCreated:
		s.singles.Store(true)
		return true, nil
	case http.StatusBadRequest:
		if mentions(resp, "DIGEST_INVALID", "SIZE_INVALID") {
			return false, errdefs.DataLossf("%s reports that the %s arrived with a wrong digest", s.ref.Host, what)
		}
		return false, nil
	case http.StatusAccepted, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusLengthRequired, http.StatusUnsupportedMediaType,
		http.StatusRequestedRangeNotSatisfiable, http.StatusNotImplemented:
		return false, nil
	}
	return false, s.refused(resp, what)
}

// refused is explain plus the pause that the server asks for.
func (s *Session) refused(resp *http.Response, what string) error {
	err := s.explain(resp, what)
	if after := retryAfter(resp); after != nil && errdefs.IsUnavailable(err) {
		return retryError{error: err, after: after}
	}
	return err
}

// maxErrorBody bounds how much of an error's body is read, in bytes.
const maxErrorBody = 16 << 10

// mentions reports whether an error of the registry has one of the codes; the registry epoch has them as the reason
// in its details. The body can still be read afterwards.
func mentions(resp *http.Response, codes ...string) bool {
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	if err != nil {
		return false
	}
	resp.Body.Close()
	resp.Body = io.NopCloser(bytes.NewReader(raw)) // other callers may read it, too
	var answer struct {
		Errors []struct {
			Code   string          `json:"code"`
			Detail json.RawMessage `json:"detail"` // any form, in other registries
		} `json:"errors"`
	}
	if json.Unmarshal(raw, &answer) != nil {
		return false
	}
	for _, e := range answer.Errors {
		var detail struct {
			Reason string `json:"reason"`
		}
		_ = json.Unmarshal(e.Detail, &detail) // if it has another form, there is no reason
		for _, c := range codes {
			if strings.EqualFold(e.Code, c) || strings.EqualFold(detail.Reason, c) {
				return true
			}
		}
	}
	return false
}

// Blob reads one blob of a known size from the beginning. If the connection breaks, it continues where it was. At the
// end the content matches the digest, or the last Read fails with DataLoss.
func (s *Session) Blob(ctx context.Context, digest string, size int64) io.ReadCloser {
	return &blob{s: s, ctx: ctx, digest: digest, size: size, sum: sha256.New(), pause: s.pauses()}
}

type blob struct {
	s      *Session
	ctx    context.Context //nolint:containedctx // of the one transfer that this value is
	digest string
	size   int64

	body  io.ReadCloser
	sum   hash.Hash
	at    int64
	fails int // in a row, without a byte in between
	pause *backoff.ExponentialBackOff
	err   error
}

func (b *blob) what() string { return "blob " + b.digest }

func (b *blob) Read(p []byte) (int, error) {
	for b.err == nil {
		if b.at == b.size {
			b.err = b.verify()
			break
		}
		if b.body == nil {
			if b.err = b.open(); b.err != nil {
				break
			}
		}
		n, err := b.body.Read(p[:min(int64(len(p)), b.size-b.at)])
		if n > 0 {
			b.sum.Write(p[:n])
			b.at, b.fails = b.at+int64(n), 0
			b.pause.Reset()
			b.s.recv.Add(int64(n))
		}
		if err != nil && b.at < b.size {
			b.hangUp()
			b.broken(err)
		}
		if n > 0 {
			return n, nil
		}
	}
	b.hangUp()
	return 0, b.err
}

// verify checks the end: nothing may follow, and the digest must match.
func (b *blob) verify() error {
	if b.body != nil {
		if n, _ := io.ReadFull(b.body, make([]byte, 1)); n > 0 {
			return errdefs.DataLossf("the %s of %s is longer than the %d bytes that its descriptor says", b.what(), b.s.ref.Host, b.size)
		}
	}
	algorithm, want, _ := strings.Cut(b.digest, ":")
	if algorithm != "sha256" {
		return errdefs.Unsupportedf("the %s has the digest algorithm %q; only sha256 is supported", b.what(), algorithm)
	}
	if got := hex.EncodeToString(b.sum.Sum(nil)); got != want {
		return errdefs.DataLossf("the %s is damaged: %s serves bytes with the digest sha256:%s", b.what(), b.s.ref.Host, got)
	}
	return io.EOF
}

// broken records that a transfer ended early, and waits before the next one.
func (b *blob) broken(err error) {
	if b.fails++; b.fails >= b.s.cfg.Attempts || b.s.permanent(b.ctx, err) {
		if errors.Is(err, io.EOF) {
			b.err = errdefs.DataLossf("the %s is truncated: %s sends %d of %d bytes", b.what(), b.s.ref.Host, b.at, b.size)
			return
		}
		b.err = fmt.Errorf("fetch the %s: %w", b.what(), b.s.unreachable(b.ctx, err))
		return
	}
	select {
	case <-time.After(b.pause.NextBackOff()):
	case <-b.ctx.Done():
		b.err = b.ctx.Err()
	}
}

// open begins or continues the transfer.
func (b *blob) open() error {
	header := http.Header{}
	if b.at > 0 {
		header.Set("Range", fmt.Sprintf("bytes=%d-%d", b.at, b.size-1)) // not all servers accept an open end
	}
	req := request{method: http.MethodGet, url: b.s.base + "blobs/" + b.digest, header: header, what: b.what()}
	resp, err := b.s.do(b.ctx, req)
	if err == nil && resp.StatusCode == http.StatusRequestedRangeNotSatisfiable && b.at > 0 {
		discard(resp)
		req.header = nil
		resp, err = b.s.do(b.ctx, req)
	}
	if err != nil {
		return err
	}
	switch {
	case resp.StatusCode == http.StatusPartialContent && b.at > 0 && startsAt(resp, b.at):
	case resp.StatusCode == http.StatusOK && resp.ContentLength >= 0 && resp.ContentLength < b.size:
		err = errdefs.DataLossf("the %s is truncated: %s has %d of %d bytes", b.what(), b.s.ref.Host, resp.ContentLength, b.size)
	case resp.StatusCode == http.StatusOK && resp.ContentLength > b.size:
		err = errdefs.DataLossf("the %s of %s is longer than the %d bytes that its descriptor says", b.what(), b.s.ref.Host, b.size)
	case resp.StatusCode == http.StatusOK: // the whole blob, if ranges are not served: skip what has been read
		if _, err = io.CopyN(io.Discard, resp.Body, b.at); err != nil {
			resp.Body.Close()
			b.broken(err)
			return b.err
		}
	case resp.StatusCode == http.StatusPartialContent:
		err = errdefs.DataLossf("%s answers a request for bytes from %d of the %s with other bytes", resp.Request.URL.Host, b.at, b.what())
	case resp.StatusCode == http.StatusNotFound || resp.StatusCode == http.StatusGone: // a manifest names it
		err = errdefs.NotFoundf("%s has no %s, which the manifest names", b.s.ref.Host, b.what())
	default:
		err = b.s.explain(resp, b.what())
	}
	if err != nil {
		discard(resp)
		return err
	}
	b.body = resp.Body
	return nil
}

// startsAt reports whether an answer begins at that byte. One that does not say is believed: the digest decides.
func startsAt(resp *http.Response, at int64) bool {
	said := resp.Header.Get("Content-Range")
	var from int64
	_, err := fmt.Sscanf(said, "bytes %d-", &from)
	return said == "" || err == nil && from == at
}

func (b *blob) hangUp() {
	if b.body != nil {
		b.body.Close()
		b.body = nil
	}
}

// Close ends the transfer.
func (b *blob) Close() error {
	b.hangUp()
	if b.err == nil {
		b.err = io.ErrClosedPipe
	}
	return nil
}

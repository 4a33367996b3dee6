package ociclient

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"net/http"
	"net/url"
	"sync"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// How long, and how often, the registry is asked to forget an upload.
const (
	cancelTimeout  = 5 * time.Second
	cancelAttempts = 4
)

// StreamBlob stores a blob whose size and digest are known only at its end, and returns both. It reads r once, so nothing is repeated: after an error the
// caller begins anew, and the registry forgets the bytes. An error of r is returned unchanged.
func (s *Session) StreamBlob(ctx context.Context, r io.Reader) (digest string, size int64, err error) {
	const what = "blob that is uploaded"
	resp, err := s.do(ctx, request{method: http.MethodPost, url: s.base + "blobs/uploads/", what: what}) //nolint:bodyclose // session closes it
	if err != nil {
		return "", 0, err
	}
	to, err := s.session(resp, what)
	if err != nil {
		return "", 0, err
	}
	defer func() {
		if err != nil {
			s.forget(ctx, to)
		}
	}()
	in := &summed{r: r, sum: sha256.New()}
	defer in.Close()
	resp, err = s.once(ctx, request{
		method: http.MethodPatch, url: to, what: what, body: func() io.Reader { return in }, size: -1, header: http.Header{"Content-Type": {"application/octet-stream"}},
	})
	sum, size, failed := in.end()
	switch {
	case failed != nil: // why the bytes ended counts, not what that did to the connection
		if err == nil {
			discard(resp)
		}
		return "", 0, failed
	case err != nil:
		return "", 0, s.unreachable(ctx, err)
	}
	next, err := s.session(resp, what)
	if err != nil {
		return "", 0, err
	}
	to = next
	last, err := url.Parse(to)
	if err != nil {
		return "", 0, errdefs.Unavailablef("%s gives a location that is not a URL", s.ref.Host)
	}
	q := last.RawQuery
	if q != "" {
		q += "&"
	}
	last.RawQuery = q + "digest=" + url.QueryEscape(sum)
	resp, err = s.do(ctx, request{method: http.MethodPut, url: last.String(), what: what, single: true})
	if err != nil {
		return "", 0, err
	}
	defer discard(resp)
	if resp.StatusCode != http.StatusCreated && resp.StatusCode != http.StatusNoContent {
		return "", 0, s.explain(resp, what)
	}
	return sum, size, nil
}

// session returns where an upload continues, as the answer says.
func (s *Session) session(resp *http.Response, what string) (string, error) {
	defer discard(resp)
	if resp.StatusCode != http.StatusAccepted && resp.StatusCode != http.StatusNoContent {
		return "", s.refused(resp, what)
	}
	to, err := resp.Location()
	if err != nil {
		return "", errdefs.Unavailablef("%s opens an upload but does not say where", s.ref.Host)
	}
	return to.String(), nil
}

// forget makes the registry forget an upload. One that it keeps ends by itself there.
func (s *Session) forget(ctx context.Context, at string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelTimeout)
	defer cancel()
	const what = "upload that is given up"
	_, _ = retry(ctx, s, cancelAttempts, func() (bool, error) {
		resp, err := s.once(ctx, request{method: http.MethodDelete, url: at, what: what})
		if err != nil {
			return false, s.failed(ctx, err)
		}
		defer discard(resp)
		if resp.StatusCode == http.StatusConflict { // it has not seen yet that the connection is gone
			return false, s.explain(resp, what)
		}
		return true, nil
	})
}

// summed computes the digest of what is read of it. The HTTP client may read on after its answer, until Close.
type summed struct {
	mu     sync.Mutex
	r      io.Reader
	sum    hash.Hash
	size   int64
	failed error // of r
}

func (s *summed) Read(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.r == nil {
		return 0, io.ErrClosedPipe
	}
	n, err := s.r.Read(p)
	s.sum.Write(p[:n])
	s.size += int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		s.failed = err
	}
	return n, err
}

// end closes s and returns what was read. The registry may have answered before it had all bytes; its answer says why.
func (s *summed) end() (digest string, size int64, failed error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.r = nil
	return "sha256:" + hex.EncodeToString(s.sum.Sum(nil)), s.size, s.failed
}

// Close implements io.Closer.
func (s *summed) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.r = nil
	return nil
}

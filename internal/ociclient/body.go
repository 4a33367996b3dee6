package ociclient

import (
	"io"
	"net/http"
	"sync"
	"sync/atomic"
)

// repeated is the body of a request that the client may send several times, for example again with a new token. Each sending reads its own bytes: a connection may go on reading
// the bytes of an earlier sending after the answer has come. A body of StreamBlob has its bytes only once, so a second sending of it fails. guard calls sendWith; nobody calls Read.
type repeated struct {
	bytes func() io.Reader
	n     *atomic.Int64
	now   *counted
}

func (*repeated) Read([]byte) (int, error) { return 0, io.EOF }
func (*repeated) Close() error             { return nil }

// sendWith returns req with bytes that nobody has read.
func (b *repeated) sendWith(req *http.Request) *http.Request {
	b.end()
	b.now = &counted{n: b.n, r: b.bytes()}
	b.now.closer, _ = b.now.r.(io.Closer)
	req = req.WithContext(req.Context())
	req.Body = b.now
	return req
}

// end returns when nobody reads bytes in memory any more, which may change then. It does not wait for bytes that somebody produces.
func (b *repeated) end() {
	if b.now == nil || b.now.closer != nil {
		return
	}
	b.now.mu.Lock()
	defer b.now.mu.Unlock()
	b.now.r = nil
}

// counted counts the bytes that are read of a body. The HTTP client closes it, however a request ends.
type counted struct {
	n      *atomic.Int64
	closer io.Closer // of bytes that somebody produces; nil: they are in memory

	mu sync.Mutex // of bytes in memory
	r  io.Reader  // nil: it has ended
}

func (c *counted) Read(p []byte) (int, error) {
	if c.closer == nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.r == nil {
			return 0, io.ErrClosedPipe
		}
	}
	n, err := c.r.Read(p)
	c.n.Add(int64(n))
	return n, err
}

// Close tells the producer of the bytes that no more are needed.
func (c *counted) Close() error {
	if c.closer != nil {
		return c.closer.Close()
	}
	return nil
}

// Package compress removes the compression of images: gzip, xz and zstd, recognised by content.
//
// It writes nothing, compresses nothing, and does not limit the output size: the caller that stores the result does.
package compress

import (
	"bufio"
	"bytes"
	"errors"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/therootcompany/xz"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Kind is a compression format.
type Kind string

// The kinds. None is content in no known format.
const (
	None Kind = ""
	Gzip Kind = "gzip"
	XZ   Kind = "xz"
	Zstd Kind = "zstd"
)

// maxWindow is how far back a stream may refer, which is also its memory use: 128 MiB is twice that of `xz -9` and equal
// to that of `zstd --ultra`.
const maxWindow = 128 << 20

var magics = []struct {
	kind  Kind
	bytes string
}{
	{Gzip, "\x1f\x8b"},
	{XZ, "\xfd7zXZ\x00"},
	{Zstd, "\x28\xb5\x2f\xfd"},
}

// Reader returns the plain content of r: decompressed once, or unchanged if it is not compressed. An error of r itself is
// returned unchanged. Damaged and truncated streams, and those that need too much memory, are DataLoss or Unsupported. r
// is read to its end before the result ends. Closing the result frees memory and does not close r.
func Reader(r io.Reader) (io.ReadCloser, Kind, error) {
	in := &source{r: r}
	buf := bufio.NewReaderSize(in, 1<<18)
	magic, err := buf.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, None, err
	}
	kind := None
	for _, m := range magics {
		if bytes.HasPrefix(magic, []byte(m.bytes)) {
			kind = m.kind
		}
	}
	p := &plain{in: in, kind: kind}
	switch kind {
	case Gzip:
		z, err := gzip.NewReader(buf)
		if err != nil {
			return nil, kind, p.classify(err)
		}
		p.r = z
	case XZ:
		z, err := xz.NewReader(buf, maxWindow)
		if err != nil {
			return nil, kind, p.classify(err)
		}
		p.r = z
	case Zstd:
		z, err := zstd.NewReader(buf, zstd.WithDecoderConcurrency(2), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, kind, p.classify(err)
		}
		p.r, p.close = z, z.Close
	default:
		return io.NopCloser(buf), None, nil
	}
	return p, kind, nil
}

// source remembers its own error, so that it is not taken for damage.
type source struct {
	r      io.Reader
	failed error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		s.failed = err
	}
	return n, err
}

type plain struct {
	in    *source
	kind  Kind
	r     io.Reader
	close func()
}

func (p *plain) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	if err == nil || errors.Is(err, io.EOF) {
		return n, err
	}
	return n, p.classify(err)
}

func (p *plain) Close() error {
	if p.close != nil {
		p.close()
		p.close = nil
	}
	return nil
}

// classify returns the error class of a decoder's error.
func (p *plain) classify(err error) error {
	switch {
	case p.in.failed != nil:
		return p.in.failed
	case errors.Is(err, xz.ErrMemlimit), errors.Is(err, zstd.ErrWindowSizeExceeded):
		return errdefs.Unsupportedf("decompressing the %s stream needs more than %d MiB of memory; compress it with a smaller window", p.kind, maxWindow>>20)
	case errors.Is(err, xz.ErrOptions), errors.Is(err, xz.ErrUnsupportedCheck):
		return errdefs.Unsupportedf("the xz stream uses an unsupported filter or check; compress it with the default settings")
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, xz.ErrBuf):
		return errdefs.DataLossf("the compressed file is truncated; fetch it again")
	}
	return errdefs.DataLossf("the compressed file is damaged (%w); fetch it again", err)
}

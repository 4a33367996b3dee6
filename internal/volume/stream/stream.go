// Package stream reads the streams of exports and imports of volumes.
//
// It knows neither where the bytes come from nor where a store keeps them.
package stream

import (
	"context"
	"fmt"
	"io"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
)

// Interrupted is a reader of R that fails when its context ends.
type Interrupted struct {
	Ctx context.Context //nolint:containedctx // it ends with the call that reads
	R   io.Reader
}

func (i Interrupted) Read(p []byte) (int, error) {
	if err := i.Ctx.Err(); err != nil {
		return 0, err
	}
	return i.R.Read(p)
}

// Skip implements sparse.Holed. R may have no holes that it knows.
func (i Interrupted) Skip() (int64, error) {
	if h, ok := i.R.(sparse.Holed); ok && i.Ctx.Err() == nil {
		return h.Skip()
	}
	return 0, i.Ctx.Err()
}

// Each calls fn with each part of r, which fills buf except for the last one, and with the number of bytes before it, at most limit
// bytes. It calls fn for no hole that r knows (sparse.Holed). It returns how many bytes there were, holes included.
// Errors: InvalidArgument if there are more than limit, or none.
func Each(r io.Reader, buf []byte, limit int64, fn func(part []byte, at int64) error) (int64, error) {
	var at int64
	for {
		hole, err := skip(r)
		if err != nil {
			return at, fmt.Errorf("the stream failed after %d bytes: %w", at, err)
		}
		if hole > limit-at {
			return at, tooLong(limit)
		}
		at += hole
		n, end, err := fill(r, buf)
		if err != nil {
			return at, fmt.Errorf("the stream failed after %d bytes: %w", at+int64(n), err)
		}
		if int64(n) > limit-at {
			return at, tooLong(limit)
		}
		if n > 0 {
			if err := fn(buf[:n], at); err != nil {
				return at, err
			}
		}
		if at += int64(n); end && at == 0 {
			return 0, errdefs.Invalidf("the stream has no bytes")
		}
		if end {
			return at, nil
		}
	}
}

func tooLong(limit int64) error {
	return errdefs.Invalidf("the stream has more than the %d bytes that the volume can hold; choose a larger size", limit)
}

func skip(r io.Reader) (int64, error) {
	if h, ok := r.(sparse.Holed); ok {
		return h.Skip()
	}
	return 0, nil
}

// fill fills buf, or reads up to the end of r. Unlike io.ReadFull, it does not mistake a stream that broke off, which also fails
// with io.ErrUnexpectedEOF, for one that ended.
func fill(r io.Reader, buf []byte) (n int, end bool, err error) {
	for n < len(buf) {
		got, err := r.Read(buf[n:])
		n += got
		if err == io.EOF { // not wrapped: a reader says so at its end
			return n, true, nil
		}
		if err != nil {
			return n, false, err
		}
	}
	return n, false, nil
}

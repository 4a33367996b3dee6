// Package stream makes one body out of pieces: bytes in memory, zeros, blobs, decompressed blobs.
//
// It knows the size before the first byte and can start at any offset, so the body can be served like a file. It never
// ends early without an error.
package stream

import (
	"bytes"
	"context"
	"errors"
	"io"
	"sort"

	"github.com/klauspost/compress/zstd"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Piece is a part of a stream: Size bytes. Open's reader returns exactly those from offset on.
type Piece struct {
	Size int64
	Open func(ctx context.Context, offset int64) (io.ReadCloser, error)
}

// Bytes returns a piece in memory.
func Bytes(b []byte) Piece {
	return Piece{int64(len(b)), func(_ context.Context, offset int64) (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(b[offset:])), nil
	}}
}

// Zeros returns a piece of n zeros.
func Zeros(n int64) Piece {
	return Piece{n, func(_ context.Context, offset int64) (io.ReadCloser, error) {
		return io.NopCloser(io.LimitReader(zeros{}, n-offset)), nil
	}}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// Source opens something that can be read and sought.
type Source func(ctx context.Context) (io.ReadSeekCloser, error)

// Plain returns a piece of size bytes from a source.
func Plain(size int64, open Source) Piece {
	return Piece{size, func(ctx context.Context, offset int64) (io.ReadCloser, error) {
		f, err := open(ctx)
		if err != nil || offset == 0 {
			return f, err
		}
		if _, err := f.Seek(offset, io.SeekStart); err != nil {
			f.Close()
			return nil, err
		}
		return f, nil
	}}
}

// maxWindow bounds the memory of a decoder, whatever a frame requests; bytes.
const maxWindow = 128 << 20

// Unpacked returns a piece with the size bytes in the zstd frames of a source. To start in the middle, it decompresses
// everything before.
func Unpacked(size int64, open Source) Piece { return UnpackedWithin(size, maxWindow, open) }

// UnpackedWithin does the same as Unpacked with a decoder that has at most window bytes of memory for what was decompressed last.
// Frames that need more are not read.
func UnpackedWithin(size, window int64, open Source) Piece {
	return Piece{size, func(ctx context.Context, offset int64) (io.ReadCloser, error) {
		f, err := open(ctx)
		if err != nil {
			return nil, err
		}
		d, err := zstd.NewReader(f, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(uint64(window)), zstd.WithDecoderLowmem(true))
		if err != nil {
			f.Close()
			return nil, err
		}
		u := &unpacked{d, f}
		if _, err := io.CopyN(io.Discard, u, offset); err != nil {
			u.Close()
			return nil, err
		}
		return u, nil
	}}
}

type unpacked struct {
	d *zstd.Decoder
	f io.Closer
}

func (u *unpacked) Read(p []byte) (int, error) { return u.d.Read(p) }

func (u *unpacked) Close() error {
	u.d.Close()
	return u.f.Close()
}

// UnpackedSize returns how many bytes the zstd frames of a source contain: the sum of the frames' stated sizes, or, if
// one states none, the size after decompressing all of them.
func UnpackedSize(ctx context.Context, open Source) (int64, error) {
	f, err := open(ctx)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	size, err := frames(ctx, f)
	if err == nil || !errors.Is(err, errSilent) {
		return size, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return 0, err
	}
	d, err := zstd.NewReader(f, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return 0, err
	}
	defer d.Close()
	return io.Copy(io.Discard, untilDone{ctx, d})
}

var errSilent = errors.New("a frame does not say its size")

// frames sums up the sizes that the frames state, skipping their blocks (RFC 8878).
func frames(ctx context.Context, f io.ReadSeeker) (total int64, err error) {
	damaged := func(err error) error {
		return errdefs.DataLossf("a layer is not compressed as its type says, or is truncated: %w", err)
	}
	for at := int64(0); ; {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		if _, err := f.Seek(at, io.SeekStart); err != nil {
			return 0, err
		}
		var head [zstd.HeaderMaxSize]byte
		n, err := io.ReadFull(f, head[:])
		if errors.Is(err, io.EOF) && at > 0 {
			return total, nil
		}
		if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
			return 0, damaged(err)
		}
		var h zstd.Header
		if err := h.Decode(head[:n]); err != nil {
			return 0, damaged(err)
		}
		if h.Skippable {
			at += int64(h.HeaderSize) + int64(h.SkippableSize)
			continue
		}
		if !h.HasFCS || h.FrameContentSize > 1<<62 || total > 1<<62 {
			return 0, errSilent
		}
		total += int64(h.FrameContentSize)
		at += int64(h.HeaderSize)
		for last := false; !last; {
			var b [3]byte
			if _, err := f.Seek(at, io.SeekStart); err != nil {
				return 0, err
			}
			if _, err := io.ReadFull(f, b[:]); err != nil {
				return 0, damaged(err)
			}
			const rle = 1
			word := int64(b[0]) | int64(b[1])<<8 | int64(b[2])<<16
			last = word&1 == 1
			if at += 3; word>>1&3 == rle {
				at++
			} else {
				at += word >> 3
			}
		}
		if h.HasCheckSum {
			at += 4
		}
	}
}

type untilDone struct {
	ctx context.Context //nolint:containedctx // of the one copy that this value is for
	r   io.Reader
}

func (u untilDone) Read(p []byte) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, err
	}
	return u.r.Read(p)
}

// Stream is a sequence of pieces. Only one goroutine may use it.
type Stream struct {
	ctx    context.Context //nolint:containedctx // of the request that reads it: io.Reader has no place for it
	pieces []Piece
	ends   []int64
	pos    int64

	open io.ReadCloser // reader of pieces[at], at offset pos; nil: not open
	at   int
}

var _ io.ReadSeekCloser = (*Stream)(nil)

// New returns the stream of pieces; it opens each piece when it is read.
func New(ctx context.Context, pieces []Piece) *Stream {
	s := &Stream{ctx: ctx}
	var end int64
	for _, p := range pieces {
		if p.Size > 0 {
			end += p.Size
			s.pieces, s.ends = append(s.pieces, p), append(s.ends, end)
		}
	}
	return s
}

// Size returns the total number of bytes.
func (s *Stream) Size() int64 {
	if len(s.ends) == 0 {
		return 0
	}
	return s.ends[len(s.ends)-1]
}

// Seek is cheap: the next Read begins at the offset.
func (s *Stream) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += s.pos
	case io.SeekEnd:
		offset += s.Size()
	}
	if offset < 0 {
		return 0, errdefs.Invalidf("offset %d is before the beginning", offset)
	}
	if offset != s.pos {
		s.pos = offset
		s.Close()
	}
	return offset, nil
}

// Read reads within a piece. It returns the last bytes of a piece only if the piece's reader ends exactly there.
func (s *Stream) Read(p []byte) (int, error) {
	if s.pos >= s.Size() {
		return 0, io.EOF
	}
	if len(p) == 0 {
		return 0, nil
	}
	if s.open == nil {
		s.at = sort.Search(len(s.ends), func(i int) bool { return s.ends[i] > s.pos })
		var err error
		if s.open, err = s.pieces[s.at].Open(s.ctx, s.pos-(s.ends[s.at]-s.pieces[s.at].Size)); err != nil {
			s.open = nil
			return 0, err
		}
	}
	left := s.ends[s.at] - s.pos
	n, err := io.ReadFull(s.open, p[:min(left, int64(len(p)))])
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return 0, errdefs.DataLossf("a part of the body ends %d bytes early", left-int64(n))
	}
	if err != nil {
		return 0, err
	}
	if int64(n) == left {
		if err := s.ended(); err != nil {
			return 0, err
		}
	}
	s.pos += int64(n)
	return n, nil
}

func (s *Stream) ended() error {
	var one [1]byte
	_, err := io.ReadFull(s.open, one[:])
	s.Close()
	switch {
	case err == nil:
		return errdefs.DataLossf("a part of the body is longer than its description says")
	case errors.Is(err, io.EOF):
		return nil
	}
	return err
}

// Close closes the open piece.
func (s *Stream) Close() error {
	if s.open == nil {
		return nil
	}
	err := s.open.Close()
	s.open = nil
	return err
}

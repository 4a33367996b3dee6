package file

import (
	"context"
	"fmt"
	"io"
	"os"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/sparse"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

var _ volume.Carrier = (*Store)(nil)

const (
	carryBuffer = 1 << 20
	// flushEvery is after how many bytes an import asks the kernel to begin the write-back: otherwise the final sync would wait for all
	// of it.
	flushEvery = 8 << 20
)

// Export implements volume.Carrier. It reads no holes.
func (s *Store) Export(ctx context.Context, ref string, w io.Writer) error {
	if err := s.export(ctx, ref, w); err != nil {
		return fmt.Errorf("export volume %s: %w", ref, err)
	}
	return nil
}

func (s *Store) export(ctx context.Context, ref string, w io.Writer) error {
	v, data, done, err := s.read(ctx, ref, func(v volume.Volume) error {
		if by := v.Writer(); by != "" {
			return errdefs.Preconditionf("VM %s has it attached and may write to it; stop that VM, or export a clone or a volume from a snapshot", by)
		}
		return nil
	})
	if err != nil {
		return err
	}
	defer done()
	m, err := sparse.Extents(data, v.Size)
	if err != nil {
		return err
	}
	whole := []sparse.Extent{{Length: v.Size}}
	_, err = io.CopyBuffer(onlyWriter{w}, interrupted{ctx, sparse.Widen(sparse.Reader(data, m), m, whole)}, make([]byte, carryBuffer))
	return err
}

// onlyWriter hides the other methods of a writer, so that the buffer is used.
type onlyWriter struct{ io.Writer }

// interrupted is a reader that fails when its context ends.
type interrupted struct {
	ctx context.Context
	r   io.Reader
}

func (i interrupted) Read(p []byte) (int, error) {
	if err := i.ctx.Err(); err != nil {
		return 0, err
	}
	return i.r.Read(p)
}

// Import implements volume.Carrier. A volume without a size in s is as large as the stream, rounded up to a size that volumes can have.
func (s *Store) Import(ctx context.Context, spec volume.Spec, r io.Reader, progress func(bytes int64)) (volume.Volume, error) {
	v, err := s.importFrom(ctx, spec, interrupted{ctx, r}, progress)
	if err != nil {
		return volume.Volume{}, naming("import", vm.Volumes, spec.Name, err)
	}
	return v, nil
}

func (s *Store) importFrom(ctx context.Context, spec volume.Spec, r io.Reader, progress func(int64)) (volume.Volume, error) {
	limit := int64(volume.MaxSize)
	if spec.Size != 0 {
		var err error
		if limit, err = volume.RoundSize(spec.Size); err != nil {
			return volume.Volume{}, err
		}
	}
	return s.make(ctx, spec, "", func(data *os.File) (int64, error) {
		n, err := receive(data, r, limit, progress)
		switch {
		case err != nil:
			return 0, err
		case n == 0:
			return 0, errdefs.Invalidf("the stream has no bytes")
		case spec.Size != 0:
			return limit, nil
		}
		return volume.RoundSize(max(n, volume.MinSize))
	})
}

// receive writes r, up to its end, to a new file and returns how many bytes it had. Blocks of zeros become holes.
func receive(f *os.File, r io.Reader, limit int64, progress func(int64)) (int64, error) {
	buf := make([]byte, carryBuffer)
	var at, flushed int64
	for {
		n, end, err := readFull(r, buf)
		if err != nil {
			return at, fmt.Errorf("the stream failed after %d bytes: %w", at+int64(n), err)
		}
		if int64(n) > limit-at {
			return at, errdefs.Invalidf("the stream has more than the %d bytes that the volume can hold; choose a larger size", limit)
		}
		if err := sparse.WriteAt(f, buf[:n], at); err != nil {
			return at, err
		}
		if at += int64(n); n > 0 && progress != nil {
			progress(at)
		}
		if end {
			return at, nil
		}
		if at-flushed >= flushEvery {
			sparse.Flush(f, flushed, at-flushed)
			flushed = at
		}
	}
}

// readFull fills buf, or reads up to the end of r. Unlike io.ReadFull, it does not mistake a stream that broke off, which also fails
// with io.ErrUnexpectedEOF, for one that ended.
func readFull(r io.Reader, buf []byte) (n int, end bool, err error) {
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

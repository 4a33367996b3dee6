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
	"cocoonstack.io/cocoon/internal/volume/record"
	"cocoonstack.io/cocoon/internal/volume/stream"
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
	_, err = io.CopyBuffer(onlyWriter{w}, stream.Interrupted{Ctx: ctx, R: sparse.Widen(sparse.Reader(data, m), m, whole)}, make([]byte, carryBuffer))
	return err
}

// onlyWriter hides the other methods of a writer, so that the buffer is used.
type onlyWriter struct{ io.Writer }

// Import implements volume.Carrier. A volume without a size in s is as large as the stream, rounded up to a size that volumes can have.
func (s *Store) Import(ctx context.Context, spec volume.Spec, r io.Reader, progress func(bytes int64)) (volume.Volume, error) {
	v, err := s.importFrom(ctx, spec, r, progress)
	if err != nil {
		return volume.Volume{}, record.Failed("import", vm.Volumes, spec.Name, err)
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
		n, err := share(data, r, limit)
		if errdefs.Is(err, errdefs.Unsupported) {
			n, err = receive(data, stream.Interrupted{Ctx: ctx, R: r}, limit, progress)
		}
		if err != nil || spec.Size != 0 {
			return limit, err
		}
		return volume.RoundSize(max(n, volume.MinSize))
	})
}

// share makes data, which is empty, share the content of the file that r reads, and returns its size.
// Errors: Unsupported if it cannot, InvalidArgument if there are more bytes than limit.
func share(data *os.File, r io.Reader, limit int64) (int64, error) {
	f, ok := r.(*sparse.FileReader)
	if !ok {
		return 0, errdefs.Unsupportedf("it is no file")
	}
	if f.Size() > limit {
		return 0, errdefs.Invalidf("the file has %d bytes, more than the %d that the volume can hold; choose a larger size", f.Size(), limit)
	}
	return f.Size(), sparse.Clone(data, f.File())
}

// receive writes r, up to its end, to a new file and returns how many bytes it had. Blocks of zeros become holes.
func receive(f *os.File, r io.Reader, limit int64, progress func(int64)) (int64, error) {
	var flushed int64
	return stream.Each(r, make([]byte, carryBuffer), limit, func(part []byte, at int64) error {
		if err := sparse.WriteAt(f, part, at); err != nil {
			return err
		}
		if at += int64(len(part)); progress != nil {
			progress(at)
		}
		if at-flushed >= flushEvery {
			sparse.Flush(f, flushed, at-flushed)
			flushed = at
		}
		return nil
	})
}

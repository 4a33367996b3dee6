package lvm

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

const (
	exportBuffer = 1 << 20
	// importBuffer is how much an import of unknown size grows its logical volume by, in bytes.
	importBuffer = 32 << 20
)

// Export implements volume.Carrier.
func (s *Store) Export(ctx context.Context, ref string, w io.Writer) error {
	if err := s.export(ctx, ref, w); err != nil {
		return fmt.Errorf("export volume %s: %w", ref, err)
	}
	return nil
}

func (s *Store) export(ctx context.Context, ref string, w io.Writer) error {
	device, size, done, err := s.read(ctx, ref)
	if err != nil {
		return err
	}
	defer done()
	_, err = io.CopyBuffer(onlyWriter{w}, stream.Interrupted{Ctx: ctx, R: io.NewSectionReader(device, 0, size)}, make([]byte, exportBuffer))
	return err
}

// onlyWriter hides the other methods of a writer, so that the buffer is used.
type onlyWriter struct{ io.Writer }

// read returns the device of a volume and its size in bytes. Until done, no VM can be attached that writes.
func (s *Store) read(ctx context.Context, ref string) (device io.ReaderAt, size int64, done func(), err error) {
	e, release, err := s.volumes.Lock(ctx, ref)
	if err != nil {
		return nil, 0, nil, err
	}
	defer release()
	if by := e.Rec.Object.Writer(); by != "" {
		return nil, 0, nil, errdefs.Preconditionf("VM %s has it attached and may write to it; stop that VM, or export a clone or a volume from a snapshot", by)
	}
	if err := s.claim(ctx, e); err != nil {
		return nil, 0, nil, err
	}
	s.volumes.reading(e, 1)
	return e.Own.file, e.Rec.Object.Size, func() { s.volumes.reading(e, -1) }, nil
}

// Import implements volume.Carrier. A volume without a size in spec is as large as the stream, rounded up to a size that volumes can have.
func (s *Store) Import(ctx context.Context, spec volume.Spec, r io.Reader, progress func(bytes int64)) (volume.Volume, error) {
	v, err := s.importFrom(ctx, spec, stream.Interrupted{Ctx: ctx, R: r}, progress)
	if err != nil {
		return volume.Volume{}, record.Failed("import", vm.Volumes, spec.Name, err)
	}
	return v, nil
}

func (s *Store) importFrom(ctx context.Context, spec volume.Spec, r io.Reader, progress func(int64)) (volume.Volume, error) {
	limit, size := int64(volume.MaxSize), int64(0)
	if spec.Size != 0 {
		var err error
		if limit, err = volume.RoundSize(spec.Size); err != nil {
			return volume.Volume{}, err
		}
		if size, err = s.round(limit); err != nil {
			return volume.Volume{}, err
		}
	}
	return s.make(ctx, spec, "", func(ctx context.Context, lv string) (filling, error) {
		t := &intake{s: s, lv: lv, size: size, fixed: size != 0, progress: progress}
		f, err := t.receive(ctx, r, limit)
		if err == nil {
			err = s.deactivate(ctx, lv)
		}
		return f, err
	})
}

// intake is an import into a new logical volume.
type intake struct {
	s        *Store
	lv       string
	size     int64 // bytes of the volume so far
	fixed    bool  // the volume has that size
	progress func(int64)
	device   *os.File // nil: the logical volume is not made yet
}

// receive writes r, up to its end, to the logical volume. Blocks of zeros take no space.
func (t *intake) receive(ctx context.Context, r io.Reader, limit int64) (filling, error) {
	defer func() {
		if t.device != nil {
			t.device.Close()
		}
	}()
	n, err := stream.Each(r, make([]byte, importBuffer), limit, func(part []byte, at int64) error { return t.write(ctx, part, at) })
	if err == nil {
		err = t.grow(ctx, n) // the stream may end with a hole, or be one
	}
	if err != nil {
		return filling{}, err
	}
	if err := t.device.Sync(); err != nil {
		return filling{}, fmt.Errorf("write to its device: %w", err)
	}
	return filling{size: t.size, allocated: t.s.allocated(state{LV: t.lv})}, nil
}

func (t *intake) write(ctx context.Context, part []byte, at int64) error {
	end := at + int64(len(part))
	if err := t.grow(ctx, end); err != nil {
		return err
	}
	if err := t.s.guard(); err != nil {
		return err
	}
	if err := sparse.WriteAt(t.device, part, at); err != nil {
		return fmt.Errorf("write to its device: %w", err)
	}
	sparse.Flush(t.device, at, int64(len(part))) // otherwise the final sync would wait for all of it
	if t.progress != nil {
		t.progress(end)
	}
	return nil
}

// grow makes the logical volume, or makes it at least size bytes long.
func (t *intake) grow(ctx context.Context, size int64) (err error) {
	if !t.fixed {
		was := t.size
		if t.size, err = t.s.round(max(size, volume.MinSize)); err != nil {
			return err
		}
		if t.device != nil && t.size > was {
			return t.s.extend(ctx, t.lv, t.size)
		}
	}
	if t.device != nil {
		return nil
	}
	if err := t.s.lvcreate(ctx, t.lv, t.size); err != nil {
		return err
	}
	if _, err := t.s.lvm.run(ctx, "lvchange", "-y", "-ay", "-K", t.s.vg+"/"+t.lv); err != nil {
		return err
	}
	t.device, err = t.s.openDevice(t.lv, os.O_RDWR)
	return err
}

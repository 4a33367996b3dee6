package cocoond

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"

	"cocoonstack.io/cocoon/internal/appliance"
	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image/compress"
	"cocoonstack.io/cocoon/internal/volume"
)

var _ appliance.Volumes = applianceVolumes{}

// applianceVolumes are the volumes of an appliance.
type applianceVolumes struct{ *engine.Volumes }

// Pools implements appliance.Volumes.
func (a applianceVolumes) Pools(ctx context.Context) []volume.Pool {
	p, ok := volume.As[volume.Pooled](a.Store)
	if !ok {
		return nil
	}
	return p.Pools(ctx)
}

// Export implements appliance.Carrier.
func (a applianceVolumes) Export(ctx context.Context, ref string, w io.Writer, compressed bool) error {
	if !compressed {
		return a.Volumes.Export(ctx, ref, w)
	}
	z, err := zstd.NewWriter(w, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1))
	if err != nil {
		return fmt.Errorf("compress a volume: %w", err)
	}
	if err := a.Volumes.Export(ctx, ref, z); err != nil {
		return errors.Join(err, z.Close()) // it frees memory; the stream ends with the error
	}
	return z.Close()
}

// Import implements appliance.Carrier.
func (a applianceVolumes) Import(ctx context.Context, s volume.Spec, r io.Reader, least, most int64) (volume.Volume, error) {
	plain, _, err := compress.Reader(r)
	if err != nil {
		return volume.Volume{}, err
	}
	defer plain.Close()
	var in io.Reader = plain
	if s.Size == 0 {
		in = &sized{from: plain, least: least, most: most}
	}
	return a.Volumes.Import(ctx, s, in, nil)
}

// sized is a stream of at most most bytes, with zeros at its end up to least bytes, unless it is empty.
type sized struct {
	from        io.Reader
	least, most int64
	read        int64
	ended       bool
}

func (s *sized) Read(p []byte) (int, error) {
	if !s.ended {
		n, err := s.from.Read(p)
		if s.read += int64(n); s.read > s.most {
			return 0, errdefs.Invalidf("the content has more than the %d bytes that a volume can have", s.most)
		}
		if s.ended = errors.Is(err, io.EOF); !s.ended || n > 0 {
			return n, filter(err)
		}
	}
	if s.read == 0 || s.read >= s.least {
		return 0, io.EOF
	}
	n := int(min(int64(len(p)), s.least-s.read))
	clear(p[:n])
	s.read += int64(n)
	return n, nil
}

// filter returns err, unless it is the end of a stream.
func filter(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

package distribution

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/zstd"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
)

// isDisk reports whether a manifest is a cloud image rather than a container image.
func isDisk(m *v1.Manifest) bool {
	return m.ArtifactType == artifactDisk || m.ArtifactType == artifactWindows
}

// disk stores a cloud image under the key: its layers one after the other.
func (p *pull) disk(ctx context.Context, m *v1.Manifest, top string) (image.Image, error) {
	var layers []v1.Descriptor
	p.total = 0
	for _, l := range m.Layers {
		kind := strings.TrimSuffix(strings.TrimSuffix(string(l.MediaType), suffixZstd), suffixPart)
		if kind != mediaRaw && kind != mediaQCOW2 && !strings.HasPrefix(kind, "application/vnd.cocoonstack.windows.disk.") {
			continue
		}
		if l.Digest.Algorithm != "sha256" || l.Size < 0 {
			return image.Image{}, errdefs.Invalidf("the layer %s cannot be a part of a disk", l.Digest)
		}
		layers = append(layers, l)
		p.total += l.Size
	}
	if len(layers) == 0 {
		return image.Image{}, errdefs.Invalidf("the cloud image %s has no layer with a disk", p.name)
	}
	slices.SortStableFunc(layers, func(a, b v1.Descriptor) int {
		return cmp.Or(cmp.Compare(a.Annotations[annotationTitle], b.Annotations[annotationTitle]), cmp.Compare(place(a), place(b)))
	})
	p.report(image.PhaseDownload, 0)
	r := &chain{ctx: ctx, p: p, layers: layers}
	defer r.Close()
	return p.c.store.Put(ctx, p.key, r, image.Fetched{
		Origin: image.Origin{URL: p.url(), Digest: top, FetchedAt: time.Now().UTC()}, Total: p.total,
		Progress: func(phase string, _ int64) {
			if phase != image.PhaseDownload {
				p.report(phase, 0)
			}
		},
	})
}

func place(d v1.Descriptor) int {
	n, err := strconv.Atoi(d.Annotations[annotationIndex])
	if err != nil {
		return 0
	}
	return n
}

// chain reads layers one after the other, each verified at its end.
type chain struct {
	ctx    context.Context //nolint:containedctx // of the one transfer that this value is
	p      *pull
	layers []v1.Descriptor

	blob  io.ReadCloser
	plain io.ReadCloser // blob, decompressed
}

func (c *chain) Read(b []byte) (int, error) {
	for {
		if c.plain == nil {
			if len(c.layers) == 0 {
				return 0, io.EOF
			}
			if err := c.open(c.layers[0]); err != nil {
				return 0, err
			}
			c.layers = c.layers[1:]
		}
		n, err := c.plain.Read(b)
		if n > 0 || err == nil {
			return n, nil
		}
		if err != io.EOF {
			return 0, err
		}
		if _, err := io.Copy(io.Discard, c.blob); err != nil { // read on to verify the digest
			return 0, err
		}
		c.Close()
	}
}

func (c *chain) open(d v1.Descriptor) error {
	b, err := c.p.layer(c.ctx, d)
	if err != nil {
		return err
	}
	c.blob, c.plain = b, b
	if strings.HasSuffix(string(d.MediaType), suffixZstd) {
		z, err := zstd.NewReader(b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(64<<20))
		if err != nil {
			return fmt.Errorf("decompress the layer %s: %w", d.Digest, err)
		}
		c.plain = z.IOReadCloser()
	}
	return nil
}

// Close ends the transfer.
func (c *chain) Close() {
	if c.plain != nil {
		c.plain.Close()
	}
	if c.blob != nil {
		c.blob.Close()
	}
	c.blob, c.plain = nil, nil
}

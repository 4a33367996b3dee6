package nodeclient

import (
	"context"
	"io"
	"sync/atomic"

	"google.golang.org/grpc"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodewire"
)

const importChunk = 256 << 10 // bytes

// ImportImage sends r to the node, which stores it as name[:tag]. progress may be nil; it is called with the number of
// bytes that the node has read. When reading r fails, or ctx ends, nothing is stored. A Read of r that is in progress
// when the node rejects the image finishes on its own.
func (c *Client) ImportImage(ctx context.Context, name string, r io.Reader, progress func(bytes int64)) (image.Image, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.images.Import(ctx)
	if err != nil {
		return image.Image{}, c.fail(err, nil)
	}
	var source atomic.Pointer[error] // a failure to read r
	go func() {
		if stream.Send(&nodev1.ImportRequest{Of: &nodev1.ImportRequest_Start{Start: &nodev1.ImportStart{Name: name}}}) != nil {
			return // Recv returns the error
		}
		err := upload("the image for "+name, r, func(b []byte) bool {
			return stream.Send(&nodev1.ImportRequest{Of: &nodev1.ImportRequest_Chunk{Chunk: b}}) == nil
		}, stream.CloseSend)
		if err != nil {
			source.Store(&err)
			cancel() // a normal end would look like the end of the image
		}
	}()
	for {
		m, err := stream.Recv()
		switch {
		case isEOF(err):
			return image.Image{}, errdefs.New(errdefs.Internal, "cocoond ended the import of %s without an answer", name)
		case err != nil:
			if readErr := source.Load(); readErr != nil {
				return image.Image{}, *readErr
			}
			return image.Image{}, c.fail(err, stream.Trailer())
		case m.GetImage() != nil:
			return nodewire.DecodeImage(m.GetImage()), nil
		case progress != nil:
			progress(m.GetReceived())
		}
	}
}

// upload sends r, or nothing when r is nil, in chunks and closes the stream. It returns only errors of r; Recv returns
// those of the stream.
func upload(what string, r io.Reader, send func([]byte) (ok bool), closeSend func() error) error {
	buf := make([]byte, importChunk)
	for r != nil {
		n, err := r.Read(buf)
		if n > 0 && !send(buf[:n]) {
			return nil
		}
		if isEOF(err) {
			break
		}
		if err != nil {
			return errdefs.New(errdefs.ClassOf(err), "read %s: %w", what, err)
		}
	}
	_ = closeSend() // Recv also returns a failure
	return nil
}

// GetImage resolves a name, name:tag, id or unique id prefix.
func (c *Client) GetImage(ctx context.Context, ref string) (image.Image, error) {
	return ask(ctx, c, c.images.Get, &nodev1.GetImageRequest{Ref: ref}, nodewire.DecodeImage)
}

// ListImages returns every image, sorted by name.
func (c *Client) ListImages(ctx context.Context) ([]image.Image, error) {
	return list(ctx, c, c.images.List, &nodev1.ListImagesRequest{}, nodewire.DecodeImage)
}

// RemoveImage removes the name ref; content that neither a name nor a VM uses is deleted.
func (c *Client) RemoveImage(ctx context.Context, ref string) error {
	return do(ctx, c, c.images.Remove, &nodev1.RemoveImageRequest{Ref: ref})
}

// Pull makes sure that an image is on the node; see image.Puller.
func (c *Client) Pull(ctx context.Context, r image.PullRequest, progress func(image.Progress)) (image.Image, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.images.Pull(ctx, nodewire.EncodePull(r))
	return c.pulled("pull", r.Name, stream, err, progress)
}

// PushImage sends an image to an OCI registry and returns it with its digest there; see image.Pusher.
func (c *Client) PushImage(ctx context.Context, r image.PushRequest, progress func(image.Progress)) (image.Image, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.images.Push(ctx, nodewire.EncodePushImage(r))
	return c.pulled("push", r.Ref, stream, err, progress)
}

// pulled follows a transfer of an image to its end.
func (c *Client) pulled(op, what string, stream grpc.ServerStreamingClient[nodev1.PullResponse], err error, progress func(image.Progress)) (image.Image, error) {
	var img *nodev1.Image
	err = receive(c, stream, err, func(m *nodev1.PullResponse) error {
		switch {
		case m.GetImage() != nil:
			img = m.GetImage()
		case progress != nil && m.GetProgress() != nil:
			progress(nodewire.DecodeProgress(m.GetProgress()))
		}
		return nil
	})
	switch {
	case err != nil:
		return image.Image{}, err
	case img == nil:
		return image.Image{}, errdefs.New(errdefs.Internal, "cocoond ended the %s of %s without an answer", op, what)
	}
	return nodewire.DecodeImage(img), nil
}

// Explain reports how the node resolves a name.
func (c *Client) Explain(ctx context.Context, name string) (image.Explanation, error) {
	return ask(ctx, c, c.images.Explain, &nodev1.ExplainRequest{Name: name}, nodewire.DecodeExplanation)
}

// CollectImages removes the images that limits allow to remove.
func (c *Client) CollectImages(ctx context.Context, limits image.GCLimits) (image.Collected, error) {
	return ask(ctx, c, c.images.Collect, nodewire.EncodeGCLimits(limits), nodewire.DecodeCollected)
}

// ExportImage writes an image in the format that ImportImage reads.
func (c *Client) ExportImage(ctx context.Context, ref string, w io.Writer) error {
	return follow(ctx, c, c.images.Export, &nodev1.ExportRequest{Ref: ref}, func(m *nodev1.ExportResponse) error {
		_, err := w.Write(m.GetChunk())
		return err
	})
}

// SyncMappings replaces the name mappings of source.
func (c *Client) SyncMappings(ctx context.Context, source string, mappings []image.Mapping) ([]image.MappingProblem, error) {
	return ask(ctx, c, c.images.SyncMappings, nodewire.EncodeMappings(source, mappings), nodewire.DecodeMappingProblems)
}

// Problems returns the problems with all name mappings of the node.
func (c *Client) Problems(ctx context.Context) ([]image.MappingProblem, error) {
	return ask(ctx, c, c.images.Problems, &nodev1.ProblemsRequest{}, nodewire.DecodeMappingProblems)
}

var _ image.Puller = (*Client)(nil)

package nodeapi

import (
	"bufio"
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodewire"
)

const progressStep = 4 << 20 // bytes between two reports of progress

type images struct {
	nodev1.UnimplementedImagesServer
	store  Images
	puller image.Puller
}

func (i *images) Import(stream nodev1.Images_ImportServer) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	if m.GetStart() == nil {
		return errdefs.Invalidf("the first message of an import must name the image")
	}
	var reported int64
	progress := func(n int64) {
		if n-reported < progressStep {
			return
		}
		reported = n
		// If the client is gone, the next Recv fails.
		_ = stream.Send(&nodev1.ImportResponse{Of: &nodev1.ImportResponse_Received{Received: n}})
	}
	next := func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetChunk(), err
	}
	img, err := i.store.Import(stream.Context(), m.GetStart().GetName(), &chunks{what: "image", next: next}, progress)
	if err != nil {
		return err
	}
	return stream.Send(&nodev1.ImportResponse{Of: &nodev1.ImportResponse_Image{Image: nodewire.EncodeImage(img)}})
}

// chunks reads what a client sends in its messages. It ends with io.EOF only if the client closed its side properly.
type chunks struct {
	what string
	next func() ([]byte, error)
	left []byte
}

func (c *chunks) Read(p []byte) (int, error) {
	for len(c.left) == 0 {
		b, err := c.next()
		if errors.Is(err, io.EOF) {
			return 0, io.EOF
		}
		if err != nil {
			return 0, errdefs.New(errdefs.Canceled, "the client stopped sending the %s: %w", c.what, err)
		}
		c.left = b
	}
	n := copy(p, c.left)
	c.left = c.left[n:]
	return n, nil
}

func (i *images) List(_ *nodev1.ListImagesRequest, stream grpc.ServerStreamingServer[nodev1.Image]) error {
	return sendAll(stream, nodewire.EncodeImage)(i.store.List(stream.Context()))
}

func (i *images) Get(ctx context.Context, r *nodev1.GetImageRequest) (*nodev1.Image, error) {
	return answer(nodewire.EncodeImage)(i.store.Get(ctx, r.GetRef()))
}

func (i *images) Remove(ctx context.Context, r *nodev1.RemoveImageRequest) (*nodev1.RemoveImageResponse, error) {
	return &nodev1.RemoveImageResponse{}, i.store.Remove(ctx, r.GetRef())
}

func (i *images) Pull(r *nodev1.PullRequest, stream grpc.ServerStreamingServer[nodev1.PullResponse]) error {
	return transferImage(stream, func(progress func(image.Progress)) (image.Image, error) {
		return i.puller.Pull(stream.Context(), nodewire.DecodePull(r), progress)
	})
}

func (i *images) Push(r *nodev1.PushImageRequest, stream grpc.ServerStreamingServer[nodev1.PullResponse]) error {
	return transferImage(stream, func(progress func(image.Progress)) (image.Image, error) {
		return i.store.Push(stream.Context(), nodewire.DecodePushImage(r), progress)
	})
}

// transferImage sends the progress of run and then its image.
func transferImage(stream grpc.ServerStreamingServer[nodev1.PullResponse], run func(func(image.Progress)) (image.Image, error)) error {
	out := newReporter(func(p image.Progress) error {
		return stream.Send(&nodev1.PullResponse{Of: &nodev1.PullResponse_Progress{Progress: nodewire.EncodeProgress(p)}})
	}, func(p image.Progress) string { return p.Phase })
	img, err := run(out.report)
	if err != nil {
		return err
	}
	return out.end(func() error {
		return stream.Send(&nodev1.PullResponse{Of: &nodev1.PullResponse_Image{Image: nodewire.EncodeImage(img)}})
	})
}

func (i *images) Explain(ctx context.Context, r *nodev1.ExplainRequest) (*nodev1.ExplainResponse, error) {
	return answer(nodewire.EncodeExplanation)(i.puller.Explain(ctx, r.GetName()))
}

func (i *images) Collect(ctx context.Context, r *nodev1.CollectRequest) (*nodev1.CollectResponse, error) {
	return answer(nodewire.EncodeCollected)(i.store.Collect(ctx, nodewire.DecodeGCLimits(r)))
}

func (i *images) Export(r *nodev1.ExportRequest, stream grpc.ServerStreamingServer[nodev1.ExportResponse]) error {
	w := exportWriter(stream)
	if err := i.store.Export(stream.Context(), r.GetRef(), w); err != nil {
		return err
	}
	return w.Flush()
}

// exportWriter sends what is written as messages of at most exportChunk bytes.
func exportWriter(stream grpc.ServerStreamingServer[nodev1.ExportResponse]) *bufio.Writer {
	return bufio.NewWriterSize(chunkWriter(func(b []byte) error { return stream.Send(&nodev1.ExportResponse{Chunk: b}) }), exportChunk)
}

type chunkWriter func([]byte) error

func (send chunkWriter) Write(p []byte) (int, error) {
	for done := 0; done < len(p); {
		n := min(exportChunk, len(p)-done)
		if err := send(p[done : done+n]); err != nil {
			return done, err
		}
		done += n
	}
	return len(p), nil
}

func (i *images) SyncMappings(ctx context.Context, r *nodev1.SyncMappingsRequest) (*nodev1.MappingProblems, error) {
	source, mappings := nodewire.DecodeMappings(r)
	return answer(nodewire.EncodeMappingProblems)(i.puller.SyncMappings(ctx, source, mappings))
}

func (i *images) Problems(ctx context.Context, _ *nodev1.ProblemsRequest) (*nodev1.MappingProblems, error) {
	return answer(nodewire.EncodeMappingProblems)(i.puller.Problems(ctx))
}

package appliance

import (
	"bytes"
	"context"
	"errors"
	"io"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/volume"
)

// exportChunk is the size of the messages of an export, in bytes.
const exportChunk = 1 << 20

// Export implements capsulev1.VolumeServiceServer.
func (v *volumes) Export(req *capsulev1.VolumeExportRequest, stream capsulev1.VolumeService_ExportServer) error {
	x, err := v.idle(stream.Context(), req.GetName())
	if err != nil {
		return err
	}
	w := &exporter{send: stream.Send, size: uint64(max(x.Size, 0))}
	if err := v.door.deps.Volumes.Export(stream.Context(), string(x.ID), w, !req.GetRaw()); err != nil {
		return err
	}
	return w.flush()
}

// exporter sends what is written in messages of exportChunk bytes.
type exporter struct {
	send func(*capsulev1.VolumeExportChunk) error
	size uint64 // for the first message; 0 later
	buf  []byte
}

func (e *exporter) Write(p []byte) (int, error) {
	e.buf = append(e.buf, p...)
	for len(e.buf) >= exportChunk {
		if err := e.pass(e.buf[:exportChunk]); err != nil {
			return 0, err
		}
		e.buf = append(e.buf[:0], e.buf[exportChunk:]...)
	}
	return len(p), nil
}

func (e *exporter) flush() error { return e.pass(e.buf) }

func (e *exporter) pass(p []byte) error {
	m := &capsulev1.VolumeExportChunk{Data: bytes.Clone(p), SizeBytes: e.size}
	e.size = 0
	return e.send(m)
}

// Import implements capsulev1.VolumeServiceServer.
func (v *volumes) Import(stream capsulev1.VolumeService_ImportServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	meta := first.GetMetadata()
	if meta == nil {
		return errdefs.Invalidf("the first message of an import names the volume")
	}
	if err := workload.ValidateName(meta.GetName()); err != nil {
		return err
	}
	if err := v.door.mayTouch(stream.Context(), meta.GetName()); err != nil {
		return err
	}
	spec := volume.Spec{Kind: v.door.cfg.VolumeKind, Name: meta.GetName()}
	if meta.GetSizeMib() != 0 {
		if spec.Size, err = mib(meta.GetSizeMib()); err != nil {
			return err
		}
	}
	in := &chunks{next: func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetChunk(), err
	}}
	x, err := v.door.deps.Volumes.Import(stream.Context(), spec, &announced{from: in, total: meta.GetTotalBytes()}, minVolume<<20, maxVolume<<20)
	if err != nil {
		return err
	}
	return stream.SendAndClose(v.encode(x))
}

// announced is a stream whose end counts only after as many bytes as were announced.
type announced struct {
	from  *chunks
	total uint64 // 0: unknown
}

func (a *announced) Read(p []byte) (int, error) {
	n, err := a.from.Read(p)
	if read := uint64(a.from.read); errors.Is(err, io.EOF) && a.total != 0 && read != a.total {
		return n, errdefs.Invalidf("%d bytes have arrived of %d; send it again", read, a.total)
	}
	return n, err
}

// Carrier writes volumes to streams, and makes volumes of them.
type Carrier interface {
	// Export writes the content of a volume, compressed with zstd or as it is.
	// Errors: NotFound, FailedPrecondition while it is attached to something that writes.
	Export(ctx context.Context, ref string, w io.Writer, compressed bool) error
	// Import makes a volume of r up to its end, which may be compressed. A volume without a size in s has at least least and at most most
	// bytes. The whole volume is stored, or nothing is. Errors: InvalidArgument, AlreadyExists, ResourceExhausted, DataLoss.
	Import(ctx context.Context, s volume.Spec, r io.Reader, least, most int64) (volume.Volume, error)
}

package capsulectl_test

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

func (s *volumeServer) Snapshot(_ context.Context, r *capsulev1.VolumeSnapshotRequest) (*capsulev1.VolumeSnapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, "snapshot "+r.GetVolume()+" "+r.GetName())
	return &capsulev1.VolumeSnapshot{Name: r.GetName(), Volume: r.GetVolume(), SizeBytes: 32 << 20}, nil
}

func (*volumeServer) SnapshotList(context.Context, *capsulev1.VolumeSnapshotListRequest) (*capsulev1.VolumeSnapshotListResponse, error) {
	return &capsulev1.VolumeSnapshotListResponse{Snapshots: []*capsulev1.VolumeSnapshot{{Name: "before", Volume: "data", SizeBytes: 32 << 20}}}, nil
}

func (*volumeServer) SnapshotDelete(_ context.Context, r *capsulev1.VolumeSnapshotDeleteRequest) (*capsulev1.VolumeSnapshotDeleteResponse, error) {
	if r.GetName() != "before" {
		return nil, errdefs.NotFoundf("there is no snapshot %s", r.GetName())
	}
	return &capsulev1.VolumeSnapshotDeleteResponse{}, nil
}

func (s *volumeServer) Clone(_ context.Context, r *capsulev1.VolumeCloneRequest) (*capsulev1.Volume, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, "clone "+r.GetVolume()+"/"+r.GetSnapshot()+" "+r.GetName())
	return &capsulev1.Volume{Name: r.GetName(), SizeBytes: max(r.GetSizeMib(), 32) << 20}, nil
}

func (s *volumeServer) Rollback(_ context.Context, r *capsulev1.VolumeRollbackRequest) (*capsulev1.Volume, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, "rollback "+r.GetName()+" "+r.GetSnapshot())
	return &capsulev1.Volume{Name: r.GetName(), SizeBytes: 32 << 20}, nil
}

// Export sends 3000 bytes, and breaks off the volume "cut".
func (*volumeServer) Export(r *capsulev1.VolumeExportRequest, stream grpc.ServerStreamingServer[capsulev1.VolumeExportChunk]) error {
	if r.GetName() == "none" {
		return errdefs.NotFoundf("there is no volume none")
	}
	for i := range 3 {
		if r.GetName() == "cut" && i == 2 {
			return errdefs.New(errdefs.Internal, "the disk failed")
		}
		if r.GetName() == "short" && i == 2 {
			return nil
		}
		m := &capsulev1.VolumeExportChunk{Data: make([]byte, 1000)}
		if i == 0 {
			m.SizeBytes = 3000
		}
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	return nil
}

func (s *volumeServer) Import(stream grpc.ClientStreamingServer[capsulev1.VolumeImportRequest, capsulev1.Volume]) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	n := 0
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		n += len(r.GetChunk())
	}
	if total := first.GetMetadata().GetTotalBytes(); total != 0 && total != uint64(n) {
		return errdefs.Invalidf("%d bytes have arrived of %d", n, total)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pushed = n
	return stream.SendAndClose(&capsulev1.Volume{Name: first.GetMetadata().GetName(), SizeBytes: max(first.GetMetadata().GetSizeMib(), 32) << 20})
}

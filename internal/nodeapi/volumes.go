package nodeapi

import (
	"context"

	"google.golang.org/grpc"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/volume"
)

// Volumes is the volume store, with all its abilities.
type Volumes interface {
	volume.Store
	volume.Maker
	volume.Snapshotter
	volume.Cloner
	volume.Carrier
	// Grow is Resize. It says which VMs do not use the new size yet.
	Grow(ctx context.Context, ref string, size int64) (volume.Resized, error)
}

// VolumeFiller makes volumes from images; catalog.Filler does.
type VolumeFiller interface {
	FromImage(ctx context.Context, s volume.Spec, from image.PullRequest, progress func(image.Progress)) (volume.Volume, error)
}

type volumes struct {
	nodev1.UnimplementedVolumesServer
	store  Volumes
	filler VolumeFiller // nil: none
}

// one answers a call with a volume and its figures.
func (s *volumes) one(ctx context.Context, v volume.Volume, err error) (*nodev1.StoredVolume, error) {
	if err != nil {
		return nil, err
	}
	out, err := s.figures(ctx, v)
	return nodewire.EncodeStoredVolume(out), err
}

func (s *volumes) figures(ctx context.Context, v volume.Volume) (nodewire.StoredVolume, error) {
	usage, err := s.store.Usage(ctx)
	return nodewire.StoredVolume{Volume: v, Allocated: usage[v.ID].Allocated}, err
}

func (s *volumes) Create(ctx context.Context, r *nodev1.CreateVolumeRequest) (*nodev1.StoredVolume, error) {
	v, err := s.store.Create(ctx, nodewire.DecodeVolumeSpec(r.GetSpec()))
	return s.one(ctx, v, err)
}

func (s *volumes) List(_ *nodev1.ListVolumesRequest, stream grpc.ServerStreamingServer[nodev1.StoredVolume]) error {
	all, err := s.store.List(stream.Context())
	if err != nil {
		return err
	}
	usage, err := s.store.Usage(stream.Context())
	return sendAll(stream, func(v volume.Volume) *nodev1.StoredVolume {
		return nodewire.EncodeStoredVolume(nodewire.StoredVolume{Volume: v, Allocated: usage[v.ID].Allocated})
	})(all, err)
}

func (s *volumes) Inspect(ctx context.Context, r *nodev1.InspectVolumeRequest) (*nodev1.StoredVolume, error) {
	v, err := s.store.Get(ctx, r.GetRef())
	return s.one(ctx, v, err)
}

func (s *volumes) Resize(ctx context.Context, r *nodev1.ResizeVolumeRequest) (*nodev1.ResizeVolumeResponse, error) {
	v, err := s.store.Grow(ctx, r.GetRef(), r.GetSize())
	if err != nil {
		return nil, err
	}
	out, err := s.figures(ctx, v.Volume)
	return nodewire.EncodeResizedVolume(nodewire.ResizedVolume{StoredVolume: out, Waiting: v.Waiting}), err
}

func (s *volumes) Remove(ctx context.Context, r *nodev1.RemoveVolumeRequest) (*nodev1.RemoveVolumeResponse, error) {
	return &nodev1.RemoveVolumeResponse{}, s.store.Delete(ctx, r.GetRef())
}

func (s *volumes) Clone(ctx context.Context, r *nodev1.CloneVolumeRequest) (*nodev1.StoredVolume, error) {
	clone := s.store.Clone
	if r.GetSnapshot() {
		clone = s.store.FromSnapshot
	}
	v, err := clone(ctx, r.GetRef(), nodewire.DecodeVolumeSpec(r.GetSpec()))
	return s.one(ctx, v, err)
}

func (s *volumes) Restore(ctx context.Context, r *nodev1.RestoreVolumeRequest) (*nodev1.StoredVolume, error) {
	v, err := s.store.Restore(ctx, r.GetRef(), r.GetSnapshot())
	return s.one(ctx, v, err)
}

func (s *volumes) Save(ctx context.Context, r *nodev1.SaveVolumeRequest) (*nodev1.VolumeSnapshot, error) {
	return answer(nodewire.EncodeVolumeSnapshot)(s.store.Snapshot(ctx, r.GetRef(), nodewire.DecodeVolumeSpec(r.GetSpec())))
}

func (s *volumes) ListSnapshots(_ *nodev1.ListVolumeSnapshotsRequest, stream grpc.ServerStreamingServer[nodev1.VolumeSnapshot]) error {
	return sendAll(stream, nodewire.EncodeVolumeSnapshot)(s.store.Snapshots(stream.Context()))
}

func (s *volumes) InspectSnapshot(ctx context.Context, r *nodev1.InspectVolumeSnapshotRequest) (*nodev1.VolumeSnapshot, error) {
	return answer(nodewire.EncodeVolumeSnapshot)(s.store.GetSnapshot(ctx, r.GetRef()))
}

func (s *volumes) RemoveSnapshot(ctx context.Context, r *nodev1.RemoveVolumeSnapshotRequest) (*nodev1.RemoveVolumeSnapshotResponse, error) {
	return &nodev1.RemoveVolumeSnapshotResponse{}, s.store.DeleteSnapshot(ctx, r.GetRef())
}

func (s *volumes) Export(r *nodev1.ExportVolumeRequest, stream grpc.ServerStreamingServer[nodev1.ExportResponse]) error {
	w := exportWriter(stream)
	if err := s.store.Export(stream.Context(), r.GetRef(), w); err != nil {
		return err
	}
	return w.Flush()
}

func (s *volumes) Import(stream grpc.ClientStreamingServer[nodev1.ImportVolumeRequest, nodev1.StoredVolume]) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	if m.GetStart() == nil {
		return errdefs.Invalidf("the first message of an import must be its start")
	}
	next := func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetChunk(), err
	}
	v, err := s.store.Import(stream.Context(), nodewire.DecodeVolumeSpec(m.GetStart()), &chunks{what: "volume", next: next}, nil)
	out, err := s.one(stream.Context(), v, err)
	if err != nil {
		return err
	}
	return stream.SendAndClose(out)
}

func (s *volumes) FromImage(r *nodev1.VolumeFromImageRequest, stream grpc.ServerStreamingServer[nodev1.VolumeFromImageResponse]) error {
	if s.filler == nil {
		return errdefs.Unsupportedf("this node makes no volumes from images")
	}
	out := newReporter(func(p image.Progress) error {
		return stream.Send(&nodev1.VolumeFromImageResponse{Of: &nodev1.VolumeFromImageResponse_Progress{Progress: nodewire.EncodeProgress(p)}})
	}, func(p image.Progress) string { return p.Phase })
	v, err := s.filler.FromImage(stream.Context(), nodewire.DecodeVolumeSpec(r.GetSpec()), nodewire.DecodePull(r.GetImage()), out.report)
	made, err := s.one(stream.Context(), v, err)
	if err != nil {
		return err
	}
	return out.end(func() error {
		return stream.Send(&nodev1.VolumeFromImageResponse{Of: &nodev1.VolumeFromImageResponse_Volume{Volume: made}})
	})
}

package nodeapi

import (
	"context"

	"google.golang.org/grpc"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/vm"
)

// Plugins publishes volumes of CSI drivers that run on this machine, on behalf of the owner in the key.
type Plugins interface {
	Drivers() (now []csinode.Driver, changed <-chan struct{})
	Publish(ctx context.Context, r csinode.Request) (nodewire.Published, error)
	Unpublish(ctx context.Context, k csinode.Key) error
	List(ctx context.Context) ([]nodewire.Published, error)
	Usage(ctx context.Context, k csinode.Key) (csinode.Usage, error)
	Grow(ctx context.Context, k csinode.Key, size int64) (int64, error)
}

type plugins struct {
	nodev1.UnimplementedPluginsServer
	node Plugins
}

// key is the key in m, of a volume of the owner on whose behalf the call is made.
func key(ctx context.Context, m *nodev1.VolumeKey) csinode.Key {
	return nodewire.DecodeVolumeKey(vm.Behalf(ctx), m)
}

func (s *plugins) Watch(_ *nodev1.WatchDriversRequest, stream grpc.ServerStreamingServer[nodev1.Drivers]) error {
	for {
		now, changed := s.node.Drivers()
		if err := stream.Send(nodewire.EncodeDrivers(now)); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (s *plugins) Publish(ctx context.Context, r *nodev1.PublishVolumeRequest) (*nodev1.PublishedVolume, error) {
	return answer(nodewire.EncodePublished)(s.node.Publish(ctx, nodewire.DecodePublish(vm.Behalf(ctx), r)))
}

func (s *plugins) Unpublish(ctx context.Context, r *nodev1.UnpublishVolumeRequest) (*nodev1.UnpublishVolumeResponse, error) {
	return &nodev1.UnpublishVolumeResponse{}, s.node.Unpublish(ctx, key(ctx, r.GetKey()))
}

func (s *plugins) List(_ *nodev1.ListPublishedRequest, stream grpc.ServerStreamingServer[nodev1.PublishedVolume]) error {
	return sendAll(stream, nodewire.EncodePublished)(s.node.List(stream.Context()))
}

func (s *plugins) Usage(ctx context.Context, r *nodev1.PublishedUsageRequest) (*nodev1.PublishedUsage, error) {
	return answer(nodewire.EncodePublishedUsage)(s.node.Usage(ctx, key(ctx, r.GetKey())))
}

func (s *plugins) Grow(ctx context.Context, r *nodev1.GrowPublishedRequest) (*nodev1.GrowPublishedResponse, error) {
	size, err := s.node.Grow(ctx, key(ctx, r.GetKey()), r.GetSize())
	if err != nil {
		return nil, err
	}
	return &nodev1.GrowPublishedResponse{Size: size}, nil
}

package nodeclient

import (
	"context"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/vm"
)

// WatchDrivers calls fn with the CSI drivers of the node, and again at each change, until ctx ends or fn fails.
// Errors: Unsupported if the node is not configured for drivers.
func (c *Client) WatchDrivers(ctx context.Context, fn func([]csinode.Driver) error) error {
	return follow(ctx, c, c.plugins.Watch, &nodev1.WatchDriversRequest{}, func(m *nodev1.Drivers) error { return fn(nodewire.DecodeDrivers(m)) })
}

// PublishVolume stages and publishes a volume of a CSI driver for the owner in its key.
func (c *Client) PublishVolume(ctx context.Context, r csinode.Request) (nodewire.Published, error) {
	return ask(vm.OnBehalf(ctx, r.Owner), c, c.plugins.Publish, nodewire.EncodePublish(r), nodewire.DecodePublished)
}

// UnpublishVolume ends what PublishVolume has made. Errors: FailedPrecondition while a VM has the volume.
func (c *Client) UnpublishVolume(ctx context.Context, k csinode.Key) error {
	return do(vm.OnBehalf(ctx, k.Owner), c, c.plugins.Unpublish, &nodev1.UnpublishVolumeRequest{Key: nodewire.EncodeVolumeKey(k)})
}

// ListPublished returns the published volumes.
func (c *Client) ListPublished(ctx context.Context) ([]nodewire.Published, error) {
	return list(ctx, c, c.plugins.List, &nodev1.ListPublishedRequest{}, nodewire.DecodePublished)
}

// PublishedUsage asks the driver of a published volume how full it is.
func (c *Client) PublishedUsage(ctx context.Context, k csinode.Key) (csinode.Usage, error) {
	return ask(vm.OnBehalf(ctx, k.Owner), c, c.plugins.Usage, &nodev1.PublishedUsageRequest{Key: nodewire.EncodeVolumeKey(k)}, nodewire.DecodePublishedUsage)
}

// GrowPublished makes the driver of a published volume grow it on the node to size bytes, and returns what it has then.
func (c *Client) GrowPublished(ctx context.Context, k csinode.Key, size int64) (int64, error) {
	return ask(vm.OnBehalf(ctx, k.Owner), c, c.plugins.Grow, &nodev1.GrowPublishedRequest{Key: nodewire.EncodeVolumeKey(k), Size: size}, (*nodev1.GrowPublishedResponse).GetSize)
}

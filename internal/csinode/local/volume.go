package local

import (
	"context"
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"cocoonstack.io/cocoon/internal/csinode"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
)

// ready returns a publication that is ready, and its driver, which must have the capability needs; what is an ability for the message.
// Errors: NotFound, FailedPrecondition, Unavailable, Unsupported, DataLoss.
func (n *Node) ready(k csinode.Key, needs csi.NodeServiceCapability_RPC_Type, what string) (record, *driver, error) {
	e, found, err := n.entry(k)
	if err == nil && !found {
		err = errdefs.NotFoundf("it is not published")
	}
	if err != nil {
		return record{}, nil, err
	}
	if e.rec.Boot != n.boot {
		return record{}, nil, errdefs.Preconditionf("it is not published completely since the machine started; publish it again first")
	}
	d, err := n.registry.driver(e.rec.Driver)
	if err != nil {
		return record{}, nil, err
	}
	if !d.can[needs] {
		return record{}, nil, errdefs.Unsupportedf("CSI driver %s cannot %s", d.Name, what)
	}
	return e.rec, d, nil
}

// Usage returns how full a published volume is, as its driver tells.
// Errors: NotFound, FailedPrecondition if it is not ready, Unavailable, Unsupported if the driver does not know, the classes of the driver.
func (n *Node) Usage(ctx context.Context, k csinode.Key) (csinode.Usage, error) {
	u, err := n.usage(ctx, k)
	if err != nil {
		return csinode.Usage{}, fmt.Errorf("usage of %s: %w", k, err)
	}
	return u, nil
}

func (n *Node) usage(ctx context.Context, k csinode.Key) (csinode.Usage, error) {
	rec, d, err := n.ready(k, csi.NodeServiceCapability_RPC_GET_VOLUME_STATS, "tell how full a volume is")
	if err != nil {
		return csinode.Usage{}, err
	}
	var answer *csi.NodeGetVolumeStatsResponse
	if err := d.node(ctx, "NodeGetVolumeStats", n.limits.ask, nil, func(ctx context.Context, c csi.NodeClient) (err error) {
		answer, err = c.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
			VolumeId: rec.Handle, VolumePath: n.target(k), StagingTargetPath: n.stagingOf(rec),
		})
		return err
	}); err != nil {
		return csinode.Usage{}, err
	}
	var u csinode.Usage
	for _, a := range answer.GetUsage() {
		amount := csinode.Amount{Total: max(0, a.GetTotal()), Used: max(0, a.GetUsed()), Available: max(0, a.GetAvailable())}
		switch a.GetUnit() {
		case csi.VolumeUsage_BYTES:
			u.Bytes = amount
		case csi.VolumeUsage_INODES:
			u.Inodes = amount
		default: // a unit of a later specification
		}
	}
	if c := answer.GetVolumeCondition(); c.GetAbnormal() {
		if u.Abnormal = grpcerr.Clean(c.GetMessage()); u.Abnormal == "" {
			u.Abnormal = "the driver does not say what"
		}
	}
	return u, nil
}

// Grow makes the driver grow a published volume on this node to size bytes, as far as the node has a part in it. It returns the size that
// the volume then has, in bytes. The volume itself must have been grown before.
// Errors: InvalidArgument, NotFound, FailedPrecondition if it is not ready, Unavailable, Unsupported if the driver grows nothing on nodes,
// the classes of the driver.
func (n *Node) Grow(ctx context.Context, k csinode.Key, size int64) (int64, error) {
	got, err := n.grow(ctx, k, size)
	if err != nil {
		return 0, fmt.Errorf("grow %s to %d bytes: %w", k, size, err)
	}
	return got, nil
}

func (n *Node) grow(ctx context.Context, k csinode.Key, size int64) (int64, error) {
	if size <= 0 {
		return 0, errdefs.Invalidf("the size is not positive")
	}
	rec, _, err := n.ready(k, csi.NodeServiceCapability_RPC_EXPAND_VOLUME, "grow a volume on a node")
	if err != nil {
		return 0, err
	}
	unlock, err := n.lockBoth(ctx, k, func() (string, error) { return volumeID(rec.Driver, rec.Handle), nil })
	if err != nil {
		return 0, err
	}
	defer unlock()
	rec, d, err := n.ready(k, csi.NodeServiceCapability_RPC_EXPAND_VOLUME, "grow a volume on a node") // it may have changed
	if err != nil {
		return 0, err
	}
	var answer *csi.NodeExpandVolumeResponse
	if err := d.node(ctx, "NodeExpandVolume", n.limits.change, nil, func(ctx context.Context, c csi.NodeClient) (err error) {
		answer, err = c.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
			VolumeId: rec.Handle, VolumePath: n.target(k), StagingTargetPath: n.stagingOf(rec),
			CapacityRange:    &csi.CapacityRange{RequiredBytes: size},
			VolumeCapability: d.capability(&csinode.Request{Access: rec.Access, Mode: rec.Mode, FSType: rec.FSType}),
		})
		return err
	}); err != nil {
		return 0, err
	}
	if got := answer.GetCapacityBytes(); got > 0 {
		return got, nil
	}
	return size, nil // the driver does not say
}

package nodeclient

import (
	"context"
	"errors"
	"io"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/volume"
)

// CreateVolume makes an empty volume.
func (c *Client) CreateVolume(ctx context.Context, s volume.Spec) (nodewire.StoredVolume, error) {
	return ask(ctx, c, c.volumes.Create, &nodev1.CreateVolumeRequest{Spec: nodewire.EncodeVolumeSpec(s)}, nodewire.DecodeStoredVolume)
}

// GetVolume resolves a name, an id or a unique prefix of one.
func (c *Client) GetVolume(ctx context.Context, ref string) (nodewire.StoredVolume, error) {
	return ask(ctx, c, c.volumes.Inspect, &nodev1.InspectVolumeRequest{Ref: ref}, nodewire.DecodeStoredVolume)
}

// ListVolumes returns every volume, sorted by owner and name.
func (c *Client) ListVolumes(ctx context.Context) ([]nodewire.StoredVolume, error) {
	return list(ctx, c, c.volumes.List, &nodev1.ListVolumesRequest{}, nodewire.DecodeStoredVolume)
}

// ResizeVolume grows a volume to size bytes, and says which VMs do not use them yet.
func (c *Client) ResizeVolume(ctx context.Context, ref string, size int64) (nodewire.ResizedVolume, error) {
	return ask(ctx, c, c.volumes.Resize, &nodev1.ResizeVolumeRequest{Ref: ref, Size: size}, nodewire.DecodeResizedVolume)
}

// RemoveVolume deletes a volume that no VM has attached.
func (c *Client) RemoveVolume(ctx context.Context, ref string) error {
	return do(ctx, c, c.volumes.Remove, &nodev1.RemoveVolumeRequest{Ref: ref})
}

// CloneVolume copies a volume.
func (c *Client) CloneVolume(ctx context.Context, ref string, s volume.Spec) (nodewire.StoredVolume, error) {
	return ask(ctx, c, c.volumes.Clone, &nodev1.CloneVolumeRequest{Ref: ref, Spec: nodewire.EncodeVolumeSpec(s)}, nodewire.DecodeStoredVolume)
}

// VolumeFromSnapshot makes a volume of a snapshot.
func (c *Client) VolumeFromSnapshot(ctx context.Context, ref string, s volume.Spec) (nodewire.StoredVolume, error) {
	return ask(ctx, c, c.volumes.Clone, &nodev1.CloneVolumeRequest{Ref: ref, Snapshot: true, Spec: nodewire.EncodeVolumeSpec(s)}, nodewire.DecodeStoredVolume)
}

// VolumeFromImage makes a volume with the disk of an image. progress may be nil. When ctx ends before, nothing is stored.
func (c *Client) VolumeFromImage(ctx context.Context, s volume.Spec, from image.PullRequest, progress func(image.Progress)) (nodewire.StoredVolume, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.volumes.FromImage(ctx, &nodev1.VolumeFromImageRequest{Spec: nodewire.EncodeVolumeSpec(s), Image: nodewire.EncodePull(from)})
	var made *nodev1.StoredVolume
	err = receive(c, stream, err, func(m *nodev1.VolumeFromImageResponse) error {
		switch {
		case m.GetVolume() != nil:
			made = m.GetVolume()
		case progress != nil && m.GetProgress() != nil:
			progress(nodewire.DecodeProgress(m.GetProgress()))
		}
		return nil
	})
	switch {
	case err != nil:
		return nodewire.StoredVolume{}, err
	case made == nil:
		return nodewire.StoredVolume{}, errdefs.New(errdefs.Internal, "cocoond ended the making of volume %s without an answer", s.Name)
	}
	return nodewire.DecodeStoredVolume(made), nil
}

// RestoreVolume returns a volume to a snapshot of it.
func (c *Client) RestoreVolume(ctx context.Context, ref, snapshot string) (nodewire.StoredVolume, error) {
	return ask(ctx, c, c.volumes.Restore, &nodev1.RestoreVolumeRequest{Ref: ref, Snapshot: snapshot}, nodewire.DecodeStoredVolume)
}

// SaveVolume takes a snapshot of a volume.
func (c *Client) SaveVolume(ctx context.Context, ref string, s volume.Spec) (volume.Snapshot, error) {
	return ask(ctx, c, c.volumes.Save, &nodev1.SaveVolumeRequest{Ref: ref, Spec: nodewire.EncodeVolumeSpec(s)}, nodewire.DecodeVolumeSnapshot)
}

// ListVolumeSnapshots returns every snapshot of a volume, sorted by owner and name.
func (c *Client) ListVolumeSnapshots(ctx context.Context) ([]volume.Snapshot, error) {
	return list(ctx, c, c.volumes.ListSnapshots, &nodev1.ListVolumeSnapshotsRequest{}, nodewire.DecodeVolumeSnapshot)
}

// GetVolumeSnapshot resolves a name, an id or a unique prefix of one.
func (c *Client) GetVolumeSnapshot(ctx context.Context, ref string) (volume.Snapshot, error) {
	return ask(ctx, c, c.volumes.InspectSnapshot, &nodev1.InspectVolumeSnapshotRequest{Ref: ref}, nodewire.DecodeVolumeSnapshot)
}

// RemoveVolumeSnapshot deletes a snapshot of a volume.
func (c *Client) RemoveVolumeSnapshot(ctx context.Context, ref string) error {
	return do(ctx, c, c.volumes.RemoveSnapshot, &nodev1.RemoveVolumeSnapshotRequest{Ref: ref})
}

// ExportVolume writes the bytes of a volume.
func (c *Client) ExportVolume(ctx context.Context, ref string, w io.Writer) error {
	return follow(ctx, c, c.volumes.Export, &nodev1.ExportVolumeRequest{Ref: ref}, func(m *nodev1.ExportResponse) error {
		_, err := w.Write(m.GetChunk())
		return err
	})
}

// ImportVolume makes a volume of the bytes of r. When reading r fails, or ctx ends, nothing is stored.
func (c *Client) ImportVolume(ctx context.Context, s volume.Spec, r io.Reader) (nodewire.StoredVolume, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.volumes.Import(ctx)
	if err != nil {
		return nodewire.StoredVolume{}, c.fail(err, nil)
	}
	err = stream.Send(&nodev1.ImportVolumeRequest{Of: &nodev1.ImportVolumeRequest_Start{Start: nodewire.EncodeVolumeSpec(s)}})
	if err == nil {
		err = upload("the volume", r, func(b []byte) bool {
			return stream.Send(&nodev1.ImportVolumeRequest{Of: &nodev1.ImportVolumeRequest_Chunk{Chunk: b}}) == nil
		}, func() error { return nil })
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return nodewire.StoredVolume{}, err
	}
	m, err := stream.CloseAndRecv()
	if err != nil {
		return nodewire.StoredVolume{}, c.fail(err, stream.Trailer())
	}
	return nodewire.DecodeStoredVolume(m), nil
}

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
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// SaveSnapshot saves the VM of ref: a running one with its memory, while it keeps running; a stopped one with its
// disks.
func (c *Client) SaveSnapshot(ctx context.Context, ref string, s vm.SaveSpec) (snapshot.Snapshot, error) {
	return ask(ctx, c, c.snapshots.Save, nodewire.EncodeSave(ref, s), nodewire.DecodeSnapshot)
}

// Clone makes a VM that resumes from a snapshot. It returns when its CPUs run; the VM is ready once its guest is set
// up.
func (c *Client) Clone(ctx context.Context, s vm.CloneSpec) (vm.Record, error) {
	return ask(ctx, c, c.vms.Clone, nodewire.EncodeClone(s, false, nil), nodewire.DecodeRecord)
}

// CloneWithImage is Clone, but first fetches the snapshot's image, by its digest, if the node does not have it.
func (c *Client) CloneWithImage(ctx context.Context, s vm.CloneSpec, auth []image.RegistryAuth) (vm.Record, error) {
	return ask(ctx, c, c.vms.Clone, nodewire.EncodeClone(s, true, auth), nodewire.DecodeRecord)
}

// Restore rolls the VM of ref back to a snapshot that was taken of it.
func (c *Client) Restore(ctx context.Context, ref, snap string) (vm.Record, error) {
	return ask(ctx, c, c.vms.Restore, &nodev1.RestoreRequest{Ref: ref, Snapshot: snap}, nodewire.DecodeRecord)
}

// Hibernate saves a running VM under name ("": hibernate-<id>) and ends its process once everything is durable.
func (c *Client) Hibernate(ctx context.Context, ref, name string) (vm.Record, error) {
	return ask(ctx, c, c.vms.Hibernate, &nodev1.HibernateRequest{Ref: ref, Name: name}, nodewire.DecodeRecord)
}

// Wake resumes a hibernated VM. Waking a running one is no error.
func (c *Client) Wake(ctx context.Context, ref string) (vm.Record, error) {
	return ask(ctx, c, c.vms.Wake, &nodev1.WakeRequest{Ref: ref}, nodewire.DecodeRecord)
}

// RemoveSnapshot deletes a snapshot unless a hibernated VM depends on it.
func (c *Client) RemoveSnapshot(ctx context.Context, ref string) error {
	return do(ctx, c, c.snapshots.Remove, &nodev1.RemoveSnapshotRequest{Ref: ref})
}

// PublishSnapshot replaces the namespaces that may clone from a snapshot.
func (c *Client) PublishSnapshot(ctx context.Context, ref string, namespaces []string) (snapshot.Snapshot, error) {
	return ask(ctx, c, c.snapshots.Publish, &nodev1.PublishSnapshotRequest{Ref: ref, Namespaces: namespaces}, nodewire.DecodeSnapshot)
}

// GetSnapshot resolves a name, an id or a unique prefix of one. The result omits disks, boot and the source's record.
func (c *Client) GetSnapshot(ctx context.Context, ref string) (snapshot.Snapshot, error) {
	return ask(ctx, c, c.snapshots.Inspect, &nodev1.InspectSnapshotRequest{Ref: ref}, nodewire.DecodeSnapshot)
}

// ListSnapshots returns every snapshot, sorted by name.
func (c *Client) ListSnapshots(ctx context.Context) ([]snapshot.Snapshot, error) {
	return list(ctx, c, c.snapshots.List, &nodev1.ListSnapshotsRequest{}, nodewire.DecodeSnapshot)
}

// ExportSnapshot writes a snapshot in the format that ImportSnapshot reads.
func (c *Client) ExportSnapshot(ctx context.Context, ref string, w io.Writer) error {
	return follow(ctx, c, c.snapshots.Export, &nodev1.ExportSnapshotRequest{Ref: ref}, func(m *nodev1.ExportResponse) error {
		_, err := w.Write(m.GetChunk())
		return err
	})
}

// ExportSnapshotDir copies a snapshot into a folder of the node.
func (c *Client) ExportSnapshotDir(ctx context.Context, ref, dir string) error {
	return follow(ctx, c, c.snapshots.Export, &nodev1.ExportSnapshotRequest{Ref: ref, ToDir: dir}, func(*nodev1.ExportResponse) error { return nil })
}

// ImportSnapshot sends the output of ExportSnapshot, plain or gzip, to the node, which stores it as name; "" keeps the
// recorded name. progress may be nil; it is called with the number of bytes that the node has read. When reading r
// fails, or ctx ends, nothing is stored.
func (c *Client) ImportSnapshot(ctx context.Context, name, description string, r io.Reader, progress func(bytes int64)) (snapshot.Snapshot, error) {
	return c.importSnapshot(ctx, &nodev1.ImportSnapshotStart{Name: name, Description: description}, r, progress)
}

// ImportSnapshotDir registers a folder of the node that ExportSnapshotDir made.
func (c *Client) ImportSnapshotDir(ctx context.Context, name, description, dir string) (snapshot.Snapshot, error) {
	return c.importSnapshot(ctx, &nodev1.ImportSnapshotStart{Name: name, Description: description, FromDir: dir}, nil, nil)
}

// importSnapshot sends start and then r, if r is not nil.
func (c *Client) importSnapshot(ctx context.Context, start *nodev1.ImportSnapshotStart, r io.Reader, progress func(bytes int64)) (snapshot.Snapshot, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.snapshots.Import(ctx)
	if err != nil {
		return snapshot.Snapshot{}, c.fail(err, nil)
	}
	var source atomic.Pointer[error] // a failure to read r
	go func() {
		if stream.Send(&nodev1.ImportSnapshotRequest{Of: &nodev1.ImportSnapshotRequest_Start{Start: start}}) != nil {
			return // Recv returns the error
		}
		err := upload("the snapshot", r, func(b []byte) bool {
			return stream.Send(&nodev1.ImportSnapshotRequest{Of: &nodev1.ImportSnapshotRequest_Chunk{Chunk: b}}) == nil
		}, stream.CloseSend)
		if err != nil {
			source.Store(&err)
			cancel() // a normal end would look like the end of the snapshot
		}
	}()
	s, err := c.transfer("import", start.GetName(), stream, nil, func(p snapshot.Progress) {
		if progress != nil {
			progress(p.Done)
		}
	})
	if readErr := source.Load(); err != nil && readErr != nil {
		return s, *readErr
	}
	return s, err
}

// PushSnapshot sends a snapshot to the OCI registry repository to, [http[s]://]HOST[:PORT]/REPOSITORY[:TAG], and returns
// it with its digest there. progress may be nil.
func (c *Client) PushSnapshot(ctx context.Context, ref, to string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.snapshots.Push(ctx, &nodev1.PushSnapshotRequest{Ref: ref, To: to, Auth: nodewire.EncodeAuth(auth)})
	return c.transfer("push", ref, stream, err, progress)
}

// PullSnapshot fetches a snapshot from an OCI registry, or with cocoon://HOST:PORT/NAME from another node, and stores
// it as name; "" keeps the name that it has there.
func (c *Client) PullSnapshot(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	return c.pullSnapshot(ctx, &nodev1.PullSnapshotRequest{From: from, Name: name, Auth: nodewire.EncodeAuth(auth)}, progress)
}

// PullSnapshotEarly pulls as PullSnapshot does, and returns before the memory is here if the memory can come later. The snapshot
// is Arriving then. The node removes it if the rest never comes.
func (c *Client) PullSnapshotEarly(ctx context.Context, from, name string, auth snapshot.Auth, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	return c.pullSnapshot(ctx, &nodev1.PullSnapshotRequest{From: from, Name: name, Auth: nodewire.EncodeAuth(auth), Early: true}, progress)
}

func (c *Client) pullSnapshot(ctx context.Context, r *nodev1.PullSnapshotRequest, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.snapshots.Pull(ctx, r)
	return c.transfer("pull", r.GetFrom(), stream, err, progress)
}

// transfer follows a transfer to its end.
func (c *Client) transfer(op, what string, stream grpc.ServerStreamingClient[nodev1.TransferResponse], err error, progress func(snapshot.Progress)) (snapshot.Snapshot, error) {
	var got *nodev1.Snapshot
	err = receive(c, stream, err, func(m *nodev1.TransferResponse) error {
		switch {
		case m.GetSnapshot() != nil:
			got = m.GetSnapshot()
		case progress != nil && m.GetProgress() != nil:
			progress(nodewire.DecodeTransfer(m.GetProgress()))
		}
		return nil
	})
	switch {
	case err != nil:
		return snapshot.Snapshot{}, err
	case got == nil:
		return snapshot.Snapshot{}, errdefs.New(errdefs.Internal, "cocoond ended the %s of %s without an answer", op, what)
	}
	return nodewire.DecodeSnapshot(got), nil
}

// TagDigest returns the digest of the manifest ref in a registry.
func (c *Client) TagDigest(ctx context.Context, ref string, auth snapshot.Auth) (string, error) {
	m, err := unary(ctx, c, c.snapshots.Tag, &nodev1.TagRequest{Ref: ref, Auth: nodewire.EncodeAuth(auth)})
	return m.GetDigest(), err
}

// DeleteTag removes a tag, or a manifest when ref has a digest, from a registry. It is no error if it does not exist.
func (c *Client) DeleteTag(ctx context.Context, ref string, auth snapshot.Auth) error {
	return do(ctx, c, c.snapshots.Tag, &nodev1.TagRequest{Ref: ref, Auth: nodewire.EncodeAuth(auth), Delete: true})
}

// CheckRegistry checks that the registry of ref answers and accepts the credentials. It changes nothing.
func (c *Client) CheckRegistry(ctx context.Context, ref string, auth snapshot.Auth) error {
	return do(ctx, c, c.snapshots.Tag, &nodev1.TagRequest{Ref: ref, Auth: nodewire.EncodeAuth(auth), Check: true})
}

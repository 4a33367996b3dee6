package nodeapi

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/snapshot"
)

type snapshots struct {
	nodev1.UnimplementedSnapshotsServer
	vms            saver
	snapshotReader snapshotReader
	carrier        carrier
	registry       registry
}

func (s *snapshots) Save(ctx context.Context, r *nodev1.SaveRequest) (*nodev1.Snapshot, error) {
	ref, spec := nodewire.DecodeSave(r)
	return answer(nodewire.EncodeSnapshot)(s.vms.SaveSnapshot(ctx, ref, spec))
}

func (s *snapshots) List(_ *nodev1.ListSnapshotsRequest, stream grpc.ServerStreamingServer[nodev1.Snapshot]) error {
	return sendAll(stream, nodewire.EncodeSnapshot)(s.snapshotReader.ListSnapshots(stream.Context()))
}

func (s *snapshots) Inspect(ctx context.Context, r *nodev1.InspectSnapshotRequest) (*nodev1.Snapshot, error) {
	return answer(nodewire.EncodeSnapshot)(s.snapshotReader.GetSnapshot(ctx, r.GetRef()))
}

func (s *snapshots) Remove(ctx context.Context, r *nodev1.RemoveSnapshotRequest) (*nodev1.RemoveSnapshotResponse, error) {
	return &nodev1.RemoveSnapshotResponse{}, s.vms.RemoveSnapshot(ctx, r.GetRef())
}

func (s *snapshots) Publish(ctx context.Context, r *nodev1.PublishSnapshotRequest) (*nodev1.Snapshot, error) {
	return answer(nodewire.EncodeSnapshot)(s.snapshotReader.PublishSnapshot(ctx, r.GetRef(), r.GetNamespaces()))
}

func (s *snapshots) Export(r *nodev1.ExportSnapshotRequest, stream grpc.ServerStreamingServer[nodev1.ExportResponse]) error {
	if r.GetToDir() != "" {
		return s.carrier.ExportSnapshotDir(stream.Context(), r.GetRef(), r.GetToDir())
	}
	w := exportWriter(stream)
	if err := s.carrier.ExportSnapshot(stream.Context(), r.GetRef(), w); err != nil {
		return err
	}
	return w.Flush()
}

func (s *snapshots) Import(stream grpc.BidiStreamingServer[nodev1.ImportSnapshotRequest, nodev1.TransferResponse]) error {
	m, err := stream.Recv()
	if err != nil {
		return err
	}
	start := m.GetStart()
	if start == nil {
		return errdefs.Invalidf("the first message of an import must be its start")
	}
	out := transferReporter(stream)
	if start.GetFromDir() != "" {
		return sendSnapshot(stream, out)(s.carrier.ImportSnapshotDir(stream.Context(), start.GetName(), start.GetDescription(), start.GetFromDir()))
	}
	next := func() ([]byte, error) {
		m, err := stream.Recv()
		return m.GetChunk(), err
	}
	progress := func(n int64) { out.report(snapshot.Progress{Phase: "importing", Done: n, Total: -1}) }
	return sendSnapshot(stream, out)(s.carrier.ImportSnapshot(stream.Context(), start.GetName(), start.GetDescription(), &chunks{what: "snapshot", next: next}, progress))
}

func (s *snapshots) Push(r *nodev1.PushSnapshotRequest, stream grpc.ServerStreamingServer[nodev1.TransferResponse]) error {
	out := transferReporter(stream)
	return sendSnapshot(stream, out)(s.registry.PushSnapshot(stream.Context(), r.GetRef(), r.GetTo(), nodewire.DecodeAuth(r.GetAuth()), out.report))
}

func (s *snapshots) Pull(r *nodev1.PullSnapshotRequest, stream grpc.ServerStreamingServer[nodev1.TransferResponse]) error {
	out, pull := transferReporter(stream), s.registry.PullSnapshot
	if r.GetEarly() {
		pull = s.registry.PullSnapshotEarly
	}
	return sendSnapshot(stream, out)(pull(stream.Context(), r.GetFrom(), r.GetName(), nodewire.DecodeAuth(r.GetAuth()), out.report))
}

func (s *snapshots) Tag(ctx context.Context, r *nodev1.TagRequest) (*nodev1.TagResponse, error) {
	auth := nodewire.DecodeAuth(r.GetAuth())
	switch {
	case r.GetDelete() && r.GetCheck():
		return nil, errdefs.Invalidf("a tag is either deleted or the registry checked, not both")
	case r.GetDelete():
		return &nodev1.TagResponse{}, s.registry.DeleteTag(ctx, r.GetRef(), auth)
	case r.GetCheck():
		return &nodev1.TagResponse{}, s.registry.CheckRegistry(ctx, r.GetRef(), auth)
	}
	digest, err := s.registry.TagDigest(ctx, r.GetRef(), auth)
	return &nodev1.TagResponse{Digest: digest}, err
}

type transferSender interface {
	Send(m *nodev1.TransferResponse) error
}

func transferReporter(stream transferSender) *reporter[snapshot.Progress] {
	return newReporter(func(p snapshot.Progress) error {
		return stream.Send(&nodev1.TransferResponse{Of: &nodev1.TransferResponse_Progress{Progress: nodewire.EncodeTransfer(p)}})
	}, func(p snapshot.Progress) string { return p.Phase })
}

// sendSnapshot ends a transfer with the snapshot or with its error.
func sendSnapshot(stream transferSender, out *reporter[snapshot.Progress]) func(snapshot.Snapshot, error) error {
	return func(s snapshot.Snapshot, err error) error {
		if err != nil {
			return err
		}
		return out.end(func() error {
			return stream.Send(&nodev1.TransferResponse{Of: &nodev1.TransferResponse_Snapshot{Snapshot: nodewire.EncodeSnapshot(s)}})
		})
	}
}

// reportPause is the minimum time between two reports of one phase.
const reportPause = 100 * time.Millisecond

// reporter sends progress to one client. Reports may come often and from several goroutines.
type reporter[P any] struct {
	send  func(P) error
	phase func(P) string

	mu      sync.Mutex
	last    time.Time
	current string
	pending *P // the newest report that was not sent
	done    bool
}

func newReporter[P any](send func(P) error, phase func(P) string) *reporter[P] {
	return &reporter[P]{send: send, phase: phase}
}

func (r *reporter[P]) report(p P) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	switch {
	case r.done:
		return
	case r.phase(p) == r.current && now.Sub(r.last) < reportPause:
		r.pending = &p
		return
	}
	r.current, r.last, r.pending = r.phase(p), now, nil
	// If the client is gone, the stream's context ends, and with it the transfer.
	_ = r.send(p)
}

// end sends the last report, then the result of the transfer with last. Nothing is reported after that.
func (r *reporter[P]) end(last func() error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done = true
	if r.pending != nil {
		_ = r.send(*r.pending)
	}
	return last()
}

//go:build vm

package cocoond_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/grpc/codes"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
)

// importVolume sends content, and announces total bytes.
func (o *operator) importVolume(ctx context.Context, name string, content []byte, total uint64, cut bool) (*capsulev1.Volume, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := o.volumes.Import(ctx)
	if err != nil {
		return nil, err
	}
	_ = s.Send(&capsulev1.VolumeImportRequest{Msg: &capsulev1.VolumeImportRequest_Metadata{Metadata: &capsulev1.VolumeImportMetadata{Name: name, TotalBytes: total}}})
	for len(content) > 0 {
		n := min(len(content), 1<<20)
		_ = s.Send(&capsulev1.VolumeImportRequest{Msg: &capsulev1.VolumeImportRequest_Chunk{Chunk: content[:n]}})
		content = content[n:]
	}
	if cut {
		cancel()
	}
	return s.CloseAndRecv()
}

func (o *operator) export(name string, raw bool) ([]byte, error) {
	s, err := o.volumes.Export(o.n.t.Context(), &capsulev1.VolumeExportRequest{Name: name, Raw: raw})
	if err != nil {
		return nil, err
	}
	var all []byte
	for {
		m, err := s.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, err
		}
		all = append(all, m.GetData()...)
	}
}

// TestVMApplianceVolumeCopies: volumes are exported, imported, kept as snapshots, copied and rolled back. What is cut leaves nothing.
func TestVMApplianceVolumeCopies(t *testing.T) {
	n, o := newAppliance(t)
	ctx := t.Context()
	content := make([]byte, 34<<20)
	dice := rand.New(rand.NewPCG(1, 2))
	for i := range 1 << 20 {
		content[7<<20+i] = byte(dice.Uint32())
	}
	exported := func(name string, want []byte) {
		t.Helper()
		if got, err := o.export(name, true); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("export of %s: %d bytes, %v", name, len(got), err)
		}
	}
	v, err := o.importVolume(ctx, "data", content, uint64(len(content)), false)
	if err != nil || v.GetSizeBytes() != uint64(len(content)) {
		t.Fatal(v, err)
	}
	exported("data", content)
	packed, err := o.export("data", false)
	if err != nil || len(packed) > 2<<20 {
		t.Fatalf("%d bytes, %v", len(packed), err)
	}
	if _, err := o.importVolume(ctx, "again", packed, uint64(len(packed)), false); err != nil {
		t.Fatal(err)
	}
	exported("again", content)
	small, err := o.importVolume(ctx, "small", []byte("few"), 0, false)
	if err != nil || small.GetSizeBytes() != 32<<20 {
		t.Fatal(small, err)
	}

	// A stream that is cut, at each level, leaves nothing.
	_, err = o.importVolume(ctx, "cut", packed[:len(packed)/2], 0, false)
	o.code("a truncated file", err, codes.DataLoss, "truncated")
	damaged := bytes.Clone(packed)
	damaged[len(damaged)/2] ^= 1
	_, err = o.importVolume(ctx, "cut", damaged, 0, false)
	o.code("a damaged file", err, codes.DataLoss, "")
	_, err = o.importVolume(ctx, "cut", content[:1<<20], 2<<20, false)
	o.code("fewer bytes than announced", err, codes.InvalidArgument, "have arrived")
	if _, err = o.importVolume(ctx, "cut", content[:8<<20], 0, true); err == nil {
		t.Error("a client that is gone has made a volume")
	}
	_, err = o.importVolume(ctx, "empty", nil, 0, false)
	o.code("nothing", err, codes.InvalidArgument, "no bytes")
	_, err = o.importVolume(ctx, "data", content[:4096], 0, false)
	o.code("a taken name", err, codes.AlreadyExists, "")
	_, err = o.importVolume(ctx, "../x", content[:4096], 0, false)
	o.code("a hostile name", err, codes.InvalidArgument, "DNS label")
	zeros, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	s, err := o.volumes.Import(ctx)
	if err != nil {
		t.Fatal(err)
	}
	bomb := zeros.EncodeAll(make([]byte, 64<<20), nil)
	_ = s.Send(&capsulev1.VolumeImportRequest{Msg: &capsulev1.VolumeImportRequest_Metadata{Metadata: &capsulev1.VolumeImportMetadata{Name: "cut", SizeMib: 32}}})
	_ = s.Send(&capsulev1.VolumeImportRequest{Msg: &capsulev1.VolumeImportRequest_Chunk{Chunk: bomb}})
	_, err = s.CloseAndRecv()
	o.code("more than the volume can hold", err, codes.InvalidArgument, "")
	n.until("nothing is left of them", func() bool {
		all, err := o.volumes.List(ctx, &capsulev1.VolumeListRequest{})
		if err != nil {
			t.Fatal(err)
		}
		folders, err := os.ReadDir(filepath.Join(n.dir, "state/volumes/volumes"))
		return err == nil && len(all.GetVolumes()) == 3 && len(folders) == 3
	})

	// A snapshot stays as it is. It is the content of copies, and of its volume again.
	snap, err := o.volumes.Snapshot(ctx, &capsulev1.VolumeSnapshotRequest{Volume: "data", Name: "before"})
	if err != nil || snap.GetVolume() != "data" {
		t.Fatal(snap, err)
	}
	_, err = o.volumes.Snapshot(ctx, &capsulev1.VolumeSnapshotRequest{Volume: "data", Name: "before"})
	o.code("a snapshot of a taken name", err, codes.AlreadyExists, "")
	_, err = o.volumes.Rollback(ctx, &capsulev1.VolumeRollbackRequest{Name: "small", Snapshot: "before"})
	o.code("a snapshot of another volume", err, codes.FailedPrecondition, "volume clone --snapshot")
	if _, err := o.volumes.Rollback(ctx, &capsulev1.VolumeRollbackRequest{Name: "data", Snapshot: "before"}); err != nil {
		t.Fatal(err)
	}
	exported("data", content)
	for name, req := range map[string]*capsulev1.VolumeCloneRequest{
		"of-volume":   {From: &capsulev1.VolumeCloneRequest_Volume{Volume: "data"}},
		"of-snapshot": {From: &capsulev1.VolumeCloneRequest_Snapshot{Snapshot: "before"}},
	} {
		req.Name = name
		if _, err := o.volumes.Clone(ctx, req); err != nil {
			t.Fatal(err)
		}
		exported(name, content)
	}
	_, err = o.volumes.Clone(ctx, &capsulev1.VolumeCloneRequest{Name: "x"})
	o.code("a clone of nothing", err, codes.InvalidArgument, "")
	if _, err := o.volumes.SnapshotDelete(ctx, &capsulev1.VolumeSnapshotDeleteRequest{Name: "before"}); err != nil {
		t.Fatal(err)
	}
	list, err := o.volumes.SnapshotList(ctx, &capsulev1.VolumeSnapshotListRequest{})
	if err != nil || len(list.GetSnapshots()) != 0 {
		t.Error(list, err)
	}
}

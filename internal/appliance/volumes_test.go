package appliance

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/desired"
	"cocoonstack.io/cocoon/internal/appliance/identity"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal/journaltest"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// anyVolumes has a volume of each name, and a snapshot of the volume "data" of each name. It can do nothing with them: the test fails by
// its nil interface if a call gets that far.
type anyVolumes struct{ Volumes }

func (anyVolumes) Get(_ context.Context, ref string) (volume.Volume, error) {
	return volume.Volume{ID: vm.NewID(), Name: ref}, nil
}

func (anyVolumes) GetSnapshot(_ context.Context, ref string) (volume.Snapshot, error) {
	return volume.Snapshot{ID: vm.NewID(), Name: ref, Source: "data"}, nil
}

// call is the stream of an import or export.
type call struct {
	grpc.ServerStream
	ctx   context.Context //nolint:containedctx // as in a stream
	first *capsulev1.VolumeImportRequest
}

func (c *call) Context() context.Context                { return c.ctx }
func (c *call) Send(*capsulev1.VolumeExportChunk) error { return nil }
func (c *call) SendAndClose(*capsulev1.Volume) error    { return nil }
func (c *call) Recv() (*capsulev1.VolumeImportRequest, error) {
	if c.first == nil {
		return nil, io.EOF
	}
	m := c.first
	c.first = nil
	return m, nil
}

// The volumes of a workload that reaches into the machine are the administrator's: who may not change the workload may neither replace
// nor read what it runs.
func TestVolumesOfAWorkloadThatReachesIntoTheMachine(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	store, err := desired.Open(t.Context(), journaltest.NewDocuments(), time.Now, log)
	if err != nil {
		t.Fatal(err)
	}
	root := &capsulev1.Workload{Name: "root", Kind: capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER, DesiredState: capsulev1.DesiredState_DESIRED_STATE_STOPPED, Container: &capsulev1.ContainerSpec{
		Image: "demo", Privileged: true, Mounts: []*capsulev1.VolumeMount{{VolumeName: "data", MountPath: "/data"}},
	}}
	if _, err := store.Apply(t.Context(), root, false, func([]workload.Row) error { return nil }); err != nil {
		t.Fatal(err)
	}
	d := &Door{deps: Deps{Desired: store, Volumes: anyVolumes{}, Log: log}}
	v, w := &volumes{door: d}, &workloads{door: d}
	as := func(r capsulev1.Role) context.Context {
		return identity.WithCaller(t.Context(), identity.Key{Name: "key", Role: r})
	}
	ctx := as(capsulev1.Role_ROLE_OPERATE)
	for what, err := range map[string]error{
		"create":            second(v.Create(ctx, &capsulev1.VolumeCreateRequest{Name: "data"})),
		"delete":            second(v.Delete(ctx, &capsulev1.VolumeDeleteRequest{Name: "data", Force: true})),
		"resize":            second(v.Resize(ctx, &capsulev1.VolumeResizeRequest{Name: "data", NewSizeMib: 64})),
		"snapshot":          second(v.Snapshot(ctx, &capsulev1.VolumeSnapshotRequest{Volume: "data", Name: "s"})),
		"delete a snapshot": second(v.SnapshotDelete(ctx, &capsulev1.VolumeSnapshotDeleteRequest{Name: "s"})),
		"clone":             second(v.Clone(ctx, &capsulev1.VolumeCloneRequest{Name: "copy", From: &capsulev1.VolumeCloneRequest_Volume{Volume: "data"}})),
		"clone a snapshot":  second(v.Clone(ctx, &capsulev1.VolumeCloneRequest{Name: "copy", From: &capsulev1.VolumeCloneRequest_Snapshot{Snapshot: "s"}})),
		"clone to it":       second(v.Clone(ctx, &capsulev1.VolumeCloneRequest{Name: "data", From: &capsulev1.VolumeCloneRequest_Volume{Volume: "other"}})),
		"roll back":         second(v.Rollback(ctx, &capsulev1.VolumeRollbackRequest{Name: "data", Snapshot: "s"})),
		"export":            v.Export(&capsulev1.VolumeExportRequest{Name: "data"}, &call{ctx: ctx}),
		"import":            v.Import(&call{ctx: ctx, first: &capsulev1.VolumeImportRequest{Msg: &capsulev1.VolumeImportRequest_Metadata{Metadata: &capsulev1.VolumeImportMetadata{Name: "data"}}}}),
		"mount":             w.volumesExist(ctx, &capsulev1.Workload{Name: "mine", Container: root.GetContainer()}, nil),
	} {
		if !errdefs.Is(err, errdefs.PermissionDenied) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := d.mayTouch(ctx, "other"); err != nil {
		t.Errorf("another volume: %v", err)
	}
	if err := d.mayTouch(as(capsulev1.Role_ROLE_ADMIN), "data"); err != nil {
		t.Errorf("an administrator: %v", err)
	}
}

func second[T any](_ T, err error) error { return err }

// fullVolumes are on a pool that is too full: what is there can be read and deleted, and nothing is made or grown. The store would refuse
// in the same words.
type fullVolumes struct {
	anyVolumes
	deleted []string
}

const tooFull = "thin pool vg/pool is too full: 95 % of its data and 3 % of its metadata are in use"

var errTooFull = errdefs.Exhaustedf("%s", tooFull)

func (*fullVolumes) Pools(context.Context) []volume.Pool {
	return []volume.Pool{{Name: "vg/pool", Size: 100, Used: 95, Fault: tooFull}}
}

func (*fullVolumes) List(context.Context) ([]volume.Volume, error) {
	return []volume.Volume{{Name: "data", Size: 1 << 30}}, nil
}

func (*fullVolumes) Create(context.Context, volume.Spec) (volume.Volume, error) {
	return volume.Volume{}, errTooFull
}

func (*fullVolumes) Resize(context.Context, string, int64) (volume.Volume, error) {
	return volume.Volume{}, errTooFull
}

func (*fullVolumes) Snapshot(context.Context, string, volume.Spec) (volume.Snapshot, error) {
	return volume.Snapshot{}, errTooFull
}

func (*fullVolumes) Clone(context.Context, string, volume.Spec) (volume.Volume, error) {
	return volume.Volume{}, errTooFull
}

func (*fullVolumes) FromSnapshot(context.Context, string, volume.Spec) (volume.Volume, error) {
	return volume.Volume{}, errTooFull
}

func (*fullVolumes) Import(_ context.Context, _ volume.Spec, r io.Reader, _, _ int64) (volume.Volume, error) {
	_, err := r.Read(make([]byte, 1))
	return volume.Volume{}, errors.Join(err, errTooFull)
}

func (f *fullVolumes) Delete(_ context.Context, ref string) error {
	f.deleted = append(f.deleted, ref)
	return nil
}

// sound is a machine that is well.
type sound struct{ System }

func (sound) Info(context.Context) (*capsulev1.GetInfoResponse, error) {
	return &capsulev1.GetInfoResponse{}, nil
}

// A pool that is too full refuses each call that takes room, with the class and the words of the store. The operator sees why, and what is there can
// be deleted.
func TestPoolIsTooFull(t *testing.T) {
	full := &fullVolumes{}
	s, ctx := serve(t, Deps{Volumes: full, System: sound{}}), t.Context()
	c := s.as(capsulev1.Role_ROLE_OPERATE)
	v := capsulev1.NewVolumeServiceClient(c)
	in, err := v.Import(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []*capsulev1.VolumeImportRequest{
		{Msg: &capsulev1.VolumeImportRequest_Metadata{Metadata: &capsulev1.VolumeImportMetadata{Name: "new"}}}, {Msg: &capsulev1.VolumeImportRequest_Chunk{Chunk: []byte("bytes")}},
	} {
		if err := in.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	for what, err := range map[string]error{
		"create":           second(v.Create(ctx, &capsulev1.VolumeCreateRequest{Name: "new", SizeMib: 64})),
		"resize":           second(v.Resize(ctx, &capsulev1.VolumeResizeRequest{Name: "data", NewSizeMib: 2048})),
		"snapshot":         second(v.Snapshot(ctx, &capsulev1.VolumeSnapshotRequest{Volume: "data", Name: "s"})),
		"clone":            second(v.Clone(ctx, &capsulev1.VolumeCloneRequest{Name: "new", From: &capsulev1.VolumeCloneRequest_Volume{Volume: "data"}})),
		"clone a snapshot": second(v.Clone(ctx, &capsulev1.VolumeCloneRequest{Name: "new", From: &capsulev1.VolumeCloneRequest_Snapshot{Snapshot: "s"}})),
		"import":           second(in.CloseAndRecv()),
	} {
		s.code(what, err, codes.ResourceExhausted)
		if !strings.Contains(status.Convert(err).Message(), tooFull) {
			t.Errorf("%s: %v", what, err)
		}
	}
	info, err := capsulev1.NewCapsuleServiceClient(c).GetInfo(ctx, &capsulev1.GetInfoRequest{})
	if err != nil || info.GetVolumesFault() != tooFull || info.GetThinpoolUsedBytes() != 95 || info.GetThinpoolTotalBytes() != 100 {
		t.Errorf("info %v, %v", info, err)
	}
	if all, err := v.List(ctx, &capsulev1.VolumeListRequest{}); err != nil || len(all.GetVolumes()) != 1 {
		t.Errorf("list %v, %v", all, err)
	}
	if _, err := v.Delete(ctx, &capsulev1.VolumeDeleteRequest{Name: "data"}); err != nil || len(full.deleted) != 1 {
		t.Errorf("delete: %v, %v", full.deleted, err)
	}
}

package appliance

import (
	"context"
	"io"
	"log/slog"
	"testing"
	"time"

	"google.golang.org/grpc"

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

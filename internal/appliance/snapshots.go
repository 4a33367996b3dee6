package appliance

import (
	"context"
	"strings"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/volume"
)

// snapshot returns the snapshot of exactly that name, if it is the operator's and the caller may touch its volume.
func (v *volumes) snapshot(ctx context.Context, name string) (volume.Snapshot, error) {
	if err := workload.ValidateName(name); err != nil {
		return volume.Snapshot{}, err
	}
	found, err := v.door.deps.Volumes.GetSnapshot(ctx, name)
	if err == nil && (found.Name != name || !found.Owner.Operator()) || errdefs.IsInvalid(err) {
		err = errdefs.NotFoundf("there is no snapshot %q of a volume", name)
	}
	if err != nil {
		return found, err
	}
	return found, v.door.mayTouch(ctx, found.Source)
}

// copyable returns the volume of exactly that name, unless a container runs with it: nobody can freeze its file system.
func (v *volumes) copyable(ctx context.Context, name string) (volume.Volume, error) {
	x, err := v.own(ctx, name)
	if err != nil {
		return x, err
	}
	for _, r := range v.door.deps.Desired.List() {
		if r.Workload.GetKind() == capsulev1.WorkloadKind_WORKLOAD_KIND_CONTAINER && r.Runs() && uses(r, name) {
			return x, errdefs.Preconditionf("container %s runs with volume %s; stop it first", r.Name(), name)
		}
	}
	return x, nil
}

func encodeSnapshot(s volume.Snapshot) *capsulev1.VolumeSnapshot {
	return &capsulev1.VolumeSnapshot{Name: s.Name, Volume: s.Source, SizeBytes: uint64(max(s.Size, 0)), CreatedAtUnix: s.CreatedAt.Unix()}
}

// Snapshot implements capsulev1.VolumeServiceServer.
func (v *volumes) Snapshot(ctx context.Context, req *capsulev1.VolumeSnapshotRequest) (*capsulev1.VolumeSnapshot, error) {
	if err := workload.ValidateName(req.GetName()); err != nil {
		return nil, err
	}
	x, err := v.copyable(ctx, req.GetVolume())
	if err != nil {
		return nil, err
	}
	s, err := v.door.deps.Volumes.Snapshot(ctx, string(x.ID), volume.Spec{Name: req.GetName()})
	if err != nil {
		return nil, err
	}
	return encodeSnapshot(s), nil
}

// SnapshotList implements capsulev1.VolumeServiceServer. Parts of snapshots of VMs, which other doors take, are not listed.
func (v *volumes) SnapshotList(ctx context.Context, _ *capsulev1.VolumeSnapshotListRequest) (*capsulev1.VolumeSnapshotListResponse, error) {
	all, err := v.door.deps.Volumes.Snapshots(ctx)
	if err != nil {
		return nil, err
	}
	resp := &capsulev1.VolumeSnapshotListResponse{}
	for _, s := range all {
		if s.Owner.Operator() && s.For == "" {
			resp.Snapshots = append(resp.Snapshots, encodeSnapshot(s))
		}
	}
	return resp, nil
}

// SnapshotDelete implements capsulev1.VolumeServiceServer.
func (v *volumes) SnapshotDelete(ctx context.Context, req *capsulev1.VolumeSnapshotDeleteRequest) (*capsulev1.VolumeSnapshotDeleteResponse, error) {
	s, err := v.snapshot(ctx, req.GetName())
	if err != nil {
		return nil, err
	}
	return &capsulev1.VolumeSnapshotDeleteResponse{}, v.door.deps.Volumes.DeleteSnapshot(ctx, string(s.ID))
}

// Clone implements capsulev1.VolumeServiceServer.
func (v *volumes) Clone(ctx context.Context, req *capsulev1.VolumeCloneRequest) (*capsulev1.Volume, error) {
	if err := workload.ValidateName(req.GetName()); err != nil {
		return nil, err
	}
	if err := v.door.mayTouch(ctx, req.GetName()); err != nil {
		return nil, err
	}
	spec := volume.Spec{Name: req.GetName()}
	if req.GetSizeMib() != 0 {
		var err error
		if spec.Size, err = mib(req.GetSizeMib()); err != nil {
			return nil, err
		}
	}
	made, err := v.clone(ctx, req, spec)
	if err != nil {
		return nil, err
	}
	return v.encode(made), nil
}

func (v *volumes) clone(ctx context.Context, req *capsulev1.VolumeCloneRequest, spec volume.Spec) (volume.Volume, error) {
	switch from := req.GetFrom().(type) {
	case *capsulev1.VolumeCloneRequest_Volume:
		x, err := v.copyable(ctx, from.Volume)
		if err != nil {
			return x, err
		}
		return v.door.deps.Volumes.Clone(ctx, string(x.ID), spec)
	case *capsulev1.VolumeCloneRequest_Snapshot:
		s, err := v.snapshot(ctx, from.Snapshot)
		if err != nil {
			return volume.Volume{}, err
		}
		return v.door.deps.Volumes.FromSnapshot(ctx, string(s.ID), spec)
	}
	return volume.Volume{}, errdefs.Invalidf("a clone is made from a volume or a snapshot; name one")
}

// Rollback implements capsulev1.VolumeServiceServer. Only a snapshot of the volume itself is taken, not that of a volume which had its name.
func (v *volumes) Rollback(ctx context.Context, req *capsulev1.VolumeRollbackRequest) (*capsulev1.Volume, error) {
	x, err := v.idle(ctx, req.GetName())
	if err != nil {
		return nil, err
	}
	s, err := v.snapshot(ctx, req.GetSnapshot())
	switch {
	case err != nil:
		return nil, err
	case s.Volume != x.ID:
		return nil, errdefs.Preconditionf("snapshot %s is not one of volume %s; make a volume from it instead: capsulectl volume clone --snapshot %s NAME", s.Name, x.Name, s.Name)
	}
	back, err := v.door.deps.Volumes.Restore(ctx, string(x.ID), string(s.ID))
	if err != nil {
		return nil, err
	}
	return v.encode(back), nil
}

// idle returns the volume of exactly that name, unless a workload runs with it.
func (v *volumes) idle(ctx context.Context, name string) (volume.Volume, error) {
	x, err := v.own(ctx, name)
	if err != nil {
		return x, err
	}
	if _, running := v.users(name); len(running) > 0 {
		return x, errdefs.Preconditionf("volume %s is in use by workload %s; stop that first", name, strings.Join(running, ", "))
	}
	return x, nil
}

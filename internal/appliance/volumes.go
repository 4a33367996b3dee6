package appliance

import (
	"cmp"
	"context"
	"slices"
	"strings"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/workload"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/volume"
)

// Sizes of volumes, in MiB.
const (
	minVolume     = 32
	maxVolume     = 1 << 20
	defaultVolume = 10 << 10
)

// Volumes is the part of the volume store that the door needs.
type Volumes interface {
	Get(ctx context.Context, ref string) (volume.Volume, error)
	List(ctx context.Context) ([]volume.Volume, error)
	Create(ctx context.Context, s volume.Spec) (volume.Volume, error)
	Delete(ctx context.Context, ref string) error
	Resize(ctx context.Context, ref string, size int64) (volume.Volume, error)
	volume.Snapshotter
	volume.Cloner
	Carrier
	// Pools says how full the storage of the volumes is; none if its size is not fixed.
	Pools(ctx context.Context) []volume.Pool
}

// volumes implements VolumeService.
type volumes struct {
	capsulev1.UnimplementedVolumeServiceServer
	door *Door
}

// volume returns the volume of exactly that name, if it is the operator's.
func (d *Door) volume(ctx context.Context, name string) (volume.Volume, error) {
	if err := workload.ValidateName(name); err != nil {
		return volume.Volume{}, err
	}
	found, err := d.deps.Volumes.Get(ctx, name)
	if err == nil && (found.Name != name || !found.Owner.Operator()) || errdefs.IsInvalid(err) { // an id, or the beginning of one or of some
		err = errdefs.NotFoundf("there is no volume %q", name)
	}
	return found, err
}

// own returns the volume of exactly that name, if the caller may touch it.
func (v *volumes) own(ctx context.Context, name string) (volume.Volume, error) {
	x, err := v.door.volume(ctx, name)
	if err != nil {
		return x, err
	}
	return x, v.door.mayTouch(ctx, name)
}

// users returns the workloads that name a volume, and those of them that shall run.
func (v *volumes) users(name string) (named, running []string) {
	for _, r := range v.door.deps.Desired.List() {
		if uses(r, name) {
			named = append(named, r.Name())
			if r.Runs() {
				running = append(running, r.Name())
			}
		}
	}
	return named, running
}

func uses(r workload.Row, name string) bool {
	return slices.Contains(workload.Volumes(r.Workload), name)
}

func (v *volumes) encode(x volume.Volume) *capsulev1.Volume {
	_, running := v.users(x.Name)
	return &capsulev1.Volume{Name: x.Name, SizeBytes: uint64(max(x.Size, 0)), MountedBy: running, CreatedAtUnix: x.CreatedAt.Unix()}
}

func mib(n uint64) (int64, error) {
	if n < minVolume || n > maxVolume {
		return 0, errdefs.Invalidf("a volume has %d MiB to 1 TiB, and not %d MiB", minVolume, n)
	}
	return int64(n) << 20, nil
}

// Create implements capsulev1.VolumeServiceServer.
func (v *volumes) Create(ctx context.Context, req *capsulev1.VolumeCreateRequest) (*capsulev1.Volume, error) {
	if err := workload.ValidateName(req.GetName()); err != nil {
		return nil, err
	}
	if err := v.door.mayTouch(ctx, req.GetName()); err != nil {
		return nil, err
	}
	size, err := mib(cmp.Or(req.GetSizeMib(), defaultVolume))
	if err != nil {
		return nil, err
	}
	x, err := v.door.deps.Volumes.Create(ctx, volume.Spec{Kind: v.door.cfg.VolumeKind, Name: req.GetName(), Size: size})
	if err != nil {
		return nil, err
	}
	return v.encode(x), nil
}

// Get implements capsulev1.VolumeServiceServer.
func (v *volumes) Get(ctx context.Context, req *capsulev1.VolumeGetRequest) (*capsulev1.Volume, error) {
	x, err := v.door.volume(ctx, req.GetName())
	if err != nil {
		return nil, err
	}
	return v.encode(x), nil
}

// List implements capsulev1.VolumeServiceServer.
func (v *volumes) List(ctx context.Context, _ *capsulev1.VolumeListRequest) (*capsulev1.VolumeListResponse, error) {
	all, err := v.door.deps.Volumes.List(ctx)
	if err != nil {
		return nil, err
	}
	resp := &capsulev1.VolumeListResponse{}
	for _, x := range all {
		if x.Owner.Operator() {
			resp.Volumes = append(resp.Volumes, v.encode(x))
		}
	}
	return resp, nil
}

// Delete implements capsulev1.VolumeServiceServer.
func (v *volumes) Delete(ctx context.Context, req *capsulev1.VolumeDeleteRequest) (*capsulev1.VolumeDeleteResponse, error) {
	if _, err := v.own(ctx, req.GetName()); err != nil {
		return nil, err
	}
	named, running := v.users(req.GetName())
	switch {
	case len(running) > 0:
		return nil, errdefs.Preconditionf("volume %s is in use by workload %s; stop or delete that first", req.GetName(), strings.Join(running, ", "))
	case len(named) > 0 && !req.GetForce():
		return nil, errdefs.Preconditionf("volume %s is that of workload %s, which does not run; use --force to delete the volume with its data", req.GetName(), strings.Join(named, ", "))
	}
	return &capsulev1.VolumeDeleteResponse{}, v.door.deps.Volumes.Delete(ctx, req.GetName())
}

// Resize implements capsulev1.VolumeServiceServer.
func (v *volumes) Resize(ctx context.Context, req *capsulev1.VolumeResizeRequest) (*capsulev1.Volume, error) {
	size, err := mib(req.GetNewSizeMib())
	if err != nil {
		return nil, err
	}
	if _, err := v.idle(ctx, req.GetName()); err != nil {
		return nil, err
	}
	x, err := v.door.deps.Volumes.Resize(ctx, req.GetName(), size)
	if err != nil {
		return nil, err
	}
	return v.encode(x), nil
}

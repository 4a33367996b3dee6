package vkcocoon

import (
	"context"
	"fmt"
	"slices"

	snapshotclient "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"

	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/kube/node"
	"cocoonstack.io/cocoon/internal/kube/storage"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/volume"
	volumefile "cocoonstack.io/cocoon/internal/volume/file"
)

// storage makes the part that serves claims. nil: the VMs are reached by the cocoon binary, which gives no access to volumes.
func (n *Node) storage(ctx context.Context, c clients, events record.EventRecorder, self *node.Node, others storage.Others) (*storage.Storage, error) {
	volumes := volumesOf(n.runtime)
	if volumes == nil {
		return nil, nil
	}
	snapshots, err := snapshotclient.NewForConfig(c.json)
	if err != nil {
		return nil, fmt.Errorf("set up volumes: %w", err)
	}
	uploads, err := n.cfg.uploads()
	if err != nil {
		return nil, err
	}
	s, err := storage.New(ctx, storage.Config{
		Node: n.cfg.NodeName, Client: c.main, Volumes: volumes, Uploads: uploads, Snapshots: volumes, Snapshotted: snapshots, Others: others, Events: events, Log: n.log,
		Free: free(volumes, func() int64 {
			room := self.Object().Status.Allocatable[corev1.ResourceEphemeralStorage]
			return room.Value()
		}),
	})
	if err != nil {
		return nil, fmt.Errorf("set up volumes: %w", err)
	}
	return s, nil
}

// free returns how much room there is for volumes: for files that of the node's disk, for other kinds that of their pool.
func free(volumes pooled, disk func() int64) storage.Free {
	return func(ctx context.Context, kind string) (int64, bool, error) {
		if kind == "" || kind == volumefile.Kind {
			return disk(), true, nil
		}
		all, err := volumes.Pools(ctx)
		if err != nil {
			return 0, false, err
		}
		at := slices.IndexFunc(all, func(p volume.Pool) bool { return p.Kind == kind })
		if at < 0 {
			return 0, false, nil
		}
		return all[at].Free, true, nil
	}
}

// pooled says how full the pools of the node's volumes are.
type pooled interface {
	Pools(ctx context.Context) ([]volume.Pool, error)
}

// volumesAndSnapshots is what a node keeps for claims.
type volumesAndSnapshots interface {
	storage.Volumes
	storage.Snapshots
	pooled
}

// volumesOf returns the volumes of a runtime: those of the engine in this process, or those behind a node API. nil: it has none.
func volumesOf(r Runtime) volumesAndSnapshots {
	switch r := r.(type) {
	case local:
		if v := r.Volumes(); v != nil {
			return localVolumes{v, r}
		}
	case *nodeclient.Client:
		return remoteVolumes{r}
	}
	return nil
}

// local is a runtime whose engine is in this process.
type local interface {
	Volumes() *engine.Volumes
	VolumeFromImage(ctx context.Context, s volume.Spec, from image.PullRequest, progress func(image.Progress)) (volume.Volume, error)
}

// localVolumes are the volumes of the engine in this process.
type localVolumes struct {
	*engine.Volumes
	of local
}

func (l localVolumes) FromImage(ctx context.Context, s volume.Spec, from image.PullRequest, progress func(image.Progress)) (volume.Volume, error) {
	return l.of.VolumeFromImage(ctx, s, from, progress)
}

func (l localVolumes) Pools(ctx context.Context) ([]volume.Pool, error) {
	if p, ok := volume.As[volume.Pooled](l.Store); ok {
		return p.Pools(ctx), nil
	}
	return nil, nil
}

// remoteVolumes are the volumes behind a node API.
type remoteVolumes struct{ c *nodeclient.Client }

func (r remoteVolumes) Pools(ctx context.Context) ([]volume.Pool, error) {
	i, err := r.c.Info(ctx)
	return i.VolumePools, err
}

func (r remoteVolumes) Create(ctx context.Context, s volume.Spec) (volume.Volume, error) {
	v, err := r.c.CreateVolume(ctx, s)
	return v.Volume, err
}

func (r remoteVolumes) FromImage(ctx context.Context, s volume.Spec, from image.PullRequest, progress func(image.Progress)) (volume.Volume, error) {
	v, err := r.c.VolumeFromImage(ctx, s, from, progress)
	return v.Volume, err
}

func (r remoteVolumes) Clone(ctx context.Context, ref string, s volume.Spec) (volume.Volume, error) {
	v, err := r.c.CloneVolume(ctx, ref, s)
	return v.Volume, err
}

func (r remoteVolumes) List(ctx context.Context) ([]volume.Volume, error) {
	all, err := r.c.ListVolumes(ctx)
	out := make([]volume.Volume, len(all))
	for i := range all {
		out[i] = all[i].Volume
	}
	return out, err
}

func (r remoteVolumes) Get(ctx context.Context, ref string) (volume.Volume, error) {
	v, err := r.c.GetVolume(ctx, ref)
	return v.Volume, err
}

func (r remoteVolumes) Grow(ctx context.Context, ref string, size int64) (volume.Resized, error) {
	v, err := r.c.ResizeVolume(ctx, ref, size)
	return volume.Resized{Volume: v.Volume, Waiting: v.Waiting}, err
}

func (r remoteVolumes) Snapshot(ctx context.Context, ref string, s volume.Spec) (volume.Snapshot, error) {
	return r.c.SaveVolume(ctx, ref, s)
}

func (r remoteVolumes) GetSnapshot(ctx context.Context, ref string) (volume.Snapshot, error) {
	return r.c.GetVolumeSnapshot(ctx, ref)
}

func (r remoteVolumes) DeleteSnapshot(ctx context.Context, ref string) error {
	return r.c.RemoveVolumeSnapshot(ctx, ref)
}

func (r remoteVolumes) FromSnapshot(ctx context.Context, ref string, s volume.Spec) (volume.Volume, error) {
	v, err := r.c.VolumeFromSnapshot(ctx, ref, s)
	return v.Volume, err
}

func (r remoteVolumes) Delete(ctx context.Context, ref string) error {
	return r.c.RemoveVolume(ctx, ref)
}

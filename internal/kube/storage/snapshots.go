package storage

import (
	"context"
	"fmt"
	"sync"
	"time"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	snapshotinformers "github.com/kubernetes-csi/external-snapshotter/client/v8/informers/externalversions"
	sidecar "github.com/kubernetes-csi/external-snapshotter/v8/pkg/sidecar-controller"
	"github.com/kubernetes-csi/external-snapshotter/v8/pkg/snapshotter"
	"github.com/kubernetes-csi/external-snapshotter/v8/pkg/utils"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/pauses"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// Snapshots are the snapshots of the node's volumes, a part of volume.Snapshotter.
type Snapshots interface {
	Snapshot(ctx context.Context, ref string, s volume.Spec) (volume.Snapshot, error)
	GetSnapshot(ctx context.Context, ref string) (volume.Snapshot, error)
	DeleteSnapshot(ctx context.Context, ref string) error
	FromSnapshot(ctx context.Context, ref string, s volume.Spec) (volume.Volume, error)
}

// snapshotWorkers is how many snapshots are taken or removed at a time, resync how often all are looked at again. Until then, the library does
// not see that a snapshot was taken at last whose removal was asked for before.
const (
	snapshotWorkers = 4
	snapshotTime    = 10 * time.Minute
	resync          = time.Minute
)

// snapshots serves the VolumeSnapshotContents of this node until ctx ends. It waits until the cluster has that kind of objects. The
// cluster's snapshot-controller makes them, and labels each with the node of its volume (--enable-distributed-snapshotting).
func (s *Storage) snapshots(ctx context.Context) {
	for s.Snapshotted.Discovery().RESTClient().Get().AbsPath("/apis/"+snapshotv1.SchemeGroupVersion.String()).Do(ctx).Error() != nil {
		if !pauses.Sleep(ctx, nil, roomPeriod, false) {
			return
		}
	}
	all := snapshotinformers.NewSharedInformerFactory(s.Snapshotted, resync).Snapshot().V1()
	mine := snapshotinformers.NewSharedInformerFactoryWithOptions(s.Snapshotted, resync, snapshotinformers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.LabelSelector = labels.Set{utils.VolumeSnapshotContentManagedByLabel: s.Node}.String()
	})).Snapshot().V1()
	classes, contents := all.VolumeSnapshotClasses(), mine.VolumeSnapshotContents()
	limit := limiter[string]()
	c := sidecar.NewCSISnapshotSideCarController(s.Snapshotted, s.Client, contract.VolumeDriver, contents, classes, taker{s}, nil,
		snapshotTime, resync, "snapshot", -1, "", -1, true, limit, false, nil, nil, limit)
	var wg, workers sync.WaitGroup
	defer workers.Wait()
	wg.Go(func() { classes.Informer().Run(ctx.Done()) })
	wg.Go(func() { contents.Informer().Run(ctx.Done()) })
	wg.Go(func() { c.Run(snapshotWorkers, ctx.Done(), &workers) })
	wg.Wait()
}

// taker takes and removes snapshots. The library calls it; a call may be repeated after any failure.
type taker struct{ *Storage }

var _ snapshotter.Snapshotter = taker{}

// CreateSnapshot implements snapshotter.Snapshotter. handle is the volume; it must belong to the namespace of the VolumeSnapshot.
func (t taker) CreateSnapshot(ctx context.Context, name, handle string, parameters, _ map[string]string) (driver, id string, at time.Time, size int64, ready bool, err error) {
	namespace, of := parameters[utils.PrefixedVolumeSnapshotNamespaceKey], parameters[utils.PrefixedVolumeSnapshotNameKey]
	if namespace == "" {
		return "", "", time.Time{}, 0, false, errdefs.Preconditionf("the VolumeSnapshot of snapshot %s is not known, so neither is the owner", name)
	}
	for key := range parameters {
		if key != utils.PrefixedVolumeSnapshotNamespaceKey && key != utils.PrefixedVolumeSnapshotNameKey && key != utils.PrefixedVolumeSnapshotContentNameKey {
			return "", "", time.Time{}, 0, false, errdefs.Invalidf("the class of VolumeSnapshot %s has the parameter %s, and a node knows none; remove it", of, key)
		}
	}
	ctx = behalf(ctx, namespace)
	x, err := t.Snapshots.Snapshot(ctx, handle, volume.Spec{Name: name})
	if errdefs.IsAlreadyExists(err) {
		if x, err = t.Snapshots.GetSnapshot(ctx, name); err == nil && string(x.Volume) != handle {
			err = errdefs.Preconditionf("snapshot %s exists already and is of another volume", name)
		}
	}
	if err != nil {
		return "", "", time.Time{}, 0, false, err
	}
	t.Log.Info("volume snapshot taken", "volume", handle, "snapshot", x.ID, "for", namespace+"/"+of)
	return contract.VolumeDriver, string(x.ID), x.CreatedAt, x.Size, true, nil
}

// DeleteSnapshot implements snapshotter.Snapshotter.
func (t taker) DeleteSnapshot(ctx context.Context, id string, _ map[string]string) error {
	err := t.Snapshots.DeleteSnapshot(vm.OnBehalf(ctx, vm.Owner{}), id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	t.poke()
	return err
}

// GetSnapshotStatus implements snapshotter.Snapshotter.
func (t taker) GetSnapshotStatus(ctx context.Context, id string, _ map[string]string) (ready bool, at time.Time, size int64, group string, err error) {
	x, err := t.Snapshots.GetSnapshot(vm.OnBehalf(ctx, vm.Owner{}), id)
	return err == nil, x.CreatedAt, x.Size, "", err
}

// restore makes a volume of a VolumeSnapshot of namespace. Errors: FailedPrecondition if it is not ready, or not on this node.
func (p *provisioner) restore(ctx context.Context, namespace, name string, spec volume.Spec) (volume.Volume, error) {
	handle, err := p.snapshotOf(ctx, namespace, name)
	if err != nil {
		return volume.Volume{}, err
	}
	v, err := p.Snapshots.FromSnapshot(ctx, handle, spec)
	if errdefs.IsNotFound(err) {
		return v, errdefs.Preconditionf("the source, VolumeSnapshot %s, is not on this node; a copy can be made only on the node that has its source, so run the pod there", name)
	}
	return v, err
}

// snapshotOf returns the node's snapshot for a VolumeSnapshot. It compares both objects, because each may be anybody's.
func (p *provisioner) snapshotOf(ctx context.Context, namespace, name string) (string, error) {
	v1 := p.Snapshotted.SnapshotV1()
	x, err := v1.VolumeSnapshots(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return "", fmt.Errorf("read the source, VolumeSnapshot %s: %w", name, err)
	}
	if x.Status == nil || x.Status.BoundVolumeSnapshotContentName == nil || x.Status.ReadyToUse == nil || !*x.Status.ReadyToUse {
		return "", errdefs.Preconditionf("the source, VolumeSnapshot %s, is not ready yet", name)
	}
	content, err := v1.VolumeSnapshotContents().Get(ctx, *x.Status.BoundVolumeSnapshotContentName, metav1.GetOptions{})
	if err != nil {
		return "", fmt.Errorf("read the content of VolumeSnapshot %s: %w", name, err)
	}
	ref := content.Spec.VolumeSnapshotRef
	switch {
	case ref.UID != x.UID || ref.Namespace != namespace || ref.Name != name:
		return "", errdefs.Preconditionf("the content of VolumeSnapshot %s belongs to another VolumeSnapshot", name)
	case content.Spec.Driver != contract.VolumeDriver || content.Status == nil || content.Status.SnapshotHandle == nil:
		return "", errdefs.Preconditionf("VolumeSnapshot %s is not of driver %s, whose volumes this node makes", name, contract.VolumeDriver)
	}
	return *content.Status.SnapshotHandle, nil
}

// isSnapshot reports whether source names a VolumeSnapshot.
func isSnapshot(source *corev1.TypedLocalObjectReference) bool {
	return source.Kind == "VolumeSnapshot" && source.APIGroup != nil && *source.APIGroup == snapshotv1.GroupName
}

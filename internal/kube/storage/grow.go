package storage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/volume"
)

// The reasons of Events about a volume that grows are those of the cluster's own resizer.
const (
	eventGrown  = "VolumeResizeSuccessful"
	eventFailed = "VolumeResizeFailed"
)

// claimed queues a claim that asks for more than it has.
func (s *Storage) claimed(obj any) {
	claim, ok := obj.(*corev1.PersistentVolumeClaim)
	if ok && claim.Status.Phase == corev1.ClaimBound && grows(claim) {
		s.grown.Add(cache.MetaObjectToName(claim))
	}
}

// grows reports whether claim asks for more space than it has.
func grows(claim *corev1.PersistentVolumeClaim) bool {
	has, want := claim.Status.Capacity[corev1.ResourceStorage], claim.Spec.Resources.Requests[corev1.ResourceStorage]
	return want.Cmp(has) > 0
}

// grow serves the queue of claims that ask for more until ctx ends.
func (s *Storage) grow(ctx context.Context) {
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for {
				key, end := s.grown.Get()
				if end {
					return
				}
				s.tryGrow(ctx, key)
			}
		})
	}
	<-ctx.Done()
	s.grown.ShutDown()
	wg.Wait()
}

// tryGrow grows one claim, and queues it again if that fails.
func (s *Storage) tryGrow(ctx context.Context, key cache.ObjectName) {
	defer s.grown.Done(key)
	err := s.growClaim(ctx, key)
	if err == nil || ctx.Err() != nil {
		s.grown.Forget(key)
		return
	}
	s.grown.AddRateLimited(key)
	if apierrors.IsForbidden(err) || errors.Is(err, errWaits) { // the API server lets a node write the status of claims that its pods use: this waits for a pod
		s.Log.Debug("size of the volume not in the status of its claim yet", "claim", key.String(), "err", err)
		return
	}
	s.Log.Warn("volume not grown", "claim", key.String(), "err", err)
}

// growClaim gives a claim the space that it asks for: first the volume grows, then its PersistentVolume says so, then the claim. Each
// step may be repeated.
func (s *Storage) growClaim(ctx context.Context, key cache.ObjectName) error {
	claim, err := s.claims.PersistentVolumeClaims(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) || err == nil && (claim.DeletionTimestamp != nil || !grows(claim)) {
		return nil
	}
	if err != nil {
		return err
	}
	pv, err := s.volumes.Get(claim.Spec.VolumeName)
	if apierrors.IsNotFound(err) || err == nil && (pv.Spec.ClaimRef == nil || pv.Spec.ClaimRef.UID != claim.UID) {
		return nil
	}
	if err != nil {
		return err
	}
	if s.mine(pv) == nil {
		return s.growOther(ctx, claim, pv)
	}
	size, waiting, err := s.resize(ctx, claim, pv)
	if err != nil {
		s.Events.Eventf(claim, corev1.EventTypeWarning, eventFailed, "Volume %s cannot grow: %s", pv.Name, err)
		return err
	}
	s.poke()
	if err := s.sayCapacity(ctx, pv, size); err != nil {
		return err
	}
	if len(waiting) > 0 {
		return s.sayWaiting(ctx, claim, waiting[0])
	}
	if err := s.sayClaimed(ctx, claim, size); err != nil {
		return err
	}
	s.Events.Eventf(claim, corev1.EventTypeNormal, eventGrown, "Volume %s has %s now", pv.Name, size.String())
	return nil
}

// growOther completes the growth of a claim whose volume is of a CSI driver of others: the driver's controller has grown it, and the node
// has to.
func (s *Storage) growOther(ctx context.Context, claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) error {
	csi := pv.Spec.CSI
	if s.Others == nil || csi == nil || csi.Driver == contract.VolumeDriver || !nodeGrows(claim) {
		return nil
	}
	size := pv.Spec.Capacity[corev1.ResourceStorage]
	switch here, err := s.Others.Grow(ctx, claim.Namespace, csi.Driver, csi.VolumeHandle, size.Value()); {
	case err != nil:
		s.Events.Eventf(claim, corev1.EventTypeWarning, eventFailed, "Volume %s cannot grow on node %s: %s", pv.Name, s.Node, err)
		return err
	case !here:
		return errWaits // a pod of this node may use it later
	}
	if err := s.sayClaimed(ctx, claim, &size); err != nil {
		return err
	}
	s.Events.Eventf(claim, corev1.EventTypeNormal, eventGrown, "Volume %s has %s now", pv.Name, size.String())
	return nil
}

// nodeGrows reports whether the controller of claim's driver has grown its volume and leaves the rest to the node.
func nodeGrows(claim *corev1.PersistentVolumeClaim) bool {
	return claim.Status.AllocatedResourceStatuses[corev1.ResourceStorage] == corev1.PersistentVolumeClaimNodeResizePending ||
		slices.ContainsFunc(claim.Status.Conditions, func(c corev1.PersistentVolumeClaimCondition) bool {
			return c.Type == corev1.PersistentVolumeClaimFileSystemResizePending && c.Status == corev1.ConditionTrue
		})
}

// resize grows the volume of claim.
func (s *Storage) resize(ctx context.Context, claim *corev1.PersistentVolumeClaim, pv *corev1.PersistentVolume) (*resource.Quantity, []volume.Waiting, error) {
	want := claim.Spec.Resources.Requests[corev1.ResourceStorage]
	size, err := volume.RoundSize(want.Value())
	if err != nil {
		return nil, nil, err
	}
	v, err := s.Volumes.Grow(behalf(ctx, claim.Namespace), pv.Spec.CSI.VolumeHandle, size)
	if err != nil {
		return nil, nil, err
	}
	return resource.NewQuantity(v.Size, resource.BinarySI), v.Waiting, nil
}

// errWaits means that a guest does not use the new size of its volume yet.
var errWaits = errors.New("the guest does not use the new size yet")

// sayWaiting writes to the status of claim that a guest does not use the new size yet. It returns errWaits, so that the guest is asked
// again.
func (s *Storage) sayWaiting(ctx context.Context, claim *corev1.PersistentVolumeClaim, w volume.Waiting) error {
	message := fmt.Sprintf("VM %s: %s", w.VM, w.Reason)
	at := slices.IndexFunc(claim.Status.Conditions, func(c corev1.PersistentVolumeClaimCondition) bool {
		return c.Type == corev1.PersistentVolumeClaimFileSystemResizePending
	})
	if at >= 0 && claim.Status.Conditions[at].Message == message {
		return errWaits
	}
	claim = claim.DeepCopy()
	if at >= 0 {
		claim.Status.Conditions = slices.Delete(claim.Status.Conditions, at, at+1)
	}
	claim.Status.Conditions = append(claim.Status.Conditions, corev1.PersistentVolumeClaimCondition{
		Type: corev1.PersistentVolumeClaimFileSystemResizePending, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now(), Message: message,
	})
	if _, err := s.Client.CoreV1().PersistentVolumeClaims(claim.Namespace).UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("write the conditions of claim %s: %w", claim.Name, err)
	}
	return errWaits
}

// sayCapacity writes the size of a volume to its PersistentVolume.
func (s *Storage) sayCapacity(ctx context.Context, pv *corev1.PersistentVolume, size *resource.Quantity) error {
	if has := pv.Spec.Capacity[corev1.ResourceStorage]; has.Cmp(*size) == 0 {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"capacity": corev1.ResourceList{corev1.ResourceStorage: *size}}})
	if err == nil {
		_, err = s.Client.CoreV1().PersistentVolumes().Patch(ctx, pv.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	}
	if err != nil {
		return fmt.Errorf("write the capacity of persistentvolume %s: %w", pv.Name, err)
	}
	return nil
}

// sayClaimed writes the size of a volume to its claim, and removes what the status said about its growth.
func (s *Storage) sayClaimed(ctx context.Context, claim *corev1.PersistentVolumeClaim, size *resource.Quantity) error {
	claim = claim.DeepCopy()
	claim.Status.Capacity = corev1.ResourceList{corev1.ResourceStorage: *size}
	delete(claim.Status.AllocatedResourceStatuses, corev1.ResourceStorage)
	claim.Status.Conditions = slices.DeleteFunc(claim.Status.Conditions, func(c corev1.PersistentVolumeClaimCondition) bool {
		return c.Type == corev1.PersistentVolumeClaimResizing || c.Type == corev1.PersistentVolumeClaimFileSystemResizePending
	})
	if _, err := s.Client.CoreV1().PersistentVolumeClaims(claim.Namespace).UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("write the capacity of claim %s: %w", claim.Name, err)
	}
	return nil
}

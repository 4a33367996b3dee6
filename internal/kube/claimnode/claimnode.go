// Package claimnode chooses the node of a claim that waits for its first pod, in place of the scheduler, which sees no such pod.
//
// It decides nothing about pods, and makes no volume: the node that is chosen does.
package claimnode

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/storage/volume"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Waits reports whether the volume of claim is not made before a node is chosen for it.
func Waits(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) bool {
	return class != nil && claim.Spec.VolumeName == "" && class.VolumeBindingMode != nil && *class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer
}

// Of returns the node that is chosen for claim; "": none is.
func Of(claim *corev1.PersistentVolumeClaim) string { return claim.Annotations[volume.AnnSelectedNode] }

// Choose chooses a node for claim, which must not have changed since it was read. dry is for a request that changes nothing.
func Choose(ctx context.Context, c client.Writer, claim *corev1.PersistentVolumeClaim, node string, dry []string) error {
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": claim.UID, "resourceVersion": claim.ResourceVersion, "annotations": map[string]any{volume.AnnSelectedNode: node},
	}})
	if err == nil {
		err = c.Patch(ctx, claim, client.RawPatch(types.MergePatchType, body), &client.PatchOptions{DryRun: dry})
	}
	if err != nil {
		return fmt.Errorf("choose the node of persistentvolumeclaim %s/%s: %w", claim.Namespace, claim.Name, err)
	}
	return nil
}

// capacities is the namespace in which nodes tell of their room.
const capacities = "kube-system"

// Roomiest returns WithRoom for what nodes tell now.
func Roomiest(ctx context.Context, live, cached client.Reader, claim *corev1.PersistentVolumeClaim) (string, error) {
	room, nodes := &storagev1.CSIStorageCapacityList{}, &corev1.NodeList{}
	if err := live.List(ctx, room, client.InNamespace(capacities)); err != nil {
		return "", fmt.Errorf("list the room of nodes: %w", err)
	}
	if err := cached.List(ctx, nodes); err != nil {
		return "", fmt.Errorf("list nodes: %w", err)
	}
	return WithRoom(claim, room.Items, nodes.Items), nil
}

// WithRoom returns the node with the most room for a volume of the class of claim, among those that are ready and take pods. "": none has
// room, or none tells of it.
func WithRoom(claim *corev1.PersistentVolumeClaim, capacities []storagev1.CSIStorageCapacity, nodes []corev1.Node) string {
	if claim.Spec.StorageClassName == nil {
		return ""
	}
	size := claim.Spec.Resources.Requests[corev1.ResourceStorage]
	fit := slices.DeleteFunc(slices.Clone(capacities), func(c storagev1.CSIStorageCapacity) bool {
		return c.StorageClassName != *claim.Spec.StorageClassName || c.Capacity == nil || c.Capacity.Cmp(size) < 0 || takes(c.NodeTopology, nodes) == ""
	})
	if len(fit) == 0 {
		return ""
	}
	most := slices.MaxFunc(fit, func(a, b storagev1.CSIStorageCapacity) int {
		return cmp.Or(a.Capacity.Cmp(*b.Capacity), cmp.Compare(b.Name, a.Name))
	})
	return takes(most.NodeTopology, nodes)
}

// takes returns the node that the topology names, if it takes pods.
func takes(topology *metav1.LabelSelector, nodes []corev1.Node) string {
	if topology == nil || topology.MatchLabels[corev1.LabelHostname] == "" {
		return ""
	}
	for _, n := range nodes {
		if n.Labels[corev1.LabelHostname] == topology.MatchLabels[corev1.LabelHostname] && Takes(&n) {
			return n.Name
		}
	}
	return ""
}

// Takes reports whether a node is ready and takes pods.
func Takes(n *corev1.Node) bool {
	return n.DeletionTimestamp == nil && !n.Spec.Unschedulable && slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

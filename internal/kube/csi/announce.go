package csi

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/csinode"
)

// annotationManaged makes the cluster's attach-detach controller attach the volumes of the pods of a node.
const annotationManaged = "volumes.kubernetes.io/controller-managed-attach-detach"

// say writes which drivers this machine has: into the CSINode, and into the labels of the node for their topology.
func (p *Plugins) say(ctx context.Context, all []csinode.Driver) error {
	node, err := p.Client.CoreV1().Nodes().Get(ctx, p.Name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read node %s: %w", p.Name, err)
	}
	var drivers []storagev1.CSINodeDriver
	labels := map[string]string{}
	for _, d := range all {
		if key, had, ok := elsewhere(node, d.Topology); ok {
			p.Log.Warn("CSI driver left out: it says that this machine is elsewhere than the label of its node says", "driver", d.Name, "key", key, "value", d.Topology[key], "label", had)
			continue
		}
		entry := storagev1.CSINodeDriver{Name: d.Name, NodeID: d.NodeID, TopologyKeys: slices.Sorted(maps.Keys(d.Topology))}
		if d.MaxVolumes > 0 {
			entry.Allocatable = &storagev1.VolumeNodeResources{Count: new(int32(min(d.MaxVolumes, 1<<31-1)))}
		}
		drivers = append(drivers, entry)
		maps.Copy(labels, d.Topology)
	}
	if err := p.label(ctx, node, labels, len(all) > 0); err != nil {
		return err
	}
	return Announce(ctx, p.Client, node, func(name string) bool { return name == contract.VolumeDriver }, drivers)
}

// elsewhere returns a label of node that contradicts a driver's topology; false: there is none. As with the kubelet, no driver changes a
// label that is there.
func elsewhere(node *corev1.Node, topology map[string]string) (key, had string, ok bool) {
	for _, key := range slices.Sorted(maps.Keys(topology)) {
		if had, ok := node.Labels[key]; ok && had != topology[key] {
			return key, had, true
		}
	}
	return "", "", false
}

// label adds labels to the node, and, with managed, the annotation for volumes that must be attached.
func (p *Plugins) label(ctx context.Context, node *corev1.Node, labels map[string]string, managed bool) error {
	meta := map[string]any{}
	maps.DeleteFunc(labels, func(key, value string) bool { return node.Labels[key] == value })
	if len(labels) > 0 {
		meta["labels"] = labels
	}
	if managed && node.Annotations[annotationManaged] != "true" {
		meta["annotations"] = map[string]string{annotationManaged: "true"}
	}
	if len(meta) == 0 {
		return nil
	}
	body, err := json.Marshal(map[string]any{"metadata": meta})
	if err != nil {
		return fmt.Errorf("encode node patch: %w", err)
	}
	if _, err := p.Client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("label node %s with the topology of its CSI drivers: %w", node.Name, err)
	}
	return nil
}

// Announce makes the CSINode of node name drivers, beside those in it that keep selects: each part of a virtual node announces its own.
func Announce(ctx context.Context, client kubernetes.Interface, node *corev1.Node, keep func(name string) bool, drivers []storagev1.CSINodeDriver) error {
	nodes := client.StorageV1().CSINodes()
	owner := []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}}
	err := retry.OnError(retry.DefaultBackoff, func(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }, func() error {
		has, err := nodes.Get(ctx, node.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			if len(drivers) == 0 {
				return nil
			}
			_, err = nodes.Create(ctx, &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: node.Name, OwnerReferences: owner}, Spec: storagev1.CSINodeSpec{Drivers: drivers}}, metav1.CreateOptions{})
			return err
		}
		if err != nil {
			return err
		}
		want := slices.DeleteFunc(slices.Clone(has.Spec.Drivers), func(d storagev1.CSINodeDriver) bool { return !keep(d.Name) })
		want = append(want, drivers...)
		slices.SortFunc(want, func(a, b storagev1.CSINodeDriver) int { return strings.Compare(a.Name, b.Name) })
		if apiequality.Semantic.DeepEqual(want, has.Spec.Drivers) {
			return nil
		}
		has = has.DeepCopy()
		has.OwnerReferences, has.Spec.Drivers = owner, want
		_, err = nodes.Update(ctx, has, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		return fmt.Errorf("write CSINode %s: %w", node.Name, err)
	}
	return nil
}

// Package controller holds what the controllers of Cocoon's custom resources share: the interface to the registry, and
// functions that read and mark the pods of VMs. It reconciles nothing itself; see its sub-packages.
package controller

import (
	"bytes"
	"context"
	"maps"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	applycore "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"cocoonstack.io/cocoon/api/contract"
)

// VM identifies a VM. Its name is unique in its namespace.
type VM struct{ Namespace, Name string }

// Registry is what controllers need from the snapshot registry. A VM's snapshots are below its namespace; see
// contract.Repository.
type Registry interface {
	// Has reports whether the registry has a durable, complete snapshot of the VM under the tag.
	Has(ctx context.Context, of VM, tag string) (bool, error)
	// HadOld reports whether the registry has a snapshot in the old repository, which earlier releases without owners used,
	// and no record says that the snapshot belongs to another namespace. The node verifies the owner before it uses the
	// snapshot.
	HadOld(ctx context.Context, of VM, tag string) (bool, error)
	// Delete removes the tag, also in the old repository, if the snapshot is recorded as one of the VM's namespace. A missing
	// tag is no error.
	Delete(ctx context.Context, of VM, tag string) error
}

// Mark makes hibernate and generation the only annotations of the pod that this field owner sets. Several owners may request
// hibernation. The VM wakes when no owner requests it any more. A pod that is deleted or replaced is no error.
func Mark(ctx context.Context, c client.Client, owner string, pod *corev1.Pod, hibernate bool, generation string) error {
	annotations := map[string]string{}
	if hibernate {
		annotations[contract.KeyHibernate] = "true"
	}
	if generation != "" {
		annotations[contract.KeyGeneration] = generation
	}
	apply := applycore.Pod(pod.Name, pod.Namespace).WithUID(pod.UID).WithAnnotations(annotations)
	return IgnoreStale(c.Apply(ctx, apply, client.FieldOwner(owner), client.ForceOwnership))
}

// Marked reports whether owner has requested, through Mark, that the pod's VM hibernates.
func Marked(pod *corev1.Pod, owner string) bool {
	for _, f := range pod.ManagedFields {
		if f.Manager == owner && f.Operation == metav1.ManagedFieldsOperationApply && f.FieldsV1 != nil {
			return bytes.Contains(f.FieldsV1.GetRawBytes(), []byte(`"f:`+contract.KeyHibernate+`"`))
		}
	}
	return false
}

// IgnoreStale ignores the error if the object was changed or deleted meanwhile, because that change triggers the next
// reconciliation. It is for objects of which every change does; PodChanged drops changes of pods.
func IgnoreStale(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// Ready reports whether the pod's VM is ready.
func Ready(pod *corev1.Pod) bool {
	return pod.DeletionTimestamp == nil && conditionTrue(pod, corev1.PodReady)
}

func conditionTrue(pod *corev1.Pod, kind corev1.PodConditionType) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == kind {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// Life is the lifecycle of the pod's VM as its node reports it.
func Life(pod *corev1.Pod) contract.Lifecycle {
	l, _ := contract.ParseLifecycle(pod.Annotations)
	return l
}

// Failed reports whether the pod's VM has failed permanently, and why.
func Failed(pod *corev1.Pod) (why string, failed bool) {
	life := Life(pod)
	switch {
	case life.State == contract.LifecycleFailed:
		return life.Message, true
	case pod.Status.Phase == corev1.PodFailed:
		return pod.Status.Reason + ": " + pod.Status.Message, true
	}
	return "", false
}

// Hibernated reports whether the node reports the VM as hibernated for the generation with which the pod was last marked.
func Hibernated(pod *corev1.Pod) bool {
	life := Life(pod)
	return contract.Hibernate(pod.Annotations) && life.State == contract.LifecycleHibernated && answers(life.Observed, contract.Generation(pod.Annotations))
}

// Awake reports whether the VM is restored and ready for the generation with which the pod was last marked.
func Awake(pod *corev1.Pod) bool {
	life := Life(pod)
	return !contract.Hibernate(pod.Annotations) && life.State == contract.LifecycleReady && answers(life.Observed, contract.Generation(pod.Annotations)) && Ready(pod)
}

// answers reports whether the observed generation is at least the requested one.
func answers(observed, asked string) bool {
	a, _ := strconv.ParseInt(asked, 10, 64)
	o, _ := strconv.ParseInt(observed, 10, 64)
	return o >= a
}

// PodChanged passes changes of pods that matter to controllers of VMs. It drops heartbeats and changes of timestamps.
func PodChanged() predicate.Predicate {
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		old, ok := e.ObjectOld.(*corev1.Pod)
		now, ok2 := e.ObjectNew.(*corev1.Pod)
		if !ok || !ok2 {
			return true
		}
		return old.UID != now.UID || (old.DeletionTimestamp == nil) != (now.DeletionTimestamp == nil) || old.Spec.NodeName != now.Spec.NodeName ||
			old.Status.Phase != now.Status.Phase || old.Status.Reason != now.Status.Reason || old.Status.PodIP != now.Status.PodIP ||
			conditionTrue(old, corev1.PodReady) != conditionTrue(now, corev1.PodReady) ||
			conditionTrue(old, corev1.PodScheduled) != conditionTrue(now, corev1.PodScheduled) ||
			!maps.Equal(old.Annotations, now.Annotations) || !maps.Equal(old.Labels, now.Labels)
	}}
}

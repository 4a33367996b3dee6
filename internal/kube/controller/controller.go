// Package controller is what the controllers of Cocoon's custom resources have in common: what they need of the registry,
// and how they read and mark the pods of VMs. It reconciles nothing itself; see its sub-packages.
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

// VM says which VM is meant: names are those of its namespace.
type VM struct{ Namespace, Name string }

// Registry is what controllers ask of the registry of snapshots. A VM's are below its namespace; see contract.Repository.
type Registry interface {
	// Has reports whether a snapshot of the VM is there under the tag, durable and complete.
	Has(ctx context.Context, of VM, tag string) (bool, error)
	// HadOld reports whether one is where releases before owners kept it, and does not say that it is another namespace's. Its
	// node makes sure of that before it uses it.
	HadOld(ctx context.Context, of VM, tag string) (bool, error)
	// Delete removes the tag, also where earlier releases kept it, if what is there says that it is of the VM's namespace. One
	// that is not there is no error.
	Delete(ctx context.Context, of VM, tag string) error
}

// Mark makes hibernate and generation the pod's annotations of that owner, and of no other. Several owners may wish that a
// VM hibernates: it wakes when none does any more. A pod that is gone, or is another by now, is no error.
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

// Marked reports whether owner wishes, through Mark, that the pod's VM hibernates.
func Marked(pod *corev1.Pod, owner string) bool {
	for _, f := range pod.ManagedFields {
		if f.Manager == owner && f.Operation == metav1.ManagedFieldsOperationApply && f.FieldsV1 != nil {
			return bytes.Contains(f.FieldsV1.GetRawBytes(), []byte(`"f:`+contract.KeyHibernate+`"`))
		}
	}
	return false
}

// IgnoreStale takes an object that has changed meanwhile, or is gone, for no error: the change brings the next turn.
func IgnoreStale(err error) error {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// Ready reports whether the pod's VM serves.
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

// Life is the life of the pod's VM as its node tells it.
func Life(pod *corev1.Pod) contract.Lifecycle {
	l, _ := contract.ParseLifecycle(pod.Annotations)
	return l
}

// Failed reports whether the pod's VM has failed for good, and why.
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

// Hibernated reports whether the node says that the VM is hibernated, in answer to the generation that the pod was last
// marked with.
func Hibernated(pod *corev1.Pod) bool {
	life := Life(pod)
	return contract.Hibernate(pod.Annotations) && life.State == contract.LifecycleHibernated && answers(life.Observed, contract.Generation(pod.Annotations))
}

// Awake reports whether the VM runs and is itself, in answer to the generation that the pod was last marked with.
func Awake(pod *corev1.Pod) bool {
	life := Life(pod)
	return !contract.Hibernate(pod.Annotations) && life.State == contract.LifecycleReady && answers(life.Observed, contract.Generation(pod.Annotations)) && Ready(pod)
}

// answers reports whether a state observed at one generation answers for another.
func answers(observed, asked string) bool {
	a, _ := strconv.ParseInt(asked, 10, 64)
	o, _ := strconv.ParseInt(observed, 10, 64)
	return o >= a
}

// PodChanged lets through changes of a pod that mean something to who follows its VM: not heartbeats and not times.
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

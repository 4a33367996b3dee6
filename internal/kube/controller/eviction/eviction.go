// Package eviction hibernates VMs before their pods are evicted, and wakes them if the eviction was cancelled.
//
// kubectl drain empties a node by requesting evictions. Decide answers such requests. The reconciler wakes the VMs of a node
// that accepts pods again. The package itself evicts nothing.
package eviction

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/convert"
)

// fieldOwner is the field owner of the annotation that makes a VM hibernate for an eviction.
const fieldOwner = "cocoon-eviction"

// Answer is the decision on a request to evict a pod.
type Answer int

// The answers.
const (
	Allow  Answer = iota // the eviction loses no state that is to be kept
	Wait                 // the client must retry later
	Refuse               // a retry does not help until the pod, its annotations or the manager changes
)

// Verdict is an answer with its details.
type Verdict struct {
	Answer    Answer
	Hibernate bool   // the caller must mark the VM to hibernate
	Evacuate  bool   // the caller must mark the instance for the program that empties nodes
	Why       string // the reason, for the client; "" with Allow
}

// Durable reports whether the registry has the hibernated state of the pod's VM.
type Durable func() (bool, error)

// Decide answers a request to evict pod. emptied says whether its node is being emptied. durable is nil if there is no
// registry.
func Decide(pod *corev1.Pod, emptied bool, durable Durable) Verdict {
	if pod.DeletionTimestamp != nil || pod.Status.Phase != corev1.PodRunning { // the VM has no state yet, or has lost it
		return Verdict{}
	}
	const otherwise = "to evict it and lose its data, set the annotation " + contract.KeyEvictionPolicy + " to delete"
	name := convert.VMName(pod)
	switch policy, err := policyOf(pod); {
	case err != nil:
		return Verdict{Answer: Refuse, Why: err.Error()}
	case policy == contract.EvictDelete, policy == contract.EvictShutdown:
		return Verdict{}
	case policy == contract.EvictRefuse:
		return Verdict{Answer: Refuse, Why: "VM " + name + " may not be evicted because of its annotation " + contract.KeyEvictionPolicy + "; delete the pod, or change the annotation"}
	}
	if pod.Annotations[contract.KeyName] == "" && pod.GenerateName != "" {
		return Verdict{Answer: Refuse, Why: "VM " + name + " cannot hibernate for its eviction: the next pod gets another name, so it would not wake this VM; give the VM a name with " + contract.KeyName + ", or, " + otherwise}
	}
	if why, dead := controller.Failed(pod); dead {
		return Verdict{Answer: Refuse, Why: "VM " + name + " failed (" + why + ") and cannot hibernate; " + otherwise}
	}
	if durable == nil {
		return Verdict{Answer: Refuse, Why: "VM " + name + " cannot hibernate: the manager has no registry; set EPOCH_URL of the manager, or, " + otherwise}
	}
	life := controller.Life(pod)
	if controller.Hibernated(pod) {
		switch there, err := durable(); {
		case err != nil:
			return Verdict{Answer: Wait, Why: fmt.Sprintf("VM %s is hibernated, but its state cannot be looked up in the registry: %v", name, err)}
		case there:
			return Verdict{}
		}
		return Verdict{Answer: Wait, Why: "VM " + name + " is hibernated, but its state is not in the registry yet"}
	}
	why := "VM " + name + " is told to hibernate; its pod can be evicted when its state is in the registry"
	if life.Message != "" {
		why += " (" + life.Message + ")"
	}
	if !emptied && !contract.Hibernate(pod.Annotations) {
		return Verdict{Answer: Wait, Why: "VM " + name + " would lose its data; to hibernate it first, cordon node " + pod.Spec.NodeName + ", as kubectl drain does, or create a CocoonHibernation for its pod; " + otherwise}
	}
	return Verdict{Answer: Wait, Hibernate: emptied && !controller.Marked(pod, fieldOwner), Why: why}
}

// policyOf returns the eviction policy of the pod. By default, a VM that the node owns and would save before deletion
// hibernates; any other pod is evicted normally.
func policyOf(pod *corev1.Pod) (contract.EvictionPolicy, error) {
	policy, err := contract.ParseEvictionPolicy(pod.Annotations)
	if err != nil || policy != "" {
		return policy, err
	}
	if pod.Annotations[contract.KeyManaged] == "true" && convert.Saves(pod) {
		return contract.EvictHibernate, nil
	}
	return contract.EvictDelete, nil
}

// Hibernate marks the VM of pod to hibernate, so that the pod can be evicted.
func Hibernate(ctx context.Context, c client.Client, pod *corev1.Pod) error {
	return controller.Mark(ctx, c, fieldOwner, pod, true, "")
}

// Emptied reports whether the node no longer accepts pods.
func Emptied(node *corev1.Node) bool { return node.Spec.Unschedulable }

// Reconciler wakes VMs that were marked to hibernate for an eviction, when their node accepts pods again.
type Reconciler struct{ Client client.Client }

// Setup adds the reconciler to m.
func (r *Reconciler) Setup(m ctrl.Manager) error {
	marked := predicate.NewPredicateFuncs(func(o client.Object) bool {
		pod, ok := o.(*corev1.Pod)
		return ok && controller.Marked(pod, fieldOwner)
	})
	opened := predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return true },
		UpdateFunc: func(e event.UpdateEvent) bool {
			old, ok := e.ObjectOld.(*corev1.Node)
			now, ok2 := e.ObjectNew.(*corev1.Node)
			return ok && ok2 && Emptied(old) && !Emptied(now)
		},
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	}
	return ctrl.NewControllerManagedBy(m).Named("eviction").
		For(&corev1.Pod{}, builder.WithPredicates(marked)).
		Watches(&corev1.Node{}, handler.EnqueueRequestsFromMapFunc(r.podsOf), builder.WithPredicates(opened)).
		Complete(r)
}

// podsOf returns the pods on node whose VMs were marked to hibernate.
func (r *Reconciler) podsOf(ctx context.Context, node client.Object) []reconcile.Request {
	var list corev1.PodList
	if err := r.Client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil // the cache is not synced yet; each pod triggers its own reconciliation when it is
	}
	var found []reconcile.Request
	for i := range list.Items {
		if pod := &list.Items[i]; pod.Spec.NodeName == node.GetName() && controller.Marked(pod, fieldOwner) {
			found = append(found, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(pod)})
		}
	}
	return found
}

// Reconcile wakes one pod's VM if its node accepts pods again.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	pod, node := &corev1.Pod{}, &corev1.Node{}
	if err := r.Client.Get(ctx, req.NamespacedName, pod); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if !controller.Marked(pod, fieldOwner) || pod.DeletionTimestamp != nil {
		return ctrl.Result{}, nil
	}
	if err := r.Client.Get(ctx, client.ObjectKey{Name: pod.Spec.NodeName}, node); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if Emptied(node) {
		return ctrl.Result{}, nil
	}
	if err := controller.Mark(ctx, r.Client, fieldOwner, pod, false, ""); err != nil {
		return ctrl.Result{}, fmt.Errorf("wake VM of pod %s: %w", req.NamespacedName, err)
	}
	return ctrl.Result{}, nil
}

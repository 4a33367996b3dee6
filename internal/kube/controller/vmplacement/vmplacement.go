// Package vmplacement watches the nodes that have claimed VMs. It reports the state of the node in the claim's condition and
// in Events of waiting pods. It releases claims according to their policies. It recreates pods that are bound to a node
// without a valid claim.
//
// It creates no claims. A node creates the claim before it creates the VM.
package vmplacement

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/placement"
)

// Reasons of Events, in addition to the reasons of the condition.
const (
	ReasonReleased = "PlacementReleased"
	ReasonStale    = "PlacementStale"
)

// byVM is the index by which the cache finds the pods of a VM.
const byVM = "vm"

// registryPause is the delay before a failed registry request is retried.
const registryPause = 5 * time.Second

// Reconciler reconciles claims. All fields are required except Registry and Count. Without a registry, only the time limit and
// users release claims.
type Reconciler struct {
	Client   client.Client
	Registry controller.Registry
	Events   events.EventRecorder
	Now      func() time.Time
	Count    func(reason string) // called for each released claim; may be nil

	reported sync.Map // by pod UID: the reason for waiting last reported; only prevents duplicate Events
}

// Setup adds the reconciler to m, with that many concurrent workers.
func (r *Reconciler) Setup(ctx context.Context, m ctrl.Manager, concurrency int) error {
	if err := m.GetFieldIndexer().IndexField(ctx, &corev1.Pod{}, byVM, func(o client.Object) []string {
		if pod, _ := o.(*corev1.Pod); asks(pod) {
			return []string{vmOf(pod)}
		}
		return nil
	}); err != nil {
		return fmt.Errorf("index pods by VM: %w", err)
	}
	return ctrl.NewControllerManagedBy(m).Named("vmplacement").
		For(&v1.VMPlacement{}).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(ofPod), builder.WithPredicates(controller.PodChanged())).
		Watches(&corev1.Node{}, handler.EnqueueRequestsFromMapFunc(r.ofNode), builder.WithPredicates(nodeChanged())).
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(r)
}

func asks(pod *corev1.Pod) bool {
	ask, err := contract.ParseSticky(pod.Annotations)
	return err == nil && ask.Asked
}

// vmOf returns the name that this release gives to pod's VM.
func vmOf(pod *corev1.Pod) string {
	return contract.CanonicalVMName(pod.Namespace, placement.NameOf(pod))
}

func ofPod(_ context.Context, o client.Object) []reconcile.Request {
	pod, ok := o.(*corev1.Pod)
	if !ok || !asks(pod) {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: pod.Namespace, Name: vmOf(pod)}}}
}

// ofNode scans all claims. It uses no index, because a custom resource cannot be indexed before the API server knows it, and
// nodes seldom change.
func (r *Reconciler) ofNode(ctx context.Context, o client.Object) (requests []reconcile.Request) {
	var claims v1.VMPlacementList
	if err := r.Client.List(ctx, &claims); err != nil {
		return nil // the cache is not synced yet, or has stopped
	}
	for i := range claims.Items {
		if claims.Items[i].Status.NodeName == o.GetName() {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&claims.Items[i])})
		}
	}
	return requests
}

// nodeChanged passes the changes that placement.Unavailable depends on, and drops heartbeats.
func nodeChanged() predicate.Predicate {
	ready := func(n *corev1.Node) corev1.ConditionStatus {
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady {
				return c.Status
			}
		}
		return corev1.ConditionUnknown
	}
	return predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
		old, ok := e.ObjectOld.(*corev1.Node)
		now, ok2 := e.ObjectNew.(*corev1.Node)
		return !ok || !ok2 || old.UID != now.UID || ready(old) != ready(now) || old.Status.NodeInfo.MachineID != now.Status.NodeInfo.MachineID
	}}
}

// Reconcile does one reconciliation of the claim of one VM.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	v, err := r.view(ctx, req.NamespacedName)
	if err != nil {
		return ctrl.Result{}, err
	}
	a := r.decide(ctx, controller.VM{Namespace: req.Namespace, Name: req.Name}, v)
	return ctrl.Result{RequeueAfter: a.again}, r.carryOut(ctx, v, a)
}

// decide makes the plan. If the node is gone and the claim may be released for that, it asks the registry: a VM whose
// hibernated state is in the registry can resume on any node. An older snapshot of the VM does not count.
func (r *Reconciler) decide(ctx context.Context, of controller.VM, v view) actions {
	a := plan(v)
	gone := a.reason == v1.ReasonNodeRemoved || a.reason == v1.ReasonNodeReplaced
	if !gone || r.Registry == nil || a.release != "" || v.claim.Spec.Release == v1.ReleaseNever {
		return a
	}
	var err error
	if v.durable, err = r.Registry.Has(ctx, of, contract.HibernateSnapshotTag); err != nil {
		a.again = registryPause // until then the status stays as known
		return a
	}
	return plan(v)
}

func (r *Reconciler) view(ctx context.Context, name types.NamespacedName) (view, error) {
	v := view{now: r.Now()}
	name.Name = contract.CanonicalVMName(name.Namespace, name.Name)
	var pods corev1.PodList
	if err := r.Client.List(ctx, &pods, client.InNamespace(name.Namespace), client.MatchingFields{byVM: name.Name}); err != nil {
		return v, fmt.Errorf("list pods: %w", err)
	}
	for i := range pods.Items {
		v.pods = append(v.pods, &pods.Items[i])
	}
	claim, err := placement.Lookup(name.Namespace, name.Name, func(vmName string) (*v1.VMPlacement, error) {
		claim := &v1.VMPlacement{}
		return claim, r.Client.Get(ctx, types.NamespacedName{Namespace: name.Namespace, Name: vmName}, claim)
	})
	switch {
	case apierrors.IsNotFound(err):
		return v, nil
	case err != nil:
		return v, fmt.Errorf("get claim: %w", err)
	}
	v.claim = claim
	if claim.Status.NodeName == "" {
		return v, nil
	}
	node := &corev1.Node{}
	switch err := r.Client.Get(ctx, types.NamespacedName{Name: claim.Status.NodeName}, node); {
	case apierrors.IsNotFound(err):
	case err != nil:
		return v, fmt.Errorf("get node: %w", err)
	default:
		v.node = node
	}
	return v, nil
}

func (r *Reconciler) carryOut(ctx context.Context, v view, a actions) error {
	if a.release != "" {
		return r.release(ctx, v, a.release)
	}
	if v.claim != nil && !apiequality.Semantic.DeepEqual(v.claim.Status, a.status) {
		claim := v.claim.DeepCopy()
		claim.Status = a.status
		if err := r.Client.Status().Update(ctx, claim); err != nil {
			return controller.IgnoreStale(fmt.Errorf("write status: %w", err))
		}
	}
	for _, pod := range v.pods {
		switch {
		case a.waiting == "" || !unplaced(pod):
			r.reported.Delete(pod.UID)
		default:
			if before, _ := r.reported.Swap(pod.UID, a.waiting); before != a.waiting {
				r.event(pod, corev1.EventTypeWarning, a.reason, a.waiting)
			}
		}
	}
	for _, pod := range a.stale {
		if err := r.renew(ctx, pod); err != nil {
			return err
		}
	}
	return nil
}

// release deletes the claim if it has not changed since it was read. The next reconciliation handles the pods that wait for
// the claimed node.
func (r *Reconciler) release(ctx context.Context, v view, why string) error {
	err := r.Client.Delete(ctx, v.claim, client.Preconditions{UID: &v.claim.UID, ResourceVersion: &v.claim.ResourceVersion})
	if err != nil {
		return controller.IgnoreStale(fmt.Errorf("release claim: %w", err))
	}
	if r.Count != nil {
		r.Count(ReasonReleased)
	}
	r.event(v.claim, corev1.EventTypeNormal, ReasonReleased, "claim released: "+why)
	for _, pod := range v.pods {
		if unplaced(pod) {
			r.event(pod, corev1.EventTypeNormal, ReasonReleased, "the VM may go to any node: "+why)
		}
	}
	return nil
}

// renew deletes a pod that was bound to a node which no longer holds the VM's state, so that its controller recreates it. The
// node affinity of a pod cannot be changed.
func (r *Reconciler) renew(ctx context.Context, pod *corev1.Pod) error {
	on := pod.Annotations[contract.KeyPlacedOn]
	if metav1.GetControllerOf(pod) == nil {
		if before, _ := r.reported.Swap(pod.UID, on); before != on {
			r.event(pod, corev1.EventTypeWarning, ReasonStale, "the pod was bound to node "+on+", which no longer holds the VM's state; delete the pod and create it again")
		}
		return nil
	}
	err := r.Client.Delete(ctx, pod, client.Preconditions{UID: &pod.UID, ResourceVersion: &pod.ResourceVersion})
	if err != nil { // also for a pod that changed meanwhile: PodChanged may not pass that change
		return client.IgnoreNotFound(fmt.Errorf("delete pod %s: %w", pod.Name, err))
	}
	r.event(pod, corev1.EventTypeNormal, ReasonStale, "the pod was bound to node "+on+", which no longer holds the VM's state; the pod is deleted and recreated")
	return nil
}

func (r *Reconciler) event(o runtime.Object, kind, reason, text string) {
	r.Events.Eventf(o, nil, kind, reason, "Reconcile", "%s", text)
}

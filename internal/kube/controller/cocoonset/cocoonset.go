// Package cocoonset creates the pods of a CocoonSet: the main VM, the sub-agents that are forked from it, and toolboxes. It
// hibernates, wakes and moves their VMs. When a set is deleted, it removes the set's snapshots from the registry.
//
// Each reconciliation makes a plan from the current state (plan.go, pure) and executes it. Between reconciliations only the
// objects hold state. The package creates no VMs. The nodes do, according to the pods' annotations.
package cocoonset

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/placement"
)

// fieldOwner is the field owner of this controller's annotations on pods.
const fieldOwner = "cocoonset"

// Reasons of the Events that a metric counts.
const (
	ReasonRebuilding = "SubAgentRebuilding"
	ReasonDeadLetter = "SubAgentDeadLetter"
	ReasonMainFailed = "MainAgentFailed"
)

// registryPause is the delay before a failed registry request is retried.
const registryPause = 5 * time.Second

// Reconciler reconciles CocoonSets. All fields are required except Registry. Without a registry no VM's state is durable, and
// a suspended set stays Suspending.
type Reconciler struct {
	Client   client.Client
	Registry controller.Registry
	Events   events.EventRecorder
	Now      func() time.Time
	Count    func(reason string) // called for each Event; may be nil
}

// Setup adds the reconciler to m, with that many concurrent workers. Every change of a set triggers a reconciliation. So does
// a write of its status, because an earlier reconciliation that did not see the write yet may have skipped its work.
func (r *Reconciler) Setup(m ctrl.Manager, concurrency int) error {
	return ctrl.NewControllerManagedBy(m).Named("cocoonset").
		For(&v1.CocoonSet{}).
		Owns(&corev1.Pod{}, builder.WithPredicates(controller.PodChanged())).
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(r)
}

// Reconcile does one reconciliation of one set.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	set := &v1.CocoonSet{}
	if err := r.Client.Get(ctx, req.NamespacedName, set); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	pods, err := r.pods(ctx, set)
	if err != nil {
		return ctrl.Result{}, err
	}
	if set.DeletionTimestamp != nil {
		return r.finish(ctx, set, pods)
	}
	if !controllerutil.ContainsFinalizer(set, v1.FinalizerSet) {
		before := set.DeepCopy()
		controllerutil.AddFinalizer(set, v1.FinalizerSet)
		if err := r.Client.Patch(ctx, set, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return ctrl.Result{}, controller.IgnoreStale(fmt.Errorf("add finalizer: %w", err))
		}
	}
	v := view{set: set, pods: pods, durable: map[string]bool{}, noRegistry: r.Registry == nil, now: r.Now()}
	for _, name := range asks(v) {
		if r.Registry == nil {
			break
		}
		if v.durable[name], err = r.durable(ctx, v, name); err != nil {
			r.event(set, note{corev1.EventTypeWarning, "RegistryUnavailable", fmt.Sprintf("the state of VM %s cannot be looked up in the registry: %s", name, err)})
			return ctrl.Result{RequeueAfter: registryPause}, nil
		}
	}
	if v.claims, err = r.claims(ctx, set); err != nil {
		return ctrl.Result{}, err
	}
	return r.carryOut(ctx, set, plan(v))
}

// durable reports whether the registry has the hibernated state of a VM of the set. The state of a VM without a pod may still
// be in the old repository, if the VM hibernated before an upgrade.
func (r *Reconciler) durable(ctx context.Context, v view, name string) (bool, error) {
	of := controller.VM{Namespace: v.set.Namespace, Name: name}
	there, err := r.Registry.Has(ctx, of, contract.HibernateSnapshotTag)
	if there || err != nil || slices.ContainsFunc(v.pods, func(pod *corev1.Pod) bool {
		return contract.CanonicalVMName(pod.Namespace, convert.VMName(pod)) == name
	}) {
		return there, err
	}
	return r.Registry.HadOld(ctx, of, contract.HibernateSnapshotTag)
}

// claims returns the VMPlacements of the set's VMs, by VM name.
func (r *Reconciler) claims(ctx context.Context, set *v1.CocoonSet) (map[string]*v1.VMPlacement, error) {
	all := map[string]*v1.VMPlacement{}
	if set.Spec.Sticky == "" {
		return all, nil
	}
	for _, m := range members(set) {
		claim, err := placement.Lookup(set.Namespace, m.vmName(), func(name string) (*v1.VMPlacement, error) {
			claim := &v1.VMPlacement{}
			return claim, r.Client.Get(ctx, client.ObjectKey{Namespace: set.Namespace, Name: name}, claim)
		})
		switch {
		case err == nil:
			all[m.vmName()] = claim
		case !apierrors.IsNotFound(err):
			return nil, fmt.Errorf("get claim of VM %s: %w", m.vmName(), err)
		}
	}
	return all, nil
}

// free deletes the VMPlacements of VMs whose state is no longer on a node.
func (r *Reconciler) free(ctx context.Context, set *v1.CocoonSet, names []string) error {
	for _, name := range names {
		claim := &v1.VMPlacement{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: set.Namespace}}
		if err := r.Client.Delete(ctx, claim); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("release claim of VM %s: %w", name, err)
		}
	}
	return nil
}

// pods returns the pods that the set owns.
func (r *Reconciler) pods(ctx context.Context, set *v1.CocoonSet) ([]*corev1.Pod, error) {
	var list corev1.PodList
	if err := r.Client.List(ctx, &list, client.InNamespace(set.Namespace), client.MatchingLabels{contract.LabelSetName: set.Name}); err != nil {
		return nil, fmt.Errorf("list pods: %w", err)
	}
	var own []*corev1.Pod
	for i := range list.Items {
		if metav1.IsControlledBy(&list.Items[i], set) {
			own = append(own, &list.Items[i])
		}
	}
	return own, nil
}

// carryOut executes the plan. It writes the status first, because later reconciliations depend on it.
func (r *Reconciler) carryOut(ctx context.Context, set *v1.CocoonSet, a actions) (ctrl.Result, error) {
	for _, n := range a.events {
		r.event(set, n)
	}
	if !apiequality.Semantic.DeepEqual(set.Status, a.status) {
		set.Status = a.status
		if err := r.Client.Status().Update(ctx, set); err != nil {
			return ctrl.Result{}, controller.IgnoreStale(fmt.Errorf("write status: %w", err))
		}
	}
	for _, m := range a.mark {
		if !m.hibernate && contract.KeepSnapshot(m.pod.Annotations) { // an earlier plan was about to remove the pod
			if err := r.annotate(ctx, m.pod, contract.KeyKeepSnapshot, nil, "keep", false); err != nil {
				return ctrl.Result{}, controller.IgnoreStale(err)
			}
		}
		if err := controller.Mark(ctx, r.Client, fieldOwner, m.pod, m.hibernate, m.generation); err != nil {
			return ctrl.Result{}, fmt.Errorf("mark pod %s: %w", m.pod.Name, err)
		}
	}
	if a.offer != nil {
		if err := r.annotate(ctx, a.offer, contract.KeyOfferFork, "true", "fork", false); err != nil {
			return ctrl.Result{}, controller.IgnoreStale(err)
		}
	}
	for _, d := range a.remove {
		if d.keep && !contract.KeepSnapshot(d.pod.Annotations) { // set before the deletion, so that the node sees it
			if err := r.annotate(ctx, d.pod, contract.KeyKeepSnapshot, "true", "keep", true); err != nil {
				return ctrl.Result{}, client.IgnoreNotFound(err) // PodChanged may not pass the change with which it conflicts
			}
		}
	}
	if err := r.remember(ctx, set, a.hibernated); err != nil {
		return ctrl.Result{}, controller.IgnoreStale(err)
	}
	if err := r.free(ctx, set, a.free); err != nil {
		return ctrl.Result{}, err
	}
	for _, d := range a.remove {
		if err := r.remove(ctx, d); err != nil {
			return ctrl.Result{}, err
		}
	}
	for _, pod := range a.create {
		switch err := r.Client.Create(ctx, pod, client.FieldOwner(fieldOwner)); {
		case err == nil:
		case apierrors.IsAlreadyExists(err):
			if err := r.ours(ctx, set, pod.Name); err != nil {
				return ctrl.Result{}, err
			}
		default:
			r.event(set, note{corev1.EventTypeWarning, "FailedCreate", fmt.Sprintf("pod %s cannot be created: %s", pod.Name, err)})
			return ctrl.Result{}, fmt.Errorf("create pod %s: %w", pod.Name, err)
		}
	}
	return ctrl.Result{RequeueAfter: a.again}, nil
}

// ours returns an error and emits an Event if the pod of that name exists but does not belong to the set.
func (r *Reconciler) ours(ctx context.Context, set *v1.CocoonSet, name string) error {
	pod := &corev1.Pod{}
	if err := r.Client.Get(ctx, client.ObjectKey{Namespace: set.Namespace, Name: name}, pod); err != nil {
		return client.IgnoreNotFound(err) // the cache may not have a pod that was just created
	}
	if metav1.IsControlledBy(pod, set) {
		return nil
	}
	r.event(set, note{corev1.EventTypeWarning, "NameTaken", "pod " + name + " exists, but it does not belong to this set; delete the pod or rename the set"})
	return fmt.Errorf("pod %s does not belong to this set", name)
}

// remove deletes a pod. If the node does not save the VM again (keep), the pod must be unchanged since it was read, because
// its VM was hibernated then.
func (r *Reconciler) remove(ctx context.Context, d removal) error {
	only := client.Preconditions{UID: &d.pod.UID}
	if d.keep {
		only.ResourceVersion = &d.pod.ResourceVersion
	}
	err := r.Client.Delete(ctx, d.pod, only)
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete pod %s: %w", d.pod.Name, err)
	}
	return nil
}

// annotate sets an annotation of pod, or removes it (nil), as this field owner. It fails with a conflict if the pod was
// replaced, and with asSeen, also if the pod has changed since it was read.
func (r *Reconciler) annotate(ctx context.Context, pod *corev1.Pod, key string, value any, owner string, asSeen bool) error {
	metadata := map[string]any{"uid": pod.UID, "annotations": map[string]any{key: value}}
	if asSeen {
		metadata["resourceVersion"] = pod.ResourceVersion
	}
	patch, err := json.Marshal(map[string]any{"metadata": metadata})
	if err == nil {
		err = r.Client.Patch(ctx, pod, client.RawPatch(types.MergePatchType, patch), client.FieldOwner(fieldOwner+"-"+owner))
	}
	if err != nil {
		return fmt.Errorf("mark pod %s: %w", pod.Name, err)
	}
	return nil
}

// remember records in an annotation of the set the names of VMs whose registry data is deleted with the set, because their
// pods may be gone by then.
func (r *Reconciler) remember(ctx context.Context, set *v1.CocoonSet, names []string) error {
	all := own(set, names)
	if text := strings.Join(all, ","); text != set.Annotations[contract.KeyDeleteVMNames] && len(names) > 0 {
		before := set.DeepCopy()
		metav1.SetMetaDataAnnotation(&set.ObjectMeta, contract.KeyDeleteVMNames, text)
		if err := r.Client.Patch(ctx, set, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return fmt.Errorf("record VM names: %w", err)
		}
	}
	return nil
}

// finish removes a deleted set: first its pods, according to their policies, then the VMs' data in the registry.
func (r *Reconciler) finish(ctx context.Context, set *v1.CocoonSet, pods []*corev1.Pod) (ctrl.Result, error) {
	if !controllerutil.ContainsFinalizer(set, v1.FinalizerSet) {
		return ctrl.Result{}, nil
	}
	if err := r.remember(ctx, set, vmNames(set, pods)); err != nil {
		return ctrl.Result{}, controller.IgnoreStale(err)
	}
	for _, pod := range pods {
		if pod.DeletionTimestamp == nil {
			if err := r.remove(ctx, removal{pod: pod}); err != nil {
				return ctrl.Result{}, err
			}
		}
	}
	if len(pods) > 0 {
		return ctrl.Result{}, nil // each pod's deletion triggers a reconciliation
	}
	if r.Registry != nil {
		for _, name := range own(set, nil) {
			if err := r.clear(ctx, set, name); err != nil {
				r.event(set, note{corev1.EventTypeWarning, "RegistryCleanupFailed", fmt.Sprintf("the snapshots of VM %s cannot be deleted from the registry, so the set is not deleted; to keep the snapshots, remove the finalizer %s: %s", name, v1.FinalizerSet, err)})
				return ctrl.Result{RequeueAfter: registryPause}, nil
			}
		}
	}
	before := set.DeepCopy()
	controllerutil.RemoveFinalizer(set, v1.FinalizerSet)
	return ctrl.Result{}, controller.IgnoreStale(client.IgnoreNotFound(r.Client.Patch(ctx, set, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))))
}

// clear removes the registry data of a deleted VM. It keeps a snapshot that was taken before the deletion, because the
// snapshot policy asked for it.
func (r *Reconciler) clear(ctx context.Context, set *v1.CocoonSet, name string) error {
	of := controller.VM{Namespace: set.Namespace, Name: name}
	for _, tag := range []string{contract.HibernateSnapshotTag, contract.ForkSnapshotTag} {
		if err := r.Registry.Delete(ctx, of, tag); err != nil {
			return err
		}
	}
	main := contract.SlotOf(set.Namespace, set.Name, name) == 0
	if contract.ShouldSnapshotVM(contract.VMSpec{SnapshotPolicy: set.Spec.SnapshotPolicy}, main) {
		return nil
	}
	return r.Registry.Delete(ctx, of, contract.DefaultSnapshotTag)
}

func (r *Reconciler) event(set *v1.CocoonSet, n note) {
	if r.Count != nil {
		r.Count(n.reason)
	}
	r.Events.Eventf(set, nil, n.kind, n.reason, "Reconcile", "%s", n.text)
}

// Package cocoonset makes the pods of a CocoonSet: the main VM, the sub-agents that are forked from it, and toolboxes. It
// puts them to sleep and wakes them, moves them, and clears the registry of what a deleted set leaves.
//
// Each turn makes a plan from what there is (plan.go, pure) and carries it out; nothing is remembered between turns but
// what the objects say. The package makes no VMs: the nodes do, as the pods' annotations say.
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

// fieldOwner is who the set's marks on pods belong to.
const fieldOwner = "cocoonset"

// Reasons of Events that are counted.
const (
	ReasonRebuilding = "SubAgentRebuilding"
	ReasonDeadLetter = "SubAgentDeadLetter"
	ReasonMainFailed = "MainAgentFailed"
)

// registryPause is how long a question to a registry that fails waits.
const registryPause = 5 * time.Second

// Reconciler makes CocoonSets true. All fields are needed but Registry: without one nothing is ever durable, and a set
// that is suspended stays Suspending.
type Reconciler struct {
	Client   client.Client
	Registry controller.Registry
	Events   events.EventRecorder
	Now      func() time.Time
	Count    func(reason string) // is told of each Event; may be nil
}

// Setup adds the reconciler to m, with so many turns at a time. Every change of a set brings a turn, a write of its status
// too: a turn that did not know of that write yet may have done nothing because of it.
func (r *Reconciler) Setup(m ctrl.Manager, concurrency int) error {
	return ctrl.NewControllerManagedBy(m).Named("cocoonset").
		For(&v1.CocoonSet{}).
		Owns(&corev1.Pod{}, builder.WithPredicates(controller.PodChanged())).
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(r)
}

// Reconcile takes one turn with one set.
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
	v := view{set: set, pods: pods, durable: map[string]bool{}, nowhere: r.Registry == nil, now: r.Now()}
	for _, name := range asks(v) {
		if r.Registry == nil {
			break
		}
		if v.durable[name], err = r.durable(ctx, v, name); err != nil {
			r.event(set, note{corev1.EventTypeWarning, "RegistryUnavailable", fmt.Sprintf("the registry cannot say whether VM %s is in it: %s", name, err)})
			return ctrl.Result{RequeueAfter: registryPause}, nil
		}
	}
	if v.claims, err = r.claims(ctx, set); err != nil {
		return ctrl.Result{}, err
	}
	return r.carryOut(ctx, set, plan(v))
}

// durable reports whether the registry has the hibernated state of a VM of the set. One that has no pod, because it was put to
// sleep before an upgrade, may still be where earlier releases kept it.
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

// claims are those of the set's VMs on nodes, by VM name.
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

// free ends the claims of VMs whose state no node holds any more.
func (r *Reconciler) free(ctx context.Context, set *v1.CocoonSet, names []string) error {
	for _, name := range names {
		claim := &v1.VMPlacement{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: set.Namespace}}
		if err := r.Client.Delete(ctx, claim); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("release claim of VM %s: %w", name, err)
		}
	}
	return nil
}

// pods are the pods that the set owns.
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

// carryOut writes the status first where it is what a later turn goes by, and then does what is planned.
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
		if !m.hibernate && contract.KeepSnapshot(m.pod.Annotations) { // its seat was about to be given up
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
		if d.keep && !contract.KeepSnapshot(d.pod.Annotations) { // written before, so that its node knows
			if err := r.annotate(ctx, d.pod, contract.KeyKeepSnapshot, "true", "keep", true); err != nil {
				return ctrl.Result{}, controller.IgnoreStale(err)
			}
		}
	}
	if err := r.remember(ctx, set, a.sleepers); err != nil {
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

// ours tells of a pod that has the name of one of ours and belongs to somebody else.
func (r *Reconciler) ours(ctx context.Context, set *v1.CocoonSet, name string) error {
	pod := &corev1.Pod{}
	if err := r.Client.Get(ctx, client.ObjectKey{Namespace: set.Namespace, Name: name}, pod); err != nil {
		return client.IgnoreNotFound(err) // the cache does not know the one that we just made
	}
	if metav1.IsControlledBy(pod, set) {
		return nil
	}
	r.event(set, note{corev1.EventTypeWarning, "NameTaken", "pod " + name + " is there and not of this set; delete it or rename the set"})
	return fmt.Errorf("pod %s is not of this set", name)
}

// remove deletes a pod. One whose VM is not saved again must be as it was seen: asleep.
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

// annotate sets an annotation of pod, or removes it (nil), as the owner of that name. Another pod of that name is a conflict,
// and, if it must be as it was seen, so is whatever else has changed.
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

// remember notes on the set the names of VMs that the registry is to be cleared of with it, though their pods are gone by then.
func (r *Reconciler) remember(ctx context.Context, set *v1.CocoonSet, names []string) error {
	all := own(set, names)
	if text := strings.Join(all, ","); text != set.Annotations[contract.KeyDeleteVMNames] && len(names) > 0 {
		before := set.DeepCopy()
		metav1.SetMetaDataAnnotation(&set.ObjectMeta, contract.KeyDeleteVMNames, text)
		if err := r.Client.Patch(ctx, set, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return fmt.Errorf("note VM names: %w", err)
		}
	}
	return nil
}

// finish takes a deleted set apart: its pods, as their policies say, and then what the registry has of them.
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
		return ctrl.Result{}, nil // each one's going is an event
	}
	if r.Registry != nil {
		for _, name := range own(set, nil) {
			if err := r.clear(ctx, set, name); err != nil {
				r.event(set, note{corev1.EventTypeWarning, "RegistryCleanupFailed", fmt.Sprintf("the set stays until the registry can be cleared of VM %s; to leave its snapshots there, remove the finalizer %s: %s", name, v1.FinalizerSet, err)})
				return ctrl.Result{RequeueAfter: registryPause}, nil
			}
		}
	}
	before := set.DeepCopy()
	controllerutil.RemoveFinalizer(set, v1.FinalizerSet)
	return ctrl.Result{}, controller.IgnoreStale(client.IgnoreNotFound(r.Client.Patch(ctx, set, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))))
}

// clear removes what the registry has of a VM that is gone. The snapshot that was taken before its deletion stays: that is
// what the policy is for.
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

// Package virtualmachineinstancereplicaset runs spec.replicas instances of each VirtualMachineInstanceReplicaSet.
//
// A step is decided by a pure function (decide.go). Before anything is created or deleted, the step is decided again upon what the API
// server says now. Between steps only the objects hold state.
package virtualmachineinstancereplicaset

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/events"
	v1 "kubevirt.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// Reasons of Events and conditions.
const (
	ReasonCreated      = "SuccessfulCreate"
	ReasonDeleted      = "SuccessfulDelete"
	ReasonCreateFailed = "FailedCreate"
	ReasonStartFailed  = "FailedStart" // an instance ended at once
	ReasonPaused       = "Paused"
)

// kind is the kind of a set.
var kind = v1.VirtualMachineInstanceReplicaSetGroupVersionKind

// Reconciler reconciles VirtualMachineInstanceReplicaSets. All fields are required.
type Reconciler struct {
	Client client.Client
	Live   client.Reader // without a cache
	Events events.EventRecorder
	Now    func() time.Time
}

// Setup adds the reconciler to m, with that many concurrent workers.
func (r *Reconciler) Setup(m ctrl.Manager, concurrency int) error {
	return ctrl.NewControllerManagedBy(m).Named("virtualmachineinstancereplicaset").
		For(&v1.VirtualMachineInstanceReplicaSet{}).
		Owns(&v1.VirtualMachineInstance{}).
		Watches(&v1.VirtualMachineInstance{}, handler.EnqueueRequestsFromMapFunc(r.wanting)).
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(r)
}

// wanting returns the sets that may adopt an instance.
func (r *Reconciler) wanting(ctx context.Context, o client.Object) (requests []reconcile.Request) {
	sets := &v1.VirtualMachineInstanceReplicaSetList{}
	if metav1.GetControllerOfNoCopy(o) != nil || r.Client.List(ctx, sets, client.InNamespace(o.GetNamespace()), client.UnsafeDisableDeepCopy) != nil {
		return nil // there is no API server behind the list that could fail
	}
	for i := range sets.Items {
		if s, err := kubevirt.Selector(&sets.Items[i]); err == nil && s.Matches(labels.Set(o.GetLabels())) {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&sets.Items[i])})
		}
	}
	return requests
}

// Reconcile brings one set a step further.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	set := &v1.VirtualMachineInstanceReplicaSet{}
	if err := r.Client.Get(ctx, req.NamespacedName, set); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	x, err := r.look(ctx, r.Client, set, labels.Everything())
	if err != nil {
		return reconcile.Result{}, err
	}
	s := decide(x)
	if s.writes() {
		others, strays := foreign(x), s.release
		if x, err = r.again(ctx, set); err != nil || x.set == nil {
			return reconcile.Result{}, err
		}
		s = decide(x)
		if x.set.DeletionTimestamp == nil {
			s.release = strays // the second look is for what matches
		}
		if err := r.carryOut(ctx, x, &s, others); err != nil {
			return reconcile.Result{}, err
		}
	}
	if err := r.write(ctx, x.set, s.status); err != nil {
		return reconcile.Result{}, err
	}
	if c := s.failure(); c != nil && c.Reason != ReasonCreateFailed && c.Message != message(&x.set.Status) { // the other one has its Events
		r.Events.Eventf(x.set, nil, corev1.EventTypeWarning, eventReason(c.Reason), "Check", "%s", c.Message)
	}
	return reconcile.Result{RequeueAfter: s.wait}, nil
}

// eventReason is the reason of the Event about a failure.
func eventReason(of string) string {
	if of == kubevirt.ReasonNotSupported {
		return ReasonCreateFailed
	}
	return of
}

// message returns what the condition ReplicaFailure says.
func message(s *v1.VirtualMachineInstanceReplicaSetStatus) string {
	if c := (&step{status: *s}).failure(); c != nil {
		return c.Message
	}
	return ""
}

// look reads what there is of a set.
func (r *Reconciler) look(ctx context.Context, from client.Reader, set *v1.VirtualMachineInstanceReplicaSet, among labels.Selector) (seen, error) {
	x := seen{set: set, selector: labels.Nothing(), now: r.Now()}
	if errs, _ := kubevirt.CheckReplicaSet(set); len(errs) > 0 {
		x.refusal = errs.ToAggregate().Error()
	}
	if s, err := kubevirt.Selector(set); err == nil { // else it is refused
		x.selector = s
	}
	all := &v1.VirtualMachineInstanceList{}
	if err := from.List(ctx, all, client.InNamespace(set.Namespace), client.MatchingLabelsSelector{Selector: among}, client.UnsafeDisableDeepCopy); err != nil {
		return seen{}, fmt.Errorf("list the instances of VirtualMachineInstanceReplicaSet %s: %w", set.Name, err)
	}
	for i := range all.Items {
		x.all = append(x.all, &all.Items[i])
	}
	return x, nil
}

// again looks at the set once more, without a cache. There is no set if it is gone, or another one has its name.
func (r *Reconciler) again(ctx context.Context, set *v1.VirtualMachineInstanceReplicaSet) (seen, error) {
	now := &v1.VirtualMachineInstanceReplicaSet{}
	if err := r.Live.Get(ctx, client.ObjectKeyFromObject(set), now); client.IgnoreNotFound(err) != nil {
		return seen{}, fmt.Errorf("read VirtualMachineInstanceReplicaSet %s: %w", set.Name, err)
	}
	if now.UID != set.UID {
		return seen{}, nil
	}
	selector, err := kubevirt.Selector(now)
	if err != nil {
		selector = labels.Nothing()
	}
	return r.look(ctx, r.Live, now, selector)
}

// foreign returns the names of instances that are not the set's.
func foreign(x seen) map[string]bool {
	names := map[string]bool{}
	for _, vmi := range x.all {
		if !metav1.IsControlledBy(vmi, x.set) {
			names[vmi.Name] = true
		}
	}
	return names
}

// carryOut does what was decided, and notes in the status what failed.
func (r *Reconciler) carryOut(ctx context.Context, x seen, s *step, others map[string]bool) error {
	for _, vmi := range s.adopt {
		mine := vmi.DeepCopy()
		mine.OwnerReferences = append(mine.OwnerReferences, *metav1.NewControllerRef(x.set, kind))
		if err := r.patch(ctx, vmi, mine); err != nil {
			return fmt.Errorf("adopt VirtualMachineInstance %s: %w", vmi.Name, err)
		}
	}
	for _, vmi := range s.release {
		free := vmi.DeepCopy()
		free.OwnerReferences = slices.DeleteFunc(free.OwnerReferences, func(o metav1.OwnerReference) bool { return o.UID == x.set.UID })
		if err := r.patch(ctx, vmi, free); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("release VirtualMachineInstance %s: %w", vmi.Name, err)
		}
	}
	for _, vmi := range s.remove {
		if err := r.Client.Delete(ctx, vmi, client.Preconditions{UID: &vmi.UID}); controller.IgnoreStale(err) != nil {
			return fmt.Errorf("delete VirtualMachineInstance %s: %w", vmi.Name, err)
		}
		r.Events.Eventf(x.set, vmi, corev1.EventTypeNormal, ReasonDeleted, "Delete", "deleted the instance %s", vmi.Name)
	}
	if s.create == 0 {
		return nil
	}
	for _, vmi := range slices.Concat(x.all, s.release) {
		others[vmi.Name] = true
	}
	return r.create(ctx, x, s, others)
}

// patch writes the metadata of an instance, which must not have changed.
func (r *Reconciler) patch(ctx context.Context, vmi, next *v1.VirtualMachineInstance) error {
	return r.Client.Patch(ctx, next, client.MergeFromWithOptions(vmi, client.MergeFromWithOptimisticLock{}))
}

// create creates instances with the first names that are free. It ends when the API server refuses one: it would refuse the next ones, too.
func (r *Reconciler) create(ctx context.Context, x seen, s *step, taken map[string]bool) error {
	for slot, made := 0, 0; made < s.create; slot++ {
		vmi := kubevirt.Instance(x.set, kind, x.set.Spec.Template, name(x.set, slot), x.now)
		if taken[vmi.Name] {
			continue
		}
		switch err := r.Client.Create(ctx, vmi); {
		case err == nil:
			r.Events.Eventf(x.set, vmi, corev1.EventTypeNormal, ReasonCreated, "Create", "created the instance %s", vmi.Name)
			made++
			s.status.Replicas++
		case apierrors.IsAlreadyExists(err):
			// Another manager has just made it, or somebody uses the name. The next step will see which.
			return fmt.Errorf("create VirtualMachineInstance %s: %w", vmi.Name, err)
		case apierrors.IsForbidden(err) || apierrors.IsInvalid(err): // a quota, a policy
			text := fmt.Sprintf("the API server refuses the instance %s: %s", vmi.Name, err)
			r.Events.Eventf(x.set, nil, corev1.EventTypeWarning, ReasonCreateFailed, "Create", "%s", text)
			s.fail(ReasonCreateFailed, text, x.now, x.now)
			s.again(s.pause(firstRetryPause, maxRetryPause))
			return nil
		default:
			return fmt.Errorf("create VirtualMachineInstance %s: %w", vmi.Name, err)
		}
	}
	s.drop(ReasonCreateFailed)
	return nil
}

// name returns the name of the set's instance number slot. It depends on the UID: instances that an earlier set left behind have other names.
func name(set *v1.VirtualMachineInstanceReplicaSet, slot int) string {
	const longest = 200 // of names, which have at most 253 characters
	sum := sha256.Sum256([]byte(set.UID))
	return strings.TrimRight(set.Name[:min(len(set.Name), longest)], ".-") + "-" + hex.EncodeToString(sum[:])[:5] + "-" + strconv.Itoa(slot)
}

// write writes the status if anything of it is new. If the set has changed, that change brings it back.
func (r *Reconciler) write(ctx context.Context, set *v1.VirtualMachineInstanceReplicaSet, s v1.VirtualMachineInstanceReplicaSetStatus) error {
	if apiequality.Semantic.DeepEqual(set.Status, s) {
		return nil
	}
	next := set.DeepCopy()
	next.Status = s
	if err := r.Client.Status().Update(ctx, next); controller.IgnoreStale(err) != nil {
		return fmt.Errorf("write the status of VirtualMachineInstanceReplicaSet %s: %w", set.Name, err)
	}
	return nil
}

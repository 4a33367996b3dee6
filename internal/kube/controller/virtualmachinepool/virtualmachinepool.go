// Package virtualmachinepool keeps spec.replicas VirtualMachines of each VirtualMachinePool.
//
// A step is decided by a pure function (decide.go). Before any machine is changed, the step is decided again upon what the API server
// says now. Between steps only the objects hold state: a machine names the revision of the template from which it is made, and so does its
// instance.
package virtualmachinepool

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/events"
	v1 "kubevirt.io/api/core/v1"
	poolv1 "kubevirt.io/api/pool/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/machinebase"
)

// Reasons of Events and conditions.
const (
	ReasonCreated      = "SuccessfulCreate"
	ReasonCreateFailed = "FailedCreate"
	ReasonDeleted      = "SuccessfulDelete"
	ReasonUpdated      = "SuccessfulUpdate"
	ReasonUpdateFailed = "FailedUpdate"
	ReasonRestarted    = "SuccessfulRestart"
	ReasonPaused       = "Paused"
)

// Reconciler reconciles VirtualMachinePools. All fields are required.
type Reconciler struct {
	Client client.Client
	Live   client.Reader // without a cache
	Events events.EventRecorder
	Now    func() time.Time
}

// Setup adds the reconciler to m, with that many concurrent workers.
func (r *Reconciler) Setup(m ctrl.Manager, concurrency int) error {
	return ctrl.NewControllerManagedBy(m).Named("virtualmachinepool").
		For(&poolv1.VirtualMachinePool{}).
		Owns(&v1.VirtualMachine{}).
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(r)
}

// Reconcile brings one pool a step further.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	pool := &poolv1.VirtualMachinePool{}
	if err := r.Client.Get(ctx, req.NamespacedName, pool); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	x, err := r.look(ctx, r.Client, pool, labels.Everything())
	if err != nil {
		return reconcile.Result{}, err
	}
	s := decide(x)
	if s.writes() {
		taken, strays := names(x), s.release
		if x, err = r.again(ctx, pool); err != nil || x.pool == nil {
			return reconcile.Result{}, err
		}
		s = decide(x)
		if x.pool.DeletionTimestamp == nil {
			s.release = strays // the second look is for what matches
		}
		if err := r.carryOut(ctx, x, &s, taken); err != nil {
			return reconcile.Result{}, err
		}
	}
	if err := r.write(ctx, x.pool, s.status); err != nil {
		return reconcile.Result{}, err
	}
	if c := s.failure(); c != nil && c.Reason == kubevirt.ReasonNotSupported && c.Message != message(&x.pool.Status) { // the others have their Events
		r.Events.Eventf(x.pool, nil, corev1.EventTypeWarning, ReasonCreateFailed, "Check", "%s", c.Message)
	}
	return reconcile.Result{RequeueAfter: s.wait}, nil
}

// message returns what the condition ReplicaFailure says.
func message(s *poolv1.VirtualMachinePoolStatus) string {
	if c := (&step{status: *s}).failure(); c != nil {
		return c.Message
	}
	return ""
}

// look reads what there is of a pool.
func (r *Reconciler) look(ctx context.Context, from client.Reader, pool *poolv1.VirtualMachinePool, among labels.Selector) (seen, error) {
	x := seen{pool: pool, selector: labels.Nothing(), instances: map[string]*metav1.ObjectMeta{}, now: r.Now()}
	var err error
	if x.refusal, err = r.refusal(ctx, pool); err != nil {
		return seen{}, err
	}
	if s, err := kubevirt.PoolSelector(pool); err == nil { // else it is refused
		x.selector = s
	}
	all := &v1.VirtualMachineList{}
	if err = from.List(ctx, all, client.InNamespace(pool.Namespace), client.MatchingLabelsSelector{Selector: among}, client.UnsafeDisableDeepCopy); err != nil {
		return seen{}, fmt.Errorf("list the machines of VirtualMachinePool %s: %w", pool.Name, err)
	}
	for i := range all.Items {
		vm := &all.Items[i]
		x.all = append(x.all, vm)
		if !metav1.IsControlledBy(vm, pool) || !stale(vm) {
			continue
		}
		vmi := &v1.VirtualMachineInstance{}
		if err := from.Get(ctx, client.ObjectKeyFromObject(vm), vmi); client.IgnoreNotFound(err) != nil {
			return seen{}, fmt.Errorf("read the instance of VirtualMachine %s: %w", vm.Name, err)
		} else if err == nil && metav1.IsControlledBy(vmi, vm) && vmi.DeletionTimestamp == nil {
			x.instances[vm.Name] = &vmi.ObjectMeta
		}
	}
	return x, nil
}

// refusal says why Cocoon cannot run the machines of a pool, "" if it can. What they build on may still be created: their own controller waits
// for that.
func (r *Reconciler) refusal(ctx context.Context, pool *poolv1.VirtualMachinePool) (string, error) {
	errs := kubevirt.CheckPool(pool)
	if len(errs) == 0 {
		vm := kubevirt.PoolTemplate(pool)
		finder := machinebase.Finder{Client: r.Client, Live: r.Live}
		found, err := finder.Find(ctx, vm)
		if err != nil {
			return "", fmt.Errorf("read what the machines of VirtualMachinePool %s build on: %w", pool.Name, err)
		}
		errs, _ = kubevirt.CheckMachine(vm, found.Base)
		errs, _ = kubevirt.InPool(errs, nil)
	}
	if len(errs) > 0 {
		return errs.ToAggregate().Error(), nil
	}
	return "", nil
}

// again looks at the pool once more, without a cache. There is no pool if it is gone, or another one has its name.
func (r *Reconciler) again(ctx context.Context, pool *poolv1.VirtualMachinePool) (seen, error) {
	now := &poolv1.VirtualMachinePool{}
	if err := r.Live.Get(ctx, client.ObjectKeyFromObject(pool), now); client.IgnoreNotFound(err) != nil {
		return seen{}, fmt.Errorf("read VirtualMachinePool %s: %w", pool.Name, err)
	}
	if now.UID != pool.UID {
		return seen{}, nil
	}
	selector, err := kubevirt.PoolSelector(now)
	if err != nil {
		selector = labels.Nothing()
	}
	return r.look(ctx, r.Live, now, selector)
}

// names returns the names of machines that are not the pool's. Its own are read again.
func names(x seen) map[string]bool {
	taken := map[string]bool{}
	for _, vm := range x.all {
		if !metav1.IsControlledBy(vm, x.pool) {
			taken[vm.Name] = true
		}
	}
	return taken
}

// carryOut does what was decided, and notes in the status what failed.
func (r *Reconciler) carryOut(ctx context.Context, x seen, s *step, taken map[string]bool) error {
	for _, vm := range s.release {
		free := vm.DeepCopy()
		free.OwnerReferences = slices.DeleteFunc(free.OwnerReferences, func(o metav1.OwnerReference) bool { return o.UID == x.pool.UID })
		if err := r.patch(ctx, vm, free); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("release VirtualMachine %s: %w", vm.Name, err)
		}
	}
	for _, vm := range s.remove {
		if err := r.Client.Delete(ctx, vm, client.Preconditions{UID: &vm.UID}); controller.IgnoreStale(err) != nil {
			return fmt.Errorf("delete VirtualMachine %s: %w", vm.Name, err)
		}
		r.Events.Eventf(x.pool, vm, corev1.EventTypeNormal, ReasonDeleted, "Delete", "deleted the machine %s", vm.Name)
	}
	for _, vm := range s.restart {
		if err := r.restart(ctx, x, vm); err != nil {
			return err
		}
	}
	if s.create == 0 && len(s.update) == 0 {
		return nil
	}
	for _, vm := range slices.Concat(x.all, s.release) {
		taken[vm.Name] = true
	}
	if ended, err := r.update(ctx, x, s); ended || err != nil {
		return err
	}
	return r.create(ctx, x, s, taken)
}

// patch writes a machine, which must not have changed.
func (r *Reconciler) patch(ctx context.Context, vm, next *v1.VirtualMachine) error {
	return r.Client.Patch(ctx, next, client.MergeFromWithOptions(vm, client.MergeFromWithOptimisticLock{}))
}

// restart asks the controller of machines for another instance, as `virtctl restart` does.
func (r *Reconciler) restart(ctx context.Context, x seen, vm *v1.VirtualMachine) error {
	next, uid := vm.DeepCopy(), x.instances[vm.Name].UID
	next.Status.StateChangeRequests = []v1.VirtualMachineStateChangeRequest{{Action: v1.StopRequest, UID: &uid}, {Action: v1.StartRequest}}
	if err := r.Client.Status().Update(ctx, next); err != nil {
		return fmt.Errorf("restart VirtualMachine %s: %w", vm.Name, err)
	}
	r.Events.Eventf(x.pool, vm, corev1.EventTypeNormal, ReasonRestarted, "Restart", "restarted the machine %s, because the template has changed", vm.Name)
	return nil
}

// update makes machines what the template says now, apart from the identity that the guest knows and from labels and annotations of others. It ends when the API server refuses one.
func (r *Reconciler) update(ctx context.Context, x seen, s *step) (ended bool, err error) {
	for _, vm := range s.update {
		made := kubevirt.PoolMachine(x.pool, kubevirt.Ordinal(x.pool, vm.Name))
		next := vm.DeepCopy()
		next.Labels, next.Annotations, next.Spec = over(vm.Labels, made.Labels), over(vm.Annotations, made.Annotations), made.Spec
		kubevirt.KeepIdentity(vm, next)
		if err := r.patch(ctx, vm, next); refused(err) {
			s.refuse(r, x, ReasonUpdateFailed, "Update", vm.Name, err)
			return true, nil
		} else if err != nil {
			return false, fmt.Errorf("update VirtualMachine %s: %w", vm.Name, err)
		}
		r.Events.Eventf(x.pool, vm, corev1.EventTypeNormal, ReasonUpdated, "Update", "updated the machine %s to the template", vm.Name)
	}
	s.drop(ReasonUpdateFailed)
	return false, nil
}

// over returns m with the entries of with.
func over(m, with map[string]string) map[string]string {
	all := maps.Clone(with)
	for k, v := range m {
		if _, given := all[k]; !given {
			if all == nil {
				all = map[string]string{}
			}
			all[k] = v
		}
	}
	return all
}

// refused reports whether the API server refuses the request, such as for a quota. It would refuse it again at once.
func refused(err error) bool { return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) }

func (s *step) refuse(r *Reconciler, x seen, reason, action, name string, err error) {
	text := fmt.Sprintf("the API server refuses the machine %s: %s", name, err)
	r.Events.Eventf(x.pool, nil, corev1.EventTypeWarning, reason, action, "%s", text)
	s.fail(reason, text, x.now)
	s.wait = s.pause()
}

// create creates machines with the lowest ordinals that are free. It ends when the API server refuses one: it would refuse the next ones, too.
func (r *Reconciler) create(ctx context.Context, x seen, s *step, taken map[string]bool) error {
	for ordinal, made := 0, 0; made < s.create; ordinal++ {
		if taken[kubevirt.MachineName(x.pool, ordinal)] {
			continue
		}
		vm := kubevirt.PoolMachine(x.pool, ordinal)
		if err := r.Client.Create(ctx, vm); refused(err) {
			s.refuse(r, x, ReasonCreateFailed, "Create", vm.Name, err)
			return nil
		} else if err != nil {
			// If the name is in use, another manager has just made it, or somebody else has. The next step will see which.
			return fmt.Errorf("create VirtualMachine %s: %w", vm.Name, err)
		}
		r.Events.Eventf(x.pool, vm, corev1.EventTypeNormal, ReasonCreated, "Create", "created the machine %s", vm.Name)
		made++
		s.status.Replicas++
	}
	s.drop(ReasonCreateFailed)
	return nil
}

// write writes the status if anything of it is new. If the pool has changed, that change brings it back.
func (r *Reconciler) write(ctx context.Context, pool *poolv1.VirtualMachinePool, s poolv1.VirtualMachinePoolStatus) error {
	if apiequality.Semantic.DeepEqual(pool.Status, s) {
		return nil
	}
	next := pool.DeepCopy()
	next.Status = s
	if err := r.Client.Status().Update(ctx, next); controller.IgnoreStale(err) != nil {
		return fmt.Errorf("write the status of VirtualMachinePool %s: %w", pool.Name, err)
	}
	return nil
}

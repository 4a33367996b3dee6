// Package virtualmachinerestore brings a VirtualMachine back to a VirtualMachineSnapshot, or makes another one of it: it makes new claims of the
// VolumeSnapshots, and gives the machine the spec that it had. Claims that the machine had before stay.
//
// A step is decided by a pure function (decide.go). Every name depends on the UID of the restore, so a step that is repeated makes nothing
// twice. The spec of a machine that exists changes in one write, after its new claims are there. There is no finalizer, as for snapshots.
package virtualmachinerestore

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/snapshot/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/controller"
)

// Reasons of Events.
const (
	ReasonComplete = "VirtualMachineRestoreComplete"
	ReasonError    = "VirtualMachineRestoreError"
)

// Reconciler reconciles VirtualMachineRestores. All fields are required.
type Reconciler struct {
	Client client.Client
	Live   client.Reader // without a cache
	Events events.EventRecorder
	Now    func() time.Time
}

// Setup adds the reconciler to m, with that many concurrent workers.
func (r *Reconciler) Setup(m ctrl.Manager, concurrency int) error {
	return ctrl.NewControllerManagedBy(m).Named("virtualmachinerestore").
		For(&v1beta1.VirtualMachineRestore{}).
		Watches(&v1.VirtualMachine{}, handler.EnqueueRequestsFromMapFunc(named)).
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(r)
}

// named returns the restore that a machine names, which may be gone.
func named(_ context.Context, o client.Object) []reconcile.Request {
	vm, ok := o.(*v1.VirtualMachine)
	if !ok || vm.Status.RestoreInProgress == nil {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: vm.Namespace, Name: *vm.Status.RestoreInProgress}}}
}

// Reconcile brings one restore a step further.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	restore := &v1beta1.VirtualMachineRestore{}
	if err := r.Client.Get(ctx, req.NamespacedName, restore); err != nil {
		if apierrors.IsNotFound(err) {
			err = r.forget(ctx, req.NamespacedName)
		}
		return reconcile.Result{}, err
	}
	x, err := r.look(ctx, restore)
	if err != nil {
		return reconcile.Result{}, err
	}
	s := decide(x)
	switch err := r.carryOut(ctx, &x, &s); {
	case apierrors.IsForbidden(err) || apierrors.IsInvalid(err): // a quota, a policy, a patch
		s.do = nothing
		s.waiting(err.Error(), x.now)
	case errdefs.IsInvalid(err):
		s.do = nothing
		s.fail(err.Error(), x.now)
	case err != nil:
		return reconcile.Result{}, err
	}
	if err := r.write(ctx, restore, s.status); err != nil {
		return reconcile.Result{}, err
	}
	r.tell(restore, &s.status)
	if s.do != nothing && s.do != stop { // the next step follows
		s.wait = time.Millisecond
	}
	return reconcile.Result{RequeueAfter: s.wait}, nil
}

// tell sends an Event about what is new.
func (r *Reconciler) tell(restore *v1beta1.VirtualMachineRestore, s *v1beta1.VirtualMachineRestoreStatus) {
	was, is := reason(restore.Status, v1beta1.ConditionReady), reason(s, v1beta1.ConditionReady)
	switch progressing := reason(s, v1beta1.ConditionProgressing); {
	case was == is:
	case s.Complete != nil && *s.Complete:
		r.Events.Eventf(restore, nil, corev1.EventTypeNormal, ReasonComplete, "Restore", "the VirtualMachine %s is restored", restore.Spec.Target.Name)
	case progressing == is: // it waits, or has failed
		r.Events.Eventf(restore, nil, corev1.EventTypeWarning, ReasonError, "Restore", "%s", is)
	}
}

// forget looks after the machines that name a restore that is gone.
func (r *Reconciler) forget(ctx context.Context, key types.NamespacedName) error {
	all := &v1.VirtualMachineList{}
	if err := r.Client.List(ctx, all, client.InNamespace(key.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list the machines of namespace %s: %w", key.Namespace, err)
	}
	for i := range all.Items {
		vm := &all.Items[i]
		if vm.Status.RestoreInProgress == nil || *vm.Status.RestoreInProgress != key.Name {
			continue
		}
		if err := r.Live.Get(ctx, key, &v1beta1.VirtualMachineRestore{}); !apierrors.IsNotFound(err) {
			return err // there is another one now, or it is not known
		}
		if err := r.name(ctx, vm, nil); err != nil {
			return err
		}
	}
	return nil
}

// name makes a machine name a restore as the one in progress, or none.
func (r *Reconciler) name(ctx context.Context, vm *v1.VirtualMachine, restore *string) error {
	next := vm.DeepCopy()
	next.Status.RestoreInProgress = restore
	if err := r.Client.Status().Update(ctx, next); controller.IgnoreStale(err) != nil {
		return fmt.Errorf("write the status of VirtualMachine %s: %w", vm.Name, err)
	}
	return nil
}

// write writes the status if anything of it is new.
func (r *Reconciler) write(ctx context.Context, restore *v1beta1.VirtualMachineRestore, s v1beta1.VirtualMachineRestoreStatus) error {
	if restore.Status != nil && apiequality.Semantic.DeepEqual(*restore.Status, s) {
		return nil
	}
	next := restore.DeepCopy()
	next.Status = &s
	if err := r.Client.Status().Update(ctx, next); controller.IgnoreStale(err) != nil {
		return fmt.Errorf("write the status of VirtualMachineRestore %s: %w", restore.Name, err)
	}
	return nil
}

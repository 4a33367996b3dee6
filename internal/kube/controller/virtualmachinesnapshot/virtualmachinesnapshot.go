// Package virtualmachinesnapshot takes the snapshot that each VirtualMachineSnapshot asks for: it keeps the spec of the machine in a
// VirtualMachineSnapshotContent, and each claim of the machine in a VolumeSnapshot, which goes with the content.
//
// The cluster's snapshot-controller and the nodes take the VolumeSnapshots. A step is decided by a pure function (decide.go). Every name
// depends on the UID of the snapshot, so a step that is repeated makes nothing twice. There is no finalizer: the content goes with its
// snapshot, the VolumeSnapshots with their content, and a machine that names a snapshot that is gone is looked after when the machine is seen.
package virtualmachinesnapshot

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/snapshot/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/internal/kube/controller"
)

// Reasons of Events.
const (
	ReasonContent        = "SuccessfulVirtualMachineSnapshotContentCreate"
	ReasonVolumeSnapshot = "SuccessfulVolumeSnapshotCreate"
	ReasonFailed         = "VirtualMachineSnapshotFailed"
	ReasonError          = "VirtualMachineSnapshotError"
)

// Reconciler reconciles VirtualMachineSnapshots. All fields are required.
type Reconciler struct {
	Client client.Client
	Live   client.Reader // without a cache
	Events events.EventRecorder
	Guests Guests
	Now    func() time.Time
}

// Guests freezes the file systems of the guests of pods. The node thaws them after a time, whatever becomes of the manager.
type Guests interface {
	Freeze(ctx context.Context, pod types.NamespacedName, most time.Duration) error
	// Thaw reports whether they were frozen until now.
	Thaw(ctx context.Context, pod types.NamespacedName) (held bool, err error)
}

// Setup adds the reconciler to m, with that many concurrent workers.
func (r *Reconciler) Setup(m ctrl.Manager, concurrency int) error {
	return ctrl.NewControllerManagedBy(m).Named("virtualmachinesnapshot").
		For(&v1beta1.VirtualMachineSnapshot{}).
		Watches(&v1.VirtualMachine{}, handler.EnqueueRequestsFromMapFunc(named)).
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(r)
}

// named returns the snapshot that a machine names, which may be gone.
func named(_ context.Context, o client.Object) []reconcile.Request {
	vm, ok := o.(*v1.VirtualMachine)
	if !ok || vm.Status.SnapshotInProgress == nil {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: vm.Namespace, Name: *vm.Status.SnapshotInProgress}}}
}

// Reconcile brings one snapshot a step further.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	snapshot := &v1beta1.VirtualMachineSnapshot{}
	if err := r.Client.Get(ctx, req.NamespacedName, snapshot); err != nil {
		if apierrors.IsNotFound(err) {
			err = r.forget(ctx, req.NamespacedName)
		}
		return reconcile.Result{}, err
	}
	x, err := r.look(ctx, snapshot)
	if err != nil {
		return reconcile.Result{}, err
	}
	s := decide(x)
	if err := r.carryOut(ctx, &x, &s); err != nil {
		return reconcile.Result{}, err
	}
	if err := r.write(ctx, snapshot, s.status); err != nil {
		return reconcile.Result{}, err
	}
	r.tell(snapshot, s.status)
	if s.do != nothing && s.do != refresh { // the next step follows
		s.wait = time.Millisecond
	}
	return reconcile.Result{RequeueAfter: s.wait}, nil
}

// tell sends an Event about an error that is new.
func (r *Reconciler) tell(snapshot *v1beta1.VirtualMachineSnapshot, s v1beta1.VirtualMachineSnapshotStatus) {
	if s.Error == nil || snapshot.Status != nil && newer(snapshot.Status.Error, *s.Error.Message, r.Now()) == snapshot.Status.Error {
		return
	}
	reason := ReasonError
	if s.Phase == v1beta1.Failed {
		reason = ReasonFailed
	}
	r.Events.Eventf(snapshot, nil, corev1.EventTypeWarning, reason, "Snapshot", "%s", *s.Error.Message)
}

// forget looks after the machines that name a snapshot that is gone.
func (r *Reconciler) forget(ctx context.Context, key types.NamespacedName) error {
	all := &v1.VirtualMachineList{}
	if err := r.Client.List(ctx, all, client.InNamespace(key.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list the machines of namespace %s: %w", key.Namespace, err)
	}
	for i := range all.Items {
		vm := &all.Items[i]
		if vm.Status.SnapshotInProgress == nil || *vm.Status.SnapshotInProgress != key.Name {
			continue
		}
		if err := r.Live.Get(ctx, key, &v1beta1.VirtualMachineSnapshot{}); !apierrors.IsNotFound(err) {
			return err // there is another one now, or it is not known
		}
		vmi := &v1.VirtualMachineInstance{}
		if ok, err := get(ctx, r.Live, client.ObjectKeyFromObject(vm), vmi); err != nil {
			return err
		} else if ok && metav1.IsControlledBy(vmi, vm) {
			r.thaw(ctx, &seen{vm: vm, vmi: vmi})
		}
		if err := r.unlock(ctx, vm); err != nil {
			return err
		}
	}
	return nil
}

// carryOut does what was decided. What it learns meanwhile is in s.
func (r *Reconciler) carryOut(ctx context.Context, x *seen, s *step) error {
	switch s.do {
	case lock:
		return r.name(ctx, x.vm, &x.snapshot.Name)
	case begin:
		return r.begin(ctx, x)
	case take:
		return r.take(ctx, x, s)
	case finish:
		return r.finish(ctx, x, s)
	case refresh:
		if s.status.Error != nil && x.snapshot.Status.Error == nil { // the guest does not wait until it can go on
			r.thaw(ctx, x)
		}
		return r.writeContent(ctx, x.content, s.content)
	case unlock:
		r.thaw(ctx, x)
		return r.unlock(ctx, x.vm)
	case discard:
		err := r.Client.Delete(ctx, x.content, client.Preconditions{UID: &x.content.UID})
		return controller.IgnoreStale(err)
	case nothing, note:
	}
	return nil
}

// name makes a machine name a snapshot as the one in progress, or none.
func (r *Reconciler) name(ctx context.Context, vm *v1.VirtualMachine, snapshot *string) error {
	next := vm.DeepCopy()
	next.Status.SnapshotInProgress = snapshot
	if err := r.Client.Status().Update(ctx, next); controller.IgnoreStale(err) != nil {
		return fmt.Errorf("write the status of VirtualMachine %s: %w", vm.Name, err)
	}
	return nil
}

func (r *Reconciler) unlock(ctx context.Context, vm *v1.VirtualMachine) error {
	return r.name(ctx, vm, nil)
}

// write writes the status if anything of it is new.
func (r *Reconciler) write(ctx context.Context, snapshot *v1beta1.VirtualMachineSnapshot, s v1beta1.VirtualMachineSnapshotStatus) error {
	if snapshot.Status != nil && apiequality.Semantic.DeepEqual(*snapshot.Status, s) {
		return nil
	}
	next := snapshot.DeepCopy()
	next.Status = &s
	if err := r.Client.Status().Update(ctx, next); controller.IgnoreStale(err) != nil {
		return fmt.Errorf("write the status of VirtualMachineSnapshot %s: %w", snapshot.Name, err)
	}
	return nil
}

// writeContent does the same for the content.
func (r *Reconciler) writeContent(ctx context.Context, content *v1beta1.VirtualMachineSnapshotContent, s v1beta1.VirtualMachineSnapshotContentStatus) error {
	if content.Status != nil && apiequality.Semantic.DeepEqual(*content.Status, s) {
		return nil
	}
	next := content.DeepCopy()
	next.Status = &s
	if err := r.Client.Status().Update(ctx, next); err != nil { // a conflict, too: the snapshot must not say more than its content
		return fmt.Errorf("write the status of VirtualMachineSnapshotContent %s: %w", content.Name, err)
	}
	return nil
}

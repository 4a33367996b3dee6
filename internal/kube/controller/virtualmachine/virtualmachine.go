// Package virtualmachine creates and deletes the instance of each VirtualMachine, as its run strategy and requests to start and stop
// say, and tells in the status what became of it.
//
// It knows only objects of KubeVirt; package virtualmachineinstance makes the pods.
package virtualmachine

import (
	"context"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/instancetype/v1beta1"
	cdi "kubevirt.io/containerized-data-importer-api/pkg/apis/core/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/kube/placement"
	"cocoonstack.io/cocoon/internal/kube/snapshotclass"
)

// Reasons of Events.
const (
	ReasonStarted  = "SuccessfulCreate"
	ReasonStopped  = "SuccessfulDelete"
	ReasonRefused  = "FailedCreate"
	ReasonOccupied = "NameTaken" // an instance that is not the machine's has its name
	ReasonIgnored  = "FieldsIgnored"
	ReasonResized  = "LiveUpdate"
	ReasonDetached = "InterfacesDetached"
)

// claimPause is the time after which a machine looks again for a claim that says its instancetype or its preference.
const claimPause = 15 * time.Second

// Reconciler reconciles VirtualMachines. All fields are required.
type Reconciler struct {
	Client client.Client
	Live   client.Reader // without a cache
	Events events.EventRecorder
	Now    func() time.Time
	Jitter func() float64 // from 0 to 1

	Classes *snapshotclass.Memo // of snapshots
}

// Setup adds the reconciler to m, with that many concurrent workers.
func (r *Reconciler) Setup(m ctrl.Manager, concurrency int) error {
	return ctrl.NewControllerManagedBy(m).Named("virtualmachine").
		For(&v1.VirtualMachine{}).
		Owns(&v1.VirtualMachineInstance{}).
		Owns(&cdi.DataVolume{}).
		Watches(&cdi.DataVolume{}, r.having()).
		Watches(&v1beta1.VirtualMachineInstancetype{}, r.waiting(kubevirt.KindInstancetype)).
		Watches(&v1beta1.VirtualMachineClusterInstancetype{}, r.waiting(kubevirt.KindClusterInstancetype)).
		Watches(&v1beta1.VirtualMachinePreference{}, r.waiting(kubevirt.KindPreference)).
		Watches(&v1beta1.VirtualMachineClusterPreference{}, r.waiting(kubevirt.KindClusterPreference)).
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(r)
}

// Reconcile brings one machine a step further.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	vm := &v1.VirtualMachine{}
	if err := r.Client.Get(ctx, req.NamespacedName, vm); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	vmi, err := r.instance(ctx, vm)
	if err != nil {
		return reconcile.Result{}, err
	}
	if vm.DeletionTimestamp != nil && vmi == nil {
		return reconcile.Result{}, r.release(ctx, vm)
	}
	if vm.DeletionTimestamp == nil && !controllerutil.ContainsFinalizer(vm, v1.VirtualMachineControllerFinalizer) {
		kept := vm.DeepCopy()
		controllerutil.AddFinalizer(kept, v1.VirtualMachineControllerFinalizer)
		return reconcile.Result{}, controller.IgnoreStale(r.Client.Patch(ctx, kept, client.MergeFromWithOptions(vm, client.MergeFromWithOptimisticLock{})))
	}
	x := seen{vm: vm, vmi: vmi, now: r.Now(), jitter: r.Jitter()}
	plan, err := r.plan(ctx, vm)
	if err != nil || plan.captured {
		return reconcile.Result{}, err // the change of the status brings the machine back
	}
	x.template, x.refusal, x.reason = plan.template, plan.refusal, plan.reason
	if x.staged, err = r.staged(ctx); err != nil {
		return reconcile.Result{}, err
	}
	if x.data, err = r.dataVolumes(ctx, vm, x.refusal == "" && vm.DeletionTimestamp == nil); err != nil {
		return reconcile.Result{}, err
	}
	if x.refusal == "" && x.data.occupied != "" {
		x.refusal, x.reason = x.data.occupied, ReasonOccupied
	}
	if x.refusal == "" && switchesOn(vm, vmi) {
		on := vm.DeepCopy()
		switchOn(on)
		return reconcile.Result{}, controller.IgnoreStale(r.Client.Patch(ctx, on, client.MergeFromWithOptions(vm, client.MergeFromWithOptimisticLock{})))
	}
	s := decide(x)
	if s.status.VolumeSnapshotStatuses, err = r.snapshotStatuses(ctx, vm, x.template); err != nil {
		return reconcile.Result{}, err
	}
	if s.start {
		if err := r.start(ctx, vm, plan); err != nil {
			return reconcile.Result{}, err
		}
		s.status.Created = true
	}
	if rest := silence(vm, vmi, s, x.now); rest > 0 {
		return reconcile.Result{RequeueAfter: rest}, nil
	}
	if s.told != nil {
		if err := r.tell(ctx, vmi, *s.told); err != nil {
			return reconcile.Result{}, controller.IgnoreStale(err) // the instance that was read has changed
		}
	}
	if err := r.noteDump(ctx, vm, s.status.MemoryDumpRequest); err != nil {
		return reconcile.Result{}, err
	}
	// What a deleted instance leaves behind is in the status, so the status is written first.
	if err := r.write(ctx, vm, s.status); err != nil {
		return reconcile.Result{}, err
	}
	if was := failure(&vm.Status); x.refusal != "" && was != x.refusal {
		r.Events.Eventf(vm, nil, corev1.EventTypeWarning, ReasonRefused, "Check", "%s", x.refusal)
	}
	if s.live != nil && !s.stop {
		next := vmi.DeepCopy()
		next.Spec = *s.live
		if err := r.Client.Patch(ctx, next, client.MergeFromWithOptions(vmi, client.MergeFromWithOptimisticLock{})); err != nil {
			return reconcile.Result{}, controller.IgnoreStale(err)
		}
		r.Events.Eventf(vm, vmi, corev1.EventTypeNormal, ReasonResized, "Update", "the running instance is to have the CPUs, the memory and the interfaces of the template")
	}
	if s.template != nil && !s.stop {
		next := vm.DeepCopy()
		next.Spec.Template.Spec = *s.template
		if err := r.Client.Patch(ctx, next, client.MergeFromWithOptions(vm, client.MergeFromWithOptimisticLock{})); err != nil {
			return reconcile.Result{}, controller.IgnoreStale(err)
		}
		r.Events.Eventf(vm, vmi, corev1.EventTypeNormal, ReasonDetached, "Detach", "the guest has given back the interfaces that are absent, and the template does not list them any more")
	}
	if s.stop && vmi.DeletionTimestamp == nil {
		if err := r.Client.Delete(ctx, vmi, client.Preconditions{UID: &vmi.UID}); err != nil {
			return reconcile.Result{}, controller.IgnoreStale(err)
		}
		r.Events.Eventf(vm, vmi, corev1.EventTypeNormal, ReasonStopped, "Stop", "stopped the machine by deleting its instance")
	}
	if plan.again > 0 && (s.wait == 0 || s.wait > plan.again) {
		s.wait = plan.again
	}
	return reconcile.Result{RequeueAfter: s.wait}, nil
}

// staged reports whether the operator has said that changes of machines wait for a restart.
func (r *Reconciler) staged(ctx context.Context) (bool, error) {
	k := &v1.KubeVirt{}
	if err := r.Client.Get(ctx, kubevirt.ConfigName, k); err != nil {
		return false, client.IgnoreNotFound(err)
	}
	strategy := k.Spec.Configuration.VMRolloutStrategy
	return strategy != nil && *strategy == v1.VMRolloutStrategyStage, nil
}

// silence returns how long a new machine that always runs does not tell that it starts; 0: it tells now. If its guest is up until then, that is
// the first that it tells, which saves a write. Without a status, such a machine starts in the same way.
func silence(vm *v1.VirtualMachine, vmi *v1.VirtualMachineInstance, s step, now time.Time) time.Duration {
	if !apiequality.Semantic.DeepEqual(vm.Status, v1.VirtualMachineStatus{}) || s.stop ||
		s.status.PrintableStatus != v1.VirtualMachineStatusStarting || s.status.RunStrategy != v1.RunStrategyAlways {
		return 0
	}
	since := now
	if vmi != nil {
		since = vmi.CreationTimestamp.Time
	}
	return max(0, since.Add(kubevirt.Quiet).Sub(now))
}

// failure returns why the machine was refused when it was looked at last.
func failure(s *v1.VirtualMachineStatus) string {
	for _, c := range s.Conditions {
		if c.Type == v1.VirtualMachineFailure {
			return c.Message
		}
	}
	return ""
}

// instance returns the instance of vm, nil if there is none. The cache may not have heard of one that was just created. Whether there
// is none decides about a start, so it is asked of the API server.
func (r *Reconciler) instance(ctx context.Context, vm *v1.VirtualMachine) (*v1.VirtualMachineInstance, error) {
	for _, from := range []client.Reader{r.Client, r.Live} {
		vmi := &v1.VirtualMachineInstance{}
		err := from.Get(ctx, client.ObjectKeyFromObject(vm), vmi)
		if err == nil && metav1.IsControlledBy(vmi, vm) {
			return vmi, nil
		}
		if client.IgnoreNotFound(err) != nil {
			return nil, fmt.Errorf("read the instance of VirtualMachine %s: %w", vm.Name, err)
		}
	}
	return nil, nil
}

// start creates the instance. One of somebody else that has the name stays.
func (r *Reconciler) start(ctx context.Context, vm *v1.VirtualMachine, p plan) error {
	vmi := instance(vm, p.template, p.base, r.Now())
	if err := r.hold(ctx, vm, vmi); err != nil {
		return fmt.Errorf("keep the node of VirtualMachine %s: %w", vm.Name, err)
	}
	err := r.Client.Create(ctx, vmi)
	switch {
	case err == nil:
		r.Events.Eventf(vm, vmi, corev1.EventTypeNormal, ReasonStarted, "Start", "started the machine by creating its instance")
		if len(p.warnings) > 0 {
			r.Events.Eventf(vm, vmi, corev1.EventTypeWarning, ReasonIgnored, "Start", "%s", strings.Join(p.warnings, "; "))
		}
	case apierrors.IsAlreadyExists(err):
		r.Events.Eventf(vm, nil, corev1.EventTypeWarning, ReasonOccupied, "Start", "a VirtualMachineInstance that is not of this machine has its name; delete it")
	case apierrors.IsForbidden(err) || apierrors.IsInvalid(err):
		r.Events.Eventf(vm, nil, corev1.EventTypeWarning, ReasonRefused, "Start", "the API server refuses the instance: %s", err.Error())
	}
	if err != nil {
		return fmt.Errorf("create the instance of VirtualMachine %s: %w", vm.Name, err)
	}
	return nil
}

// hold makes the claim by which a node keeps the machine, if the machine asks for that. The claim goes with the machine; one that a node
// makes for a pod goes with the instance.
func (r *Reconciler) hold(ctx context.Context, vm *v1.VirtualMachine, vmi *v1.VirtualMachineInstance) error {
	pod := kubevirt.Pod(vmi)
	ask, err := contract.ParseSticky(pod.Annotations)
	if err != nil || !ask.Asked {
		return err
	}
	owner := metav1.OwnerReference{APIVersion: v1.GroupVersion.String(), Kind: v1.VirtualMachineGroupVersionKind.Kind, Name: vm.Name, UID: vm.UID}
	claim := placement.New(pod, ask, &owner)
	if err := r.Client.Create(ctx, claim); !apierrors.IsAlreadyExists(err) {
		return err
	}
	if err := r.Live.Get(ctx, client.ObjectKeyFromObject(claim), claim); err != nil {
		return err
	}
	if owners := claim.OwnerReferences; len(owners) > 0 && owners[0].UID != vm.UID {
		return fmt.Errorf("VMPlacement %s belongs to an earlier %s, with which it is about to be deleted", claim.Name, owners[0].Kind)
	}
	return nil
}

// release lets a machine go whose instance is gone.
func (r *Reconciler) release(ctx context.Context, vm *v1.VirtualMachine) error {
	if !controllerutil.ContainsFinalizer(vm, v1.VirtualMachineControllerFinalizer) {
		return nil
	}
	gone := vm.DeepCopy()
	controllerutil.RemoveFinalizer(gone, v1.VirtualMachineControllerFinalizer)
	return controller.IgnoreStale(r.Client.Patch(ctx, gone, client.MergeFromWithOptions(vm, client.MergeFromWithOptimisticLock{})))
}

// write writes the status if anything of it is new. A conflict is an error here: what was decided upon an old status must not be done.
func (r *Reconciler) write(ctx context.Context, vm *v1.VirtualMachine, s v1.VirtualMachineStatus) error {
	if apiequality.Semantic.DeepEqual(vm.Status, s) {
		return nil
	}
	next := vm.DeepCopy()
	next.Status = s
	if err := r.Client.Status().Update(ctx, next); err != nil {
		return fmt.Errorf("write the status of VirtualMachine %s: %w", vm.Name, err)
	}
	return nil
}

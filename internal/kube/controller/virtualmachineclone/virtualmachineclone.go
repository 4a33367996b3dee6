// Package virtualmachineclone makes the machine that each VirtualMachineClone asks for: it takes a snapshot of the source, and restores it to
// a new machine, whose identity is its own.
//
// Other controllers do both. Names depend on the UID of the clone, so a step that is repeated makes nothing twice. The snapshot and the restore go
// with the clone.
package virtualmachineclone

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	"kubevirt.io/api/clone/v1beta1"
	v1 "kubevirt.io/api/core/v1"
	snapshotv1beta1 "kubevirt.io/api/snapshot/v1beta1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlcontroller "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// Reasons of Events.
const (
	ReasonSucceeded = "VMClonePhaseSucceeded"
	ReasonFailed    = "VMClonePhaseFailed"
	ReasonSnapshot  = "SnapshotCreated"
	ReasonRestore   = "RestoreCreated"
)

// look is the time after which a clone looks again for what does not exist.
const look = 10 * time.Second

var kind = v1beta1.SchemeGroupVersion.WithKind("VirtualMachineClone")

// Reconciler reconciles VirtualMachineClones. All fields are required.
type Reconciler struct {
	Client client.Client
	Live   client.Reader // without a cache
	Events events.EventRecorder
	Now    func() time.Time
}

// Setup adds the reconciler to m, with that many concurrent workers.
func (r *Reconciler) Setup(m ctrl.Manager, concurrency int) error {
	return ctrl.NewControllerManagedBy(m).Named("virtualmachineclone").
		For(&v1beta1.VirtualMachineClone{}).
		Owns(&snapshotv1beta1.VirtualMachineSnapshot{}).
		Owns(&snapshotv1beta1.VirtualMachineRestore{}).
		WithOptions(ctrlcontroller.Options{MaxConcurrentReconciles: concurrency}).
		Complete(r)
}

// Reconcile brings one clone a step further.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	clone := &v1beta1.VirtualMachineClone{}
	if err := r.Client.Get(ctx, req.NamespacedName, clone); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if p := clone.Status.Phase; p == v1beta1.Succeeded || p == v1beta1.Failed || clone.DeletionTimestamp != nil {
		return reconcile.Result{}, nil
	}
	c := &cloning{Reconciler: r, clone: clone, status: *clone.Status.DeepCopy(), now: r.Now()}
	err := c.step(ctx)
	switch {
	case apierrors.IsForbidden(err) || apierrors.IsInvalid(err): // a quota, a policy
		c.waits(err.Error())
	case errdefs.IsInvalid(err):
		c.fails(err.Error())
	case err != nil:
		return reconcile.Result{}, err
	}
	return reconcile.Result{RequeueAfter: c.again}, c.write(ctx)
}

// cloning is one step of a clone.
type cloning struct {
	*Reconciler
	clone  *v1beta1.VirtualMachineClone
	status v1beta1.VirtualMachineCloneStatus
	again  time.Duration
	now    time.Time
}

// step takes the snapshot, then makes the target. It stops where it has to wait.
func (c *cloning) step(ctx context.Context) error {
	if c.status.CreationTime == nil {
		at := metav1.NewTime(c.now)
		c.status.CreationTime = &at
	}
	snapshot, err := c.snapshot(ctx)
	if err != nil || snapshot == nil {
		return err
	}
	s := snapshot.Status
	switch {
	case s != nil && s.Phase == snapshotv1beta1.Failed:
		c.fails(fmt.Sprintf("the VirtualMachineSnapshot %s failed: %s", snapshot.Name, text(s.Error)))
		return nil
	case s == nil || s.ReadyToUse == nil || !*s.ReadyToUse || s.VirtualMachineSnapshotContentName == nil:
		why := fmt.Sprintf("the VirtualMachineSnapshot %s is not ready", snapshot.Name)
		if s != nil && s.Error != nil {
			why += ": " + text(s.Error)
		}
		c.waits(why)
		return nil
	}
	c.status.Phase = v1beta1.CreatingTargetVM
	restore, err := c.restore(ctx, snapshot)
	if err != nil || restore == nil {
		return err
	}
	c.status.Phase = v1beta1.RestoreInProgress
	switch rs := restore.Status; {
	case rs != nil && rs.Complete != nil && *rs.Complete:
		c.status.Phase = v1beta1.Succeeded
		c.condition(v1beta1.ConditionProgressing, corev1.ConditionFalse, "Ready", "")
		c.condition(v1beta1.ConditionReady, corev1.ConditionTrue, "Ready", "")
		c.Events.Eventf(c.clone, nil, corev1.EventTypeNormal, ReasonSucceeded, "Clone", "made the VirtualMachine %s", *c.status.TargetName)
	case rs != nil && failed(rs) != "":
		c.fails(fmt.Sprintf("the VirtualMachineRestore %s failed: %s", restore.Name, failed(rs)))
	default:
		c.waits(fmt.Sprintf("the VirtualMachineRestore %s is not complete", restore.Name))
	}
	return nil
}

// snapshot returns the snapshot of which the target is made, nil if it does not exist yet.
func (c *cloning) snapshot(ctx context.Context) (*snapshotv1beta1.VirtualMachineSnapshot, error) {
	source, key := c.clone.Spec.Source, client.ObjectKey{Namespace: c.clone.Namespace}
	snapshot := &snapshotv1beta1.VirtualMachineSnapshot{}
	if source.Kind == "VirtualMachineSnapshot" {
		key.Name = source.Name
		c.status.SnapshotName = &key.Name
		if ok, err := c.get(ctx, key, snapshot); err != nil || ok {
			return snapshot, err
		}
		c.waits(fmt.Sprintf("the VirtualMachineSnapshot %s does not exist", source.Name))
		c.again = look
		return nil, nil
	}
	c.status.Phase = v1beta1.SnapshotInProgress
	key.Name = "clone-" + string(c.clone.UID)
	c.status.SnapshotName = &key.Name
	if ok, err := c.get(ctx, key, snapshot); err != nil {
		return nil, err
	} else if ok && !metav1.IsControlledBy(snapshot, c.clone) {
		return nil, errdefs.Invalidf("the VirtualMachineSnapshot %s exists and is not of this clone; delete it, and create another clone", key.Name)
	} else if ok {
		return snapshot, nil
	}
	if ok, err := c.get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: source.Name}, &v1.VirtualMachine{}); err != nil {
		return nil, err
	} else if !ok {
		c.waits(fmt.Sprintf("the VirtualMachine %s does not exist", source.Name))
		c.again = look
		return nil, nil
	}
	snapshot = &snapshotv1beta1.VirtualMachineSnapshot{
		ObjectMeta: metav1.ObjectMeta{Name: key.Name, Namespace: key.Namespace, OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(c.clone, kind)}},
		Spec:       snapshotv1beta1.VirtualMachineSnapshotSpec{Source: *source.DeepCopy()},
	}
	if err := c.Client.Create(ctx, snapshot); err != nil {
		return nil, fmt.Errorf("create VirtualMachineSnapshot %s: %w", key.Name, err)
	}
	c.Events.Eventf(c.clone, snapshot, corev1.EventTypeNormal, ReasonSnapshot, "Clone", "created the VirtualMachineSnapshot %s", key.Name)
	return snapshot, nil
}

// restore returns the restore that makes the target.
func (c *cloning) restore(ctx context.Context, snapshot *snapshotv1beta1.VirtualMachineSnapshot) (*snapshotv1beta1.VirtualMachineRestore, error) {
	key := client.ObjectKey{Namespace: c.clone.Namespace, Name: "clone-" + string(c.clone.UID)}
	target := "clone-" + string(c.clone.UID)
	if t := c.clone.Spec.Target; t != nil && t.Name != "" {
		target = t.Name
	}
	c.status.RestoreName, c.status.TargetName = &key.Name, &target
	restore := &snapshotv1beta1.VirtualMachineRestore{}
	if ok, err := c.get(ctx, key, restore); err != nil {
		return nil, err
	} else if ok && !metav1.IsControlledBy(restore, c.clone) {
		return nil, errdefs.Invalidf("the VirtualMachineRestore %s exists and is not of this clone; delete it, and create another clone", key.Name)
	} else if ok {
		return restore, nil
	}
	if ok, err := c.get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: target}, &v1.VirtualMachine{}); err != nil {
		return nil, err
	} else if ok {
		return nil, errdefs.Invalidf("the VirtualMachine %s exists; delete it, or clone to another name", target)
	}
	content := &snapshotv1beta1.VirtualMachineSnapshotContent{}
	if ok, err := c.get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: *snapshot.Status.VirtualMachineSnapshotContentName}, content); err != nil {
		return nil, err
	} else if m := content.Spec.Source.VirtualMachine; !ok || m == nil || m.Spec.Template == nil {
		return nil, errdefs.Invalidf("the content of VirtualMachineSnapshot %s does not exist, or has no machine with a template", snapshot.Name)
	}
	m := content.Spec.Source.VirtualMachine
	changes, err := patches(c.clone, m.Labels, m.Annotations, &m.Spec)
	if err != nil {
		return nil, err
	}
	restore = &snapshotv1beta1.VirtualMachineRestore{
		ObjectMeta: metav1.ObjectMeta{Name: key.Name, Namespace: key.Namespace, OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(c.clone, kind)}},
		Spec: snapshotv1beta1.VirtualMachineRestoreSpec{
			Target:                     corev1.TypedLocalObjectReference{APIGroup: &v1.GroupVersion.Group, Kind: v1.VirtualMachineGroupVersionKind.Kind, Name: target},
			VirtualMachineSnapshotName: snapshot.Name, Patches: changes,
		},
	}
	if p := c.clone.Spec.VolumeNamePolicy; p != nil {
		policy := p.ToVolumeRestorePolicy()
		restore.Spec.VolumeRestorePolicy = &policy
	}
	if err := c.Client.Create(ctx, restore); err != nil {
		return nil, fmt.Errorf("create VirtualMachineRestore %s: %w", key.Name, err)
	}
	c.Events.Eventf(c.clone, restore, corev1.EventTypeNormal, ReasonRestore, "Clone", "created the VirtualMachineRestore %s", key.Name)
	return restore, nil
}

// get reads an object, which may not exist.
func (c *cloning) get(ctx context.Context, key client.ObjectKey, into client.Object) (bool, error) {
	err := c.Live.Get(ctx, key, into)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read %T %s: %w", into, key, err)
	}
	return err == nil, nil
}

func text(e *snapshotv1beta1.Error) string {
	if e == nil || e.Message == nil {
		return ""
	}
	return *e.Message
}

// failed returns why a restore failed, "" if it has not.
func failed(s *snapshotv1beta1.VirtualMachineRestoreStatus) string {
	for _, c := range s.Conditions {
		if c.Type == snapshotv1beta1.ConditionFailure && c.Status == corev1.ConditionTrue {
			return c.Reason
		}
	}
	return ""
}

// waits says why a clone does not go on.
func (c *cloning) waits(why string) {
	c.condition(v1beta1.ConditionProgressing, corev1.ConditionTrue, "Pending", why)
	c.condition(v1beta1.ConditionReady, corev1.ConditionFalse, "Pending", why)
	c.again = look
}

// fails gives up.
func (c *cloning) fails(why string) {
	c.status.Phase = v1beta1.Failed
	c.condition(v1beta1.ConditionProgressing, corev1.ConditionFalse, "Failed", why)
	c.condition(v1beta1.ConditionReady, corev1.ConditionFalse, "Failed", why)
	c.Events.Eventf(c.clone, nil, corev1.EventTypeWarning, ReasonFailed, "Clone", "%s", why)
}

func (c *cloning) condition(kind v1beta1.ConditionType, status corev1.ConditionStatus, reason, message string) {
	next := v1beta1.Condition{Type: kind, Status: status, Reason: reason, Message: message, LastTransitionTime: metav1.NewTime(c.now)}
	c.status.Conditions = kubevirt.SetCondition(c.status.Conditions, next, func(c *v1beta1.Condition) (v1beta1.ConditionType, corev1.ConditionStatus, *metav1.Time) {
		return c.Type, c.Status, &c.LastTransitionTime
	})
}

// write writes the status if anything of it is new.
func (c *cloning) write(ctx context.Context) error {
	if apiequality.Semantic.DeepEqual(c.clone.Status, c.status) {
		return nil
	}
	next := c.clone.DeepCopy()
	next.Status = c.status
	if err := c.Client.Status().Update(ctx, next); controller.IgnoreStale(err) != nil {
		return fmt.Errorf("write the status of VirtualMachineClone %s: %w", c.clone.Name, err)
	}
	return nil
}

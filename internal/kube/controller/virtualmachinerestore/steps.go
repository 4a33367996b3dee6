package virtualmachinerestore

import (
	"context"
	"fmt"
	"maps"

	volumesnapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/api/snapshot/v1beta1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/internal/kube/controller"
)

// look reads what there is of a restore, and nothing of it from a cache but the restore.
func (r *Reconciler) look(ctx context.Context, restore *v1beta1.VirtualMachineRestore) (seen, error) {
	x := seen{restore: restore, now: r.Now()}
	done := restore.Status != nil && over(restore.Status)
	from := r.Live
	if done { // most are, and are looked at again whenever the manager starts
		from = r.Client
	}
	key := client.ObjectKey{Namespace: restore.Namespace, Name: restore.Spec.Target.Name}
	target := &v1.VirtualMachine{}
	if ok, err := get(ctx, from, key, target); err != nil {
		return x, err
	} else if ok {
		x.target = target
	}
	if done {
		return x, nil
	}
	vmi := &v1.VirtualMachineInstance{}
	runs, err := get(ctx, r.Live, key, vmi)
	if err != nil {
		return x, err
	}
	x.runs = runs && x.target != nil && metav1.IsControlledBy(vmi, x.target)
	if err := r.lookAtSnapshot(ctx, &x); err != nil || x.obstacle != "" {
		return x, err
	}
	t := x.target
	switch {
	case x.restored(), t == nil:
	case x.snapshot.Status.SourceUID == nil || *x.snapshot.Status.SourceUID != t.UID:
		x.refusal = fmt.Sprintf("the VirtualMachine %s exists and is not the one of which the snapshot %s was taken; restore to another name, or delete it", t.Name, x.snapshot.Name)
	case t.DeletionTimestamp != nil:
		x.obstacle = fmt.Sprintf("the VirtualMachine %s is being deleted", t.Name)
	case t.Status.SnapshotInProgress != nil:
		x.obstacle = fmt.Sprintf("the snapshot %s of VirtualMachine %s is in progress", *t.Status.SnapshotInProgress, t.Name)
	case t.Status.RestoreInProgress != nil && !x.locked():
		x.obstacle = fmt.Sprintf("the VirtualMachine %s is being restored by VirtualMachineRestore %s", t.Name, *t.Status.RestoreInProgress)
	}
	if x.refusal == "" {
		x.refusal = check(restore, x.content)
	}
	if x.refusal != "" || x.obstacle != "" {
		return x, nil
	}
	return x, r.lookAtClaims(ctx, &x)
}

// lookAtSnapshot reads the snapshot and its content.
func (r *Reconciler) lookAtSnapshot(ctx context.Context, x *seen) error {
	name, namespace := x.restore.Spec.VirtualMachineSnapshotName, x.restore.Namespace
	snapshot := &v1beta1.VirtualMachineSnapshot{}
	ok, err := get(ctx, r.Live, client.ObjectKey{Namespace: namespace, Name: name}, snapshot)
	switch {
	case err != nil:
		return err
	case !ok:
		x.obstacle = fmt.Sprintf("the VirtualMachineSnapshot %s does not exist", name)
		return nil
	case snapshot.Status == nil || snapshot.Status.ReadyToUse == nil || !*snapshot.Status.ReadyToUse || snapshot.Status.VirtualMachineSnapshotContentName == nil:
		x.obstacle = fmt.Sprintf("the VirtualMachineSnapshot %s is not ready", name)
		return nil
	}
	content := &v1beta1.VirtualMachineSnapshotContent{}
	if ok, err = get(ctx, r.Live, client.ObjectKey{Namespace: namespace, Name: *snapshot.Status.VirtualMachineSnapshotContentName}, content); err != nil {
		return err
	} else if !ok {
		x.obstacle = fmt.Sprintf("the content of VirtualMachineSnapshot %s does not exist", name)
		return nil
	}
	x.snapshot, x.content = snapshot, content
	return nil
}

// lookAtClaims reads the claims that the restore has made.
func (r *Reconciler) lookAtClaims(ctx context.Context, x *seen) error {
	x.settled = true
	for _, v := range volumes(x.restore, x.content) {
		c := &corev1.PersistentVolumeClaim{}
		ok, err := get(ctx, r.Live, client.ObjectKey{Namespace: x.restore.Namespace, Name: v.PersistentVolumeClaimName}, c)
		switch {
		case err != nil:
			return err
		case !ok:
			x.made, x.settled = append(x.made, nil), false
			continue
		case c.Annotations[lastRestore] != mark(x.restore):
			x.refusal = fmt.Sprintf("the claim %s exists and is not of this restore; delete it, or give another name in spec.volumeRestoreOverrides", c.Name)
			return nil
		case c.Status.Phase == corev1.ClaimLost:
			x.obstacle = fmt.Sprintf("the claim %s has lost its volume", c.Name)
		case c.Status.Phase != corev1.ClaimBound:
			later, err := r.waitsForPod(ctx, c)
			if err != nil {
				return err
			}
			x.settled = x.settled && later
		}
		x.made = append(x.made, c)
	}
	return nil
}

// waitsForPod reports whether the volume of a claim is made when its first pod has a node.
func (r *Reconciler) waitsForPod(ctx context.Context, c *corev1.PersistentVolumeClaim) (bool, error) {
	if c.Spec.StorageClassName == nil {
		return false, nil
	}
	class := &storagev1.StorageClass{}
	ok, err := get(ctx, r.Live, client.ObjectKey{Name: *c.Spec.StorageClassName}, class)
	return ok && class.VolumeBindingMode != nil && *class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer, err
}

// get reads an object, which may not exist.
func get(ctx context.Context, from client.Reader, key client.ObjectKey, into client.Object) (bool, error) {
	err := from.Get(ctx, key, into)
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("read %T %s: %w", into, key, err)
	}
	return err == nil, nil
}

// carryOut does what was decided.
func (r *Reconciler) carryOut(ctx context.Context, x *seen, s *step) error {
	switch s.do {
	case stop:
		return r.stop(ctx, x.target)
	case create:
		vm, err := created(x.restore, x.content)
		if err == nil {
			err = r.Client.Create(ctx, vm)
		}
		if err != nil {
			return fmt.Errorf("create VirtualMachine %s: %w", x.restore.Spec.Target.Name, err)
		}
	case lock:
		return r.name(ctx, x.target, &x.restore.Name)
	case claims:
		return r.claims(ctx, x, s)
	case change:
		if err := r.copies(ctx, x); err != nil {
			return err
		}
		next := changed(x.restore, x.target, x.content)
		if err := r.Client.Patch(ctx, next, client.MergeFromWithOptions(x.target, client.MergeFromWithOptimisticLock{})); controller.IgnoreStale(err) != nil {
			return fmt.Errorf("restore VirtualMachine %s: %w", x.target.Name, err)
		}
	case finish: // also the copies of a machine that was created, and has no claims
		return r.copies(ctx, x)
	case unlock:
		return r.name(ctx, x.target, nil)
	case nothing:
	}
	return nil
}

// stop makes the target one that does not run, if it is not.
func (r *Reconciler) stop(ctx context.Context, target *v1.VirtualMachine) error {
	if strategy, err := target.RunStrategy(); err == nil && strategy == v1.RunStrategyHalted {
		return nil
	}
	next, off, halted := target.DeepCopy(), false, v1.RunStrategyHalted
	if next.Spec.Running != nil {
		next.Spec.Running = &off
	} else {
		next.Spec.RunStrategy = &halted
	}
	if err := r.Client.Patch(ctx, next, client.MergeFromWithOptions(target, client.MergeFromWithOptimisticLock{})); controller.IgnoreStale(err) != nil {
		return fmt.Errorf("stop VirtualMachine %s: %w", target.Name, err)
	}
	return nil
}

// claims creates the claims that are missing.
func (r *Reconciler) claims(ctx context.Context, x *seen, s *step) error {
	for i := range x.content.Spec.VolumeBackups {
		b := &x.content.Spec.VolumeBackups[i]
		if b.VolumeSnapshotName == nil || i >= len(x.made) || x.made[i] != nil {
			continue
		}
		from := &volumesnapshotv1.VolumeSnapshot{}
		ok, err := get(ctx, r.Live, client.ObjectKey{Namespace: x.restore.Namespace, Name: *b.VolumeSnapshotName}, from)
		if err != nil && !meta.IsNoMatchError(err) {
			return err
		}
		if !ok {
			s.do = nothing
			s.waiting(fmt.Sprintf("the VolumeSnapshot %s does not exist", *b.VolumeSnapshotName), x.now)
			return nil
		}
		size := b.PersistentVolumeClaim.Spec.DeepCopy()
		if st := from.Status; st != nil && st.RestoreSize != nil {
			if asked := size.Resources.Requests[corev1.ResourceStorage]; asked.Cmp(*st.RestoreSize) < 0 {
				size.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: *st.RestoreSize}
			}
		}
		if err := r.Client.Create(ctx, claim(x.restore, b, size, x.target)); err != nil && !apierrors.IsAlreadyExists(err) { // the next look sees whose it is
			return fmt.Errorf("create the claim %s: %w", claimName(x.restore, b.VolumeName), err)
		}
	}
	return nil
}

// copies makes the target's own copies of the instancetype and the preference in the content.
func (r *Reconciler) copies(ctx context.Context, x *seen) error {
	from := x.content.Spec.Source.VirtualMachine.Spec
	names := map[string]string{}
	if m := from.Instancetype; m != nil && m.RevisionName != "" {
		names[copyName(x.restore, "instancetype")] = m.RevisionName
	}
	if m := from.Preference; m != nil && m.RevisionName != "" {
		names[copyName(x.restore, "preference")] = m.RevisionName
	}
	for to, from := range names {
		is := &appsv1.ControllerRevision{}
		if err := r.Live.Get(ctx, client.ObjectKey{Namespace: x.target.Namespace, Name: from}, is); err != nil {
			return fmt.Errorf("read ControllerRevision %s of the snapshot: %w", from, err)
		}
		kept := &appsv1.ControllerRevision{
			ObjectMeta: metav1.ObjectMeta{
				Name: to, Namespace: x.target.Namespace, Labels: maps.Clone(is.Labels),
				OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(x.target, v1.VirtualMachineGroupVersionKind)},
			},
			Data: is.Data, Revision: is.Revision,
		}
		if err := r.Client.Create(ctx, kept); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("copy ControllerRevision %s to %s: %w", from, to, err)
		}
	}
	return nil
}

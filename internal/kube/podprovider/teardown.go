package podprovider

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/pauses"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// teardown removes the pod's VM, its forks' snapshots and the pod's object.
type teardown struct {
	base
	retention *retention
	saved     vm.ID // the VM that was saved before its removal
	saving    retryTask
	releasing retryTask // of volumes
}

// again is when a step of the removal is retried.
const again = turn(time.Second)

// tearDown shuts the pod's VM down within the grace period, and then removes it and unpublishes its volumes. It returns true when all of
// it is gone, otherwise when to retry. The caller cancels ctx when a shorter grace period is requested.
func (t *teardown) tearDown(ctx context.Context, r removal) (turn, bool) {
	if next, ok := t.removeVM(ctx, r); !ok || t.static {
		return next, ok
	}
	err := t.volumes.Release(ctx, t.look().pod)
	switch {
	case err == nil:
		return whenWoken, true
	case ctx.Err() == nil && t.releasing.failed(err):
		t.event(corev1.EventTypeWarning, eventFailedUnmount, "%s", err)
		t.log.Warn("volumes of the pod not unpublished", "err", err)
	}
	return after(t.releasing.left()), false
}

// removeVM is tearDown for the VM.
func (t *teardown) removeVM(ctx context.Context, r removal) (turn, bool) {
	t.health.Stop()
	t.volumes.Stop()
	if !r.confirmed {
		switch gone, leaving, err := t.askServer(ctx); {
		case err != nil:
			if ctx.Err() == nil {
				t.log.Warn("pod not read before the removal of its vm", "err", err)
			}
			return again, false
		case gone:
			t.writer.stop() // the pod's object does not exist any more
		case !leaving:
			t.keep(r)
			return atOnce, false
		}
	}
	if t.static {
		return whenWoken, true
	}
	rec, err := t.findVM(ctx)
	if err != nil {
		if ctx.Err() == nil {
			t.log.Warn("vm not inspected", "err", err)
		}
		return again, false
	}
	if rec == nil {
		return whenWoken, true
	}
	if rec = t.unpause(ctx, rec); ctx.Err() != nil {
		return atOnce, false
	}
	if wait, ok := t.retention.first(ctx, rec); !ok {
		return wait, false
	}
	rec = t.look().rec
	if wait, ok := t.saveFirst(ctx, rec); !ok {
		return wait, false
	}
	if rec.State == vm.StateRunning {
		// No Event is sent, because the pod's object already shows the deletion and is gone a moment later.
		grace := r.grace
		if !podstatus.Up(rec) {
			grace = 0 // the guest is not up, so it cannot shut down
		}
		pod := t.look().pod
		got, err := t.vms.Stop(ctx, string(rec.ID), t.health.PreStop(ctx, pod, rec, grace))
		switch {
		case ctx.Err() != nil:
			return atOnce, false
		case err == nil:
			t.again = false
			t.take(got)
			t.publish(0)
		case !errdefs.IsNotFound(err):
			t.log.Warn("vm not stopped, removing it by force", "vm", rec.ID, "err", err)
		}
	}
	err = t.vms.Remove(ctx, string(rec.ID), true)
	if ctx.Err() != nil {
		return atOnce, false
	}
	if err != nil && !errdefs.IsNotFound(err) {
		t.event(corev1.EventTypeWarning, eventFailedKill, "error killing pod: %s", err)
		t.log.Warn("vm not removed", "vm", rec.ID, "err", err)
		t.Metrics.done("delete", err)
		return again, false
	}
	if t.states != nil && len(rec.SnapshotIDs) > 0 { // the snapshot for forks is of no use without the VM
		t.states.DropFork(ctx, t.vmName)
	}
	t.retention.removed(ctx)
	t.dropTag(ctx)
	t.dropForks(ctx)
	t.Metrics.done("delete", nil)
	t.log.Info("vm removed", "vm", rec.ID)
	return whenWoken, true
}

// unpause lets a paused guest run, so that it can be saved, run its hooks and power off. One that has not run yet is only removed.
func (t *teardown) unpause(ctx context.Context, rec *vm.Record) *vm.Record {
	if rec.State != vm.StateRunning || rec.Paused != vm.PausedOnRequest {
		return rec
	}
	got, err := t.vms.Unpause(ctx, string(rec.ID))
	if err != nil {
		if ctx.Err() == nil {
			t.log.Warn("paused vm not unpaused before its removal", "vm", rec.ID, "err", err)
		}
		return rec
	}
	return t.take(got)
}

// askServer asks the API server whether the pod is gone or is being deleted. A cache may be stale, so it is never a reason to
// remove a VM.
func (t *teardown) askServer(ctx context.Context) (gone, leaving bool, err error) {
	pod, err := t.writer.lookUp(ctx)
	switch {
	case err != nil:
		return false, false, err
	case pod == nil:
		return true, true, nil
	}
	return pod.UID != t.uid, pod.DeletionTimestamp != nil, nil
}

// deletePod writes the last status and then deletes the pod's object, without waiting for the rest of the grace period. It
// retries while the API server does not answer.
func (t *teardown) deletePod(ctx context.Context) {
	defer t.deletions.done(t.uid)
	defer t.writer.stop()
	if t.writer.flush(ctx) != nil || t.writer.lost() {
		return
	}
	_ = pauses.Growing(100*time.Millisecond, 10*time.Second, pauses.Many).DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		err := t.writer.deleteObject(ctx)
		if err != nil && ctx.Err() == nil {
			t.log.Warn("pod not deleted", "err", err)
		}
		return err == nil, nil
	})
}

// dropTag removes the hibernated state of a deleted pod, unless a later pod may need it. The state of a pod stays if the pod
// belongs to a CocoonSet, is managed or hibernates on eviction. The pod's creator removes such a state. The state of a pod that
// hibernates on deletion stays while its owner exists.
func (t *teardown) dropTag(ctx context.Context) {
	pod := t.look().pod
	if !t.slept() || !t.remote() || t.states == nil || contract.AsksSnapshot(pod.Annotations) || contract.ComesBack(pod.Annotations) && !t.retention.gone || contract.KeepSnapshot(pod.Annotations) ||
		convert.Member(pod).Set() != "" {
		return
	}
	t.states.DropTag(ctx)
}

// dropForks removes the snapshots for forks when the pod's VM is gone: the VM's fork state in the registry, and this node's
// fork snapshot of another node's VM, if no fork of that VM is left on this node.
func (t *teardown) dropForks(ctx context.Context) {
	pod := t.look().pod
	if t.states == nil || !t.remote() {
		return
	}
	if contract.OfferFork(pod.Annotations) {
		t.states.DropOffer(ctx)
	}
	main := pod.Annotations[contract.KeyForkFrom]
	if pod.Annotations[contract.KeyForkFromID] == "" || main == "" || t.index.forks(main, t.podState) {
		return
	}
	if _, err := t.known(ctx, main); errdefs.IsNotFound(err) {
		t.states.DropFork(ctx, main)
	}
}

// saveFirst saves the VM of a pod that is being deleted, if the pod's policy requires that. Until the saved state is durable,
// it returns false and when to retry. Meanwhile the VM stays, and the pod is Terminating.
func (t *teardown) saveFirst(ctx context.Context, rec *vm.Record) (turn, bool) {
	if t.states == nil || rec.StartedAt.IsZero() || t.saved == rec.ID {
		return whenWoken, true
	}
	pod := t.look().pod
	give := contract.KeepSnapshot(pod.Annotations) && rec.State == vm.StateHibernated && t.remote() // the registry must have the state before the VM is removed
	if !convert.Saves(pod) && !give {
		return whenWoken, true
	}
	if left := t.saving.left(); left > 0 {
		return after(left), false
	}
	var stage string
	var err error
	if give {
		stage, err = podsnapshots.PushFailed, t.states.PushHibernated(ctx, rec)
	} else {
		stage, err = t.states.SaveAway(ctx, *rec)
	}
	switch {
	case ctx.Err() != nil:
		return atOnce, false
	case err == nil:
		t.saving, t.saved = retryTask{}, rec.ID
		t.log.Info("vm saved before its removal", "vm", rec.ID)
		return whenWoken, true
	}
	t.Metrics.done("save", err)
	if t.saving.failed(err) {
		t.event(corev1.EventTypeWarning, stage, "VM %s cannot be saved, so it is not removed (to give its state up, set the annotation %s to %s): %s",
			rec.Spec.Name, contract.KeySnapshotPolicy, contract.SnapshotNever, err)
		t.log.Warn("vm not saved, so it is not removed", "vm", rec.ID, "op", stage, "err", err)
	}
	return after(t.saving.left()), false
}

// removeOrphan removes a VM whose pod is gone. It saves the VM first if a label of the VM requires that.
func (c *common) removeOrphan(ctx context.Context, rec vm.Record) error {
	t := c.on(ownerOfVM(rec))
	states := c.node.snapshots.States(podsnapshots.Owner{Owner: t.owner, VM: rec.Spec.Name, Log: c.Log})
	if err := c.keepOrphan(ctx, states, rec); err != nil {
		return errdefs.New(errdefs.Unavailable, "VM %s of the deleted pod %s/%s cannot be hibernated, so it is not removed: %w", rec.Spec.Name,
			rec.Spec.Labels[contract.VMLabelPodNamespace], rec.Spec.Labels[contract.VMLabelPodName], err)
	}
	if rec.Spec.Labels[contract.VMLabelSave] == "true" && states != nil && !rec.StartedAt.IsZero() {
		if stage, err := states.SaveAway(ctx, rec); err != nil {
			return errdefs.New(errdefs.Unavailable, "%s: VM %s of the deleted pod %s/%s is not removed: %w", stage, rec.Spec.Name,
				rec.Spec.Labels[contract.VMLabelPodNamespace], rec.Spec.Labels[contract.VMLabelPodName], err)
		}
	}
	err := t.vms.Remove(ctx, string(rec.ID), true)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

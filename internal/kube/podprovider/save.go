package podprovider

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/vm"
)

// saveFirst saves the VM of a pod that is being deleted, if the pod's policy says so. Until the saved state is where it
// outlives the VM, it returns false and when to retry: the VM stays, and the pod is Terminating.
func (t *teardown) saveFirst(ctx context.Context, rec *vm.Record) (turn, bool) {
	if t.states == nil || rec.StartedAt.IsZero() || t.saved == rec.ID {
		return whenWoken, true
	}
	pod := t.look().pod
	give := contract.KeepSnapshot(pod.Annotations) && rec.State == vm.StateHibernated && t.remote() // it gives up its seat
	if !convert.Saves(pod) && !give {
		return whenWoken, true
	}
	if left := t.saving.left(); left > 0 {
		return after(left), false
	}
	var stage string
	var err error
	if give {
		stage, err = podsnapshots.PushFailed, t.states.KeepAsleep(ctx, rec)
	} else {
		stage, err = t.states.SaveAway(ctx, *rec)
	}
	switch {
	case ctx.Err() != nil:
		return atOnce, false
	case err == nil:
		t.saving, t.saved = retryTask{}, rec.ID
		t.log.Info("vm saved before it is removed", "vm", rec.ID)
		return whenWoken, true
	}
	t.metrics.done("save", err)
	if t.saving.failed(err) {
		t.event(corev1.EventTypeWarning, stage, "VM %s is kept until it is saved (to give its state up, set the annotation %s to %s): %s",
			rec.Spec.Name, contract.KeySnapshotPolicy, contract.SnapshotNever, err)
		t.log.Warn("vm not saved, it is kept", "vm", rec.ID, "op", stage, "err", err)
	}
	return after(t.saving.left()), false
}

// removeOrphan removes a VM whose pod is gone. It saves the VM first if the VM's label demands that.
func (c *common) removeOrphan(ctx context.Context, rec vm.Record) error {
	t := c.on(ownerOfVM(rec))
	states := c.node.snapshots.States(podsnapshots.Owner{Owner: t.owner, VM: rec.Spec.Name, Log: c.Log})
	if rec.Spec.Labels[contract.VMLabelSave] == "true" && states != nil && !rec.StartedAt.IsZero() {
		if stage, err := states.SaveAway(ctx, rec); err != nil {
			return errdefs.New(errdefs.Unavailable, "%s: VM %s of the deleted pod %s/%s is kept: %w", stage, rec.Spec.Name,
				rec.Spec.Labels[contract.VMLabelPodNamespace], rec.Spec.Labels[contract.VMLabelPodName], err)
		}
	}
	err := t.vms.Remove(ctx, string(rec.ID), true)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

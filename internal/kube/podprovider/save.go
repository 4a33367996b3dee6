package podprovider

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// saveFirst saves the VM of a pod that is being deleted, if the pod's policy says so. Until the saved state is where it
// outlives the VM, it returns false and when to retry: the VM stays, and the pod is Terminating.
func (w *worker) saveFirst(ctx context.Context, rec *vm.Record) (turn, bool) {
	if w.snaps == nil || rec.StartedAt.IsZero() || w.saved == rec.ID {
		return whenWoken, true
	}
	pod, _, _ := w.look()
	give := contract.KeepSnapshot(pod.Annotations) && rec.State == vm.StateHibernated && w.p.remote() // it gives up its seat
	if !convert.Saves(pod) && !give {
		return whenWoken, true
	}
	if left := w.saving.left(); left > 0 {
		return after(left), false
	}
	var stage string
	var err error
	if give {
		stage, err = eventPushFailed, w.keepAsleep(ctx, w.vmName, rec)
	} else {
		stage, err = w.saveAway(ctx, *rec)
	}
	switch {
	case ctx.Err() != nil:
		return atOnce, false
	case err == nil:
		w.saving, w.saved = retryTask{}, rec.ID
		w.log.Info("vm saved before it is removed", "vm", rec.ID)
		return whenWoken, true
	}
	w.p.Metrics.done("save", err)
	if w.saving.failed(err) {
		w.event(corev1.EventTypeWarning, stage, "VM %s is kept until it is saved (to give its state up, set the annotation %s to %s): %s",
			rec.Spec.Name, contract.KeySnapshotPolicy, contract.SnapshotNever, err)
		w.log.Warn("vm not saved, it is kept", "vm", rec.ID, "op", stage, "err", err)
	}
	return after(w.saving.left()), false
}

// saveAway stores the state of rec where it outlives the VM: in the registry as name:latest or, on a node without a
// registry, in a snapshot of that name. On failure it returns the failed step, as the reason for an Event. It can be
// repeated: each call saves the current state, and removes what an earlier attempt left once the new state is safe.
func (t tenant) saveAway(ctx context.Context, rec vm.Record) (stage string, err error) {
	ref := contract.SnapshotRef{Repo: rec.Spec.Name, Tag: contract.DefaultSnapshotTag}
	at := t.ref(ref.Repo, ref.Tag)
	if t.p.remote() {
		if err := t.registry.CheckRegistry(ctx, at, t.p.cfg.Registry.Auth); err != nil {
			return eventPushFailed, err
		}
	}
	if rec.State == vm.StateHibernated {
		if t.p.remote() { // its hibernation snapshot is its state
			return eventPushFailed, t.push(ctx, rec.Snapshot, at)
		}
		if rec, err = t.states.Wake(ctx, string(rec.ID)); err != nil { // its hibernation snapshot is removed with it
			return eventSaveFailed, err
		}
	}
	snap, old, err := t.saveLatest(ctx, rec, ref)
	if err != nil {
		return eventSaveFailed, err
	}
	if t.p.remote() {
		if err := t.push(ctx, snap.ID, at); err != nil {
			return eventPushFailed, err
		}
		t.discard(ctx, snap.ID)
	}
	if old.ID != "" && ours(old) {
		t.discard(ctx, old.ID)
	}
	return "", nil
}

// saveLatest saves rec under one of the two names of its latest snapshot, so that an older one exists until the new one
// does. It returns that older one, if it exists.
func (t tenant) saveLatest(ctx context.Context, rec vm.Record, ref contract.SnapshotRef) (snap, old snapshot.Snapshot, err error) {
	names := ref.Locals()
	var have [2]snapshot.Snapshot
	for i, name := range names {
		if have[i], err = t.findSnapshot(ctx, name); err != nil && !errdefs.IsNotFound(err) {
			return snap, old, err
		}
	}
	free := 0
	switch {
	case have[0].ID == "":
	case have[1].ID == "":
		free = 1
	case have[1].CreatedAt.Before(have[0].CreatedAt):
		free = 1
		fallthrough
	default: // both names are taken: a crash left the older snapshot
		if !ours(have[free]) {
			return snap, old, errdefs.Existsf("the snapshots %s and %s are not the node's own and have the names that it needs; rename or remove one", names[0], names[1])
		}
		if err := t.snaps.RemoveSnapshot(ctx, have[free].ID); err != nil && !errdefs.IsNotFound(err) {
			return snap, old, err
		}
	}
	snap, err = t.save(ctx, rec, names[free], "before it was deleted")
	return snap, have[1-free], err
}

// ours reports whether a virtual node took the snapshot, and so may remove it.
func ours(s snapshot.Snapshot) bool { return s.Labels[contract.VMLabelNode] != "" }

// removeOrphan removes a VM whose pod is gone. It saves the VM first if the VM's label demands that.
func (p *Provider) removeOrphan(ctx context.Context, rec vm.Record) error {
	t := p.on(ownerOfVM(rec))
	if rec.Spec.Labels[contract.VMLabelSave] == "true" && t.snaps != nil && !rec.StartedAt.IsZero() {
		if stage, err := t.saveAway(ctx, rec); err != nil {
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

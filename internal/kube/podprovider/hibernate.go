package podprovider

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file handles the one update that a pod's VM supports: hibernate and wake up. Each step depends only on the record,
// the registry and the pod, so that the next process can continue wherever an earlier one was killed.

// keepRunning keeps a running VM. Unless it is to be hibernated, it also removes what an earlier hibernation left, and
// offers the VM's state to forks.
func (w *worker) keepRunning(ctx context.Context, s sight) turn {
	if contract.Hibernate(s.pod.Annotations) && w.snaps != nil {
		w.running(ctx, s.pod, s.rec)
		return whenWoken
	}
	w.dozing = retryTask{}
	var wait turn
	if podstatus.Up(s.rec) && itself(s.rec, s.answers) {
		wait = sooner(w.tidyUp(ctx, s.rec), w.offer(s.pod, s.rec))
	}
	w.running(ctx, s.pod, s.rec)
	return sooner(wait, w.hintAfter(s.rec))
}

// fallAsleep hibernates rec, unless the registry cannot take the state.
func (w *worker) fallAsleep(ctx context.Context, rec *vm.Record) turn {
	w.setLife(contract.LifecycleHibernating, w.dozing.cause)
	w.publish(0)
	if err := w.writer.flush(ctx); err != nil { // this tells the next process that a tag may exist
		return atOnce
	}
	if w.p.remote() {
		ref := w.ref(w.vmName, contract.HibernateSnapshotTag)
		if err := w.registry.CheckRegistry(ctx, ref, w.p.cfg.Registry.Auth); err != nil {
			return w.notAsleep(ctx, eventHibernateFailed, err)
		}
	}
	w.stopKeeper()
	began := time.Now()
	got, err := w.hibernate(ctx, rec)
	if ctx.Err() != nil {
		return atOnce
	}
	w.p.Metrics.done("hibernate", err)
	if err != nil {
		return w.notAsleep(ctx, eventHibernateFailed, err)
	}
	w.p.Metrics.save.Observe(time.Since(began).Seconds())
	w.health.Stop()
	w.take(got)
	return atOnce
}

// hibernate tells the engine to hibernate rec. If an earlier hibernation left a snapshot of that name, it is replaced.
func (w *worker) hibernate(ctx context.Context, rec *vm.Record) (vm.Record, error) {
	name := hibernateName(w.vmName)
	got, err := w.states.Hibernate(ctx, string(rec.ID), name)
	if !errdefs.IsAlreadyExists(err) {
		return got, err
	}
	if err := w.snaps.RemoveSnapshot(ctx, name); err != nil && !errdefs.IsNotFound(err) {
		return got, err
	}
	return w.states.Hibernate(ctx, string(rec.ID), name)
}

// notAsleep reports why the VM is not hibernated as it should be, and returns when to retry.
func (w *worker) notAsleep(ctx context.Context, reason string, err error) turn {
	if ctx.Err() != nil {
		return atOnce
	}
	if w.dozing.failed(err) {
		w.event(corev1.EventTypeWarning, reason, "VM %s is not hibernated: %s", w.vmName, err)
		w.log.Warn("vm not hibernated", "op", reason, "err", err)
	}
	w.setLife(contract.LifecycleHibernating, err.Error())
	w.publish(0)
	return atOnce // the next step keeps the VM as it is and knows how long to wait
}

// store makes sure that the state of a hibernated VM is stored where it should be. If that is not possible, it wakes the
// VM.
func (w *worker) store(ctx context.Context, rec *vm.Record) turn {
	err := w.keepAsleep(ctx, w.vmName, rec)
	switch {
	case ctx.Err() != nil:
		return atOnce
	case err == nil:
		return w.sleeps(rec.Snapshot)
	case w.life.State == contract.LifecycleHibernated: // the state was stored before; only now it cannot be checked
		w.dozing.failed(err)
		w.log.Warn("registry not asked for hibernated vm", "vm", rec.ID, "err", err)
		w.publish(0)
		return after(w.dozing.left())
	}
	w.notAsleep(ctx, eventHibernatePushFailed, err)
	got, err := w.states.Wake(ctx, string(rec.ID)) // wake the VM here: its hibernated state is not stored elsewhere
	if ctx.Err() != nil {
		return atOnce
	}
	if err != nil {
		w.log.Warn("vm stays asleep", "vm", rec.ID, "err", err)
		return after(w.dozing.left())
	}
	w.taken(got)
	return atOnce
}

// sleeps records that the VM is hibernated and its state is where it should be. snap is "" when it is in the registry
// only.
func (w *worker) sleeps(snap string) turn {
	if w.life.State != contract.LifecycleHibernated {
		w.event(corev1.EventTypeNormal, eventHibernated, "VM %s is hibernated", w.vmName)
		w.log.Info("vm hibernated", "snapshot", snap)
	}
	w.dozing, w.kept = retryTask{}, snap
	w.setLife(contract.LifecycleHibernated, "")
	w.publish(0)
	return whenWoken
}

// keepAsleep makes sure that rec's hibernation snapshot is in the registry, if the node has one.
func (t tenant) keepAsleep(ctx context.Context, vmName string, rec *vm.Record) error {
	if !t.p.remote() {
		return nil
	}
	snap, err := t.snaps.GetSnapshot(ctx, rec.Snapshot)
	if err != nil {
		return err
	}
	ref := t.ref(vmName, contract.HibernateSnapshotTag)
	if snap.Digest != "" { // pushed by this process or an earlier one
		err := t.has(ctx, ref, snap.Digest)
		if !errdefs.IsNotFound(err) && !errdefs.Is(err, errdefs.DataLoss) {
			return err
		}
	}
	if err := t.push(ctx, snap.ID, ref); err != nil {
		return err
	}
	t.dropOld(ctx, vmName, contract.HibernateSnapshotTag, snap.Digest)
	return nil
}

// wakeLocal resumes the VM from its hibernation snapshot on this node or, if that is damaged, from the registry.
func (w *worker) wakeLocal(ctx context.Context, rec *vm.Record) turn {
	if snap, err := w.snaps.GetSnapshot(ctx, rec.Snapshot); err == nil {
		w.slept = snap.Digest
	}
	got, err := w.states.Wake(ctx, string(rec.ID))
	if ctx.Err() != nil {
		return atOnce
	}
	w.p.Metrics.done("wake", err)
	if err == nil {
		w.event(corev1.EventTypeNormal, eventWoken, "VM %s goes on where it was", w.vmName)
		w.waking, w.dozing, w.kept = retryTask{}, retryTask{}, ""
		w.taken(got)
		return atOnce
	}
	if errdefs.Is(err, errdefs.DataLoss) && w.p.remote() {
		if err = w.replace(ctx, rec, err); err == nil {
			return atOnce
		}
	}
	return w.notAwake(ctx, err)
}

func (w *worker) notAwake(ctx context.Context, err error) turn {
	if ctx.Err() != nil {
		return atOnce
	}
	if w.waking.failed(err) {
		reason := eventWakeFailed
		if errdefs.Is(err, errdefs.DataLoss) {
			reason = eventDataLoss
		}
		w.event(corev1.EventTypeWarning, reason, "VM %s is not awake: %s", w.vmName, err)
		w.log.Warn("vm not woken", "err", err)
	}
	w.setLife(w.life.State, err.Error())
	w.publish(0)
	return after(w.waking.left())
}

// taken records got as our VM without announcing that it runs.
func (w *worker) taken(got vm.Record) {
	w.told = got.StartedAt
	w.take(got)
}

// replace gives up a VM whose local state is damaged, in favor of the state in the registry, but only once that is here
// and intact.
func (w *worker) replace(ctx context.Context, rec *vm.Record, cause error) error {
	at, err := w.where(ctx, w.vmName, contract.HibernateSnapshotTag)
	if err != nil {
		return errdefs.New(errdefs.DataLoss, "%w (and the registry: %v)", cause, err)
	}
	if _, err := w.imported(ctx, at); err != nil {
		return err
	}
	w.log.Warn("hibernated vm is replaced by what the registry has of it", "vm", rec.ID, "err", cause)
	if err := w.vms.Remove(ctx, string(rec.ID), true); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	w.forget()
	return nil
}

// dropTag removes the hibernated state of a deleted pod if nobody will ask for it. A pod that belongs to a CocoonSet, is
// managed, or was to be hibernated on eviction may come back for its state; otherwise its creator removes the state.
func (w *worker) dropTag(ctx context.Context) {
	pod, _, _ := w.look()
	slept := w.life.State == contract.LifecycleHibernating || w.life.State == contract.LifecycleHibernated
	if !slept || !w.p.remote() || w.snaps == nil || contract.AsksSnapshot(pod.Annotations) || contract.ComesBack(pod.Annotations) || contract.KeepSnapshot(pod.Annotations) ||
		convert.Member(pod).Set() != "" {
		return
	}
	ref := w.ref(w.vmName, contract.HibernateSnapshotTag)
	if err := w.registry.DeleteTag(ctx, ref, w.p.cfg.Registry.Auth); err != nil && ctx.Err() == nil {
		w.log.Warn("hibernated state of deleted pod stays in the registry", "op", ref, "err", err)
	}
}

// elsewhere finds out whether the VM, which is not on this node, is hibernated in the registry or on a peer. Only managed
// VMs, VMs that hibernate on eviction, and VMs that are told to hibernate or to be restored can be. The place is zero when
// only a peer could know.
func (w *worker) elsewhere(ctx context.Context, pod *corev1.Pod) (at place, sleeps bool, err error) {
	must := contract.RestoreFromHibernate(pod.Annotations) || w.life.State == contract.LifecycleHibernated
	if w.snaps == nil || !must && !contract.ComesBack(pod.Annotations) && !contract.Hibernate(pod.Annotations) {
		return at, false, nil
	}
	if !w.p.remote() {
		if must && len(w.p.cfg.Registry.Peers) == 0 {
			err = errdefs.Preconditionf("VM %s is to be restored, but the node has neither a registry (EPOCH_URL) nor peers (VK_PEERS)", w.vmName)
		}
		return at, must, err
	}
	at, err = w.where(ctx, w.vmName, contract.HibernateSnapshotTag)
	if err == nil && at.old { // the snapshot itself says whose it is
		_, err = w.imported(ctx, at)
	}
	switch {
	case errdefs.IsNotFound(err) && must:
		return at, true, errdefs.NotFoundf("VM %s is to be restored, but the registry has no hibernated state of it", w.vmName)
	case errdefs.IsNotFound(err):
		return at, false, nil
	case err != nil: // a fresh boot would take the place of the hibernated VM
		return at, false, errdefs.New(errdefs.ClassOf(err), "ask the registry whether VM %s is hibernated: %w", w.vmName, err)
	}
	return at, true, nil
}

// wakeRemote resumes a VM that is hibernated elsewhere. It gets the name, and so the addresses, that it had.
func (w *worker) wakeRemote(ctx context.Context, pod *corev1.Pod, at place) turn {
	w.publish(w.p.cfg.Settle)
	if w.launched.IsZero() {
		w.launched = time.Now()
	}
	rec, err := w.cloneOnce(ctx, pod, func() (vm.CloneSpec, error) {
		spec := convert.Clone(pod, w.p.cfg.Node)
		snap, err := w.imported(ctx, at)
		spec.Snapshot = snap.ID
		return spec, err
	})
	if err == nil {
		w.restored = true
		w.health.Keep(pod, &rec) // for the guest this is not a new start
		w.event(corev1.EventTypeNormal, eventWoken, "VM %s goes on where it was", w.vmName)
	}
	return w.cloned(ctx, rec, err)
}

// imported returns the VM's hibernated state as a snapshot on this node: what an earlier attempt imported, else a peer's,
// else the registry's. If at has a digest, the snapshot must have that digest.
func (w *worker) imported(ctx context.Context, at place) (snapshot.Snapshot, error) {
	pod, _, _ := w.look()
	name, ref := importName(w.vmName), contract.SnapshotRef{Repo: w.vmName, Tag: contract.HibernateSnapshotTag}
	fits := func(s snapshot.Snapshot) bool { return at.digest == "" || s.Digest == at.digest }
	have, err := w.findSnapshot(ctx, name)
	switch {
	case err == nil && fits(have):
		return have, nil
	case err == nil:
		if err := w.snaps.RemoveSnapshot(ctx, have.ID); err != nil && !errdefs.IsNotFound(err) {
			return have, err
		}
	case !errdefs.IsNotFound(err):
		return have, err
	}
	if at.old {
		return w.fetchOld(ctx, at, name, pod.Name, ref)
	}
	if got, err := w.fromPeer(ctx, name, fits); err == nil || ctx.Err() != nil {
		return got, err
	}
	if !w.p.remote() {
		return have, errdefs.NotFoundf("no peer has the hibernated state of VM %s", w.vmName)
	}
	got, err := w.fetchSnapshot(ctx, at.ref, name)
	switch {
	case err != nil:
		return got, err
	case !fits(got):
		w.discard(ctx, got.ID)
		return got, errdefs.Unavailablef("the hibernated state of VM %s in the registry changed while it was fetched", w.vmName)
	}
	return got, nil
}

// fromPeer fetches the VM's hibernated state from the first peer that has a matching one. Errors: NotFound.
func (w *worker) fromPeer(ctx context.Context, name string, fits func(snapshot.Snapshot) bool) (got snapshot.Snapshot, err error) {
	for _, peer := range w.p.cfg.Registry.Peers {
		for _, alias := range contract.Aliases(w.owner.Namespace, w.vmName) { // an earlier release used another name
			got, err = w.pullSnapshot(ctx, snapshot.PeerScheme+peer+"/"+hibernateName(alias), name)
			switch {
			case ctx.Err() != nil:
				return got, ctx.Err()
			case err == nil && fits(got):
				return got, nil
			case err == nil:
				w.discard(ctx, got.ID) // of another hibernation
			case !errdefs.IsNotFound(err):
				w.log.Warn("peer not asked for hibernated vm", "op", peer, "err", err)
			}
		}
	}
	return got, errdefs.NotFoundf("no peer has the hibernated state of VM %s", w.vmName)
}

// tidyUp removes what a hibernation left, once the VM is awake: the tag in the registry, from which a later VM of that
// name would resume, and what was imported here. It returns when to retry, whenWoken when nothing is left.
func (w *worker) tidyUp(ctx context.Context, rec *vm.Record) turn {
	if w.tidy || w.snaps == nil {
		return whenWoken
	}
	if left := w.tidying.left(); left > 0 {
		return after(left)
	}
	slept := w.restored || w.life.State == contract.LifecycleHibernating || w.life.State == contract.LifecycleHibernated
	left, err := snapshot.Snapshot{}, error(nil)
	if rec.Snapshot != "" && w.life.State != contract.LifecycleReady {
		left, err = w.findSnapshot(ctx, importName(w.vmName))
		slept = slept || err == nil
	}
	if err == nil || errdefs.IsNotFound(err) {
		err = nil
		if slept && w.p.remote() {
			err = w.registry.DeleteTag(ctx, w.ref(w.vmName, contract.HibernateSnapshotTag), w.p.cfg.Registry.Auth)
			for _, digest := range w.olds(left) {
				w.dropOld(ctx, w.vmName, contract.HibernateSnapshotTag, digest)
			}
		}
	}
	if ctx.Err() != nil {
		return atOnce
	}
	if err != nil {
		if w.tidying.failed(err) {
			w.event(corev1.EventTypeWarning, eventTagLeft, "VM %s is awake, but its hibernated state is still in the registry: %s", w.vmName, err)
		}
		return after(w.tidying.left())
	}
	if left.ID != "" {
		w.discard(ctx, left.ID)
	}
	w.tidy, w.restored, w.slept, w.tidying = true, false, "", retryTask{}
	return whenWoken
}

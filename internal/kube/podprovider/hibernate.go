package podprovider

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file handles the one update that a pod's VM supports: hibernate and wake up. Each step depends only on the record,
// the registry and the pod, so that the next process can continue wherever an earlier one was killed.

// keepRunning keeps a running VM. Unless it is to be hibernated, it also removes what an earlier hibernation left, and
// offers the VM's state to forks.
func (w *worker) keepRunning(ctx context.Context, s sight) turn {
	if contract.Hibernate(s.pod.Annotations) && w.states != nil {
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
	if err := w.states.Check(ctx); err != nil {
		return w.notAsleep(ctx, eventHibernateFailed, err)
	}
	w.stopKeeper()
	got, err := w.states.Hibernate(ctx, rec)
	if ctx.Err() != nil {
		return atOnce
	}
	w.p.Metrics.done("hibernate", err)
	if err != nil {
		return w.notAsleep(ctx, eventHibernateFailed, err)
	}
	w.health.Stop()
	w.take(got)
	return atOnce
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
	err := w.states.KeepAsleep(ctx, rec)
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
	got, err := w.states.WakeAgain(ctx, rec) // wake the VM here: its hibernated state is not stored elsewhere
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

// wakeLocal resumes the VM from its hibernation snapshot on this node or, if that is damaged, from the registry.
func (w *worker) wakeLocal(ctx context.Context, rec *vm.Record) turn {
	got, err := w.states.Wake(ctx, rec)
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
	if err := w.states.Recover(ctx, cause); err != nil {
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
	if !slept || !w.p.remote() || w.states == nil || contract.AsksSnapshot(pod.Annotations) || contract.ComesBack(pod.Annotations) || contract.KeepSnapshot(pod.Annotations) ||
		convert.Member(pod).Set() != "" {
		return
	}
	w.states.DropTag(ctx)
}

// elsewhere finds out whether the VM, which is not on this node, is hibernated in the registry or on a peer. Only managed
// VMs, VMs that hibernate on eviction, and VMs that are told to hibernate or to be restored can be.
func (w *worker) elsewhere(ctx context.Context, pod *corev1.Pod) (at podsnapshots.Place, sleeps bool, err error) {
	must := contract.RestoreFromHibernate(pod.Annotations) || w.life.State == contract.LifecycleHibernated
	if w.states == nil || !must && !contract.ComesBack(pod.Annotations) && !contract.Hibernate(pod.Annotations) {
		return at, false, nil
	}
	return w.states.Elsewhere(ctx, must)
}

// wakeRemote resumes a VM that is hibernated elsewhere. It gets the name, and so the addresses, that it had.
func (w *worker) wakeRemote(ctx context.Context, pod *corev1.Pod, at podsnapshots.Place) turn {
	w.publish(w.p.cfg.Settle)
	if w.launched.IsZero() {
		w.launched = time.Now()
	}
	rec, err := w.cloneOnce(ctx, pod, func() (vm.CloneSpec, error) {
		spec := convert.Clone(pod, w.p.cfg.Node)
		snap, err := w.states.Import(ctx, at)
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

// tidyUp removes what a hibernation left, once the VM is awake: the tag in the registry, from which a later VM of that
// name would resume, and what was imported here. It returns when to retry, whenWoken when nothing is left.
func (w *worker) tidyUp(ctx context.Context, rec *vm.Record) turn {
	if w.tidy || w.states == nil {
		return whenWoken
	}
	if left := w.tidying.left(); left > 0 {
		return after(left)
	}
	slept := w.restored || w.life.State == contract.LifecycleHibernating || w.life.State == contract.LifecycleHibernated
	switch err := w.states.TidyUp(ctx, slept, rec.Snapshot != "" && w.life.State != contract.LifecycleReady); {
	case err == nil:
		w.tidy, w.restored, w.tidying = true, false, retryTask{}
		return whenWoken
	case ctx.Err() != nil:
		return atOnce
	case w.tidying.failed(err):
		w.event(corev1.EventTypeWarning, eventTagLeft, "VM %s is awake, but its hibernated state is still in the registry: %s", w.vmName, err)
	}
	return after(w.tidying.left())
}

// newStates returns the saved states of w's VM; nil when the node keeps no snapshots.
func (w *worker) newStates() *podsnapshots.States {
	pod, _, _ := w.look()
	return w.p.node.snapshots.States(podsnapshots.Owner{
		Owner: w.owner, Pod: pod.Name, VM: w.vmName, Log: w.log,
		Find:     w.known,
		Forkable: func(rec vm.Record) bool { return podstatus.Up(&rec) && itself(&rec, false) },
		// The Events are the same as for an image.
		Pulling: func(from string) func(int64) {
			began := time.Now()
			w.event(corev1.EventTypeNormal, eventPulling, "Pulling snapshot %q", from)
			return func(size int64) {
				w.event(corev1.EventTypeNormal, eventPulled, "Successfully pulled snapshot %q in %s. Snapshot size: %d bytes.",
					from, time.Since(began).Round(time.Millisecond), size)
			}
		},
	})
}

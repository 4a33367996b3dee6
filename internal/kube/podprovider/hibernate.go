package podprovider

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file handles the one update that a pod's VM supports: hibernate and wake up. Each step depends only on the record,
// the registry and the pod, so that the next process can continue wherever an earlier one was killed.

// hibernation puts the pod's VM to sleep and wakes it.
type hibernation struct {
	base
	restored bool   // this process resumed the VM from elsewhere
	kept     string // hibernation snapshot that is known to be stored where it should be
	dozing   retryTask
	waking   retryTask
	tidying  retryTask
}

// fallAsleep hibernates rec, unless the registry cannot take the state.
func (h *hibernation) fallAsleep(ctx context.Context, rec *vm.Record) turn {
	h.setLife(contract.LifecycleHibernating, h.dozing.cause)
	h.publish(0)
	if err := h.writer.flush(ctx); err != nil { // this tells the next process that a tag may exist
		return atOnce
	}
	if err := h.states.Check(ctx); err != nil {
		return h.notAsleep(ctx, eventHibernateFailed, err)
	}
	h.volumes.Stop()
	got, err := h.states.Hibernate(ctx, rec)
	if ctx.Err() != nil {
		return atOnce
	}
	h.Metrics.done("hibernate", err)
	if err != nil {
		return h.notAsleep(ctx, eventHibernateFailed, err)
	}
	h.health.Stop()
	h.take(got)
	return atOnce
}

// notAsleep reports why the VM is not hibernated as it should be, and returns when to retry.
func (h *hibernation) notAsleep(ctx context.Context, reason string, err error) turn {
	if ctx.Err() != nil {
		return atOnce
	}
	if h.dozing.failed(err) {
		h.event(corev1.EventTypeWarning, reason, "VM %s is not hibernated: %s", h.vmName, err)
		h.log.Warn("vm not hibernated", "op", reason, "err", err)
	}
	h.setLife(contract.LifecycleHibernating, err.Error())
	h.publish(0)
	return atOnce // the next step keeps the VM as it is and knows how long to wait
}

// store makes sure that the state of a hibernated VM is stored where it should be. If that is not possible, it wakes the
// VM.
func (h *hibernation) store(ctx context.Context, rec *vm.Record) turn {
	err := h.states.KeepAsleep(ctx, rec)
	switch {
	case ctx.Err() != nil:
		return atOnce
	case err == nil:
		return h.sleeps(rec.Snapshot)
	case h.life.State == contract.LifecycleHibernated: // the state was stored before; only now it cannot be checked
		h.dozing.failed(err)
		h.log.Warn("registry does not answer for hibernated vm", "vm", rec.ID, "err", err)
		h.publish(0)
		return after(h.dozing.left())
	}
	h.notAsleep(ctx, eventHibernatePushFailed, err)
	got, err := h.states.WakeAgain(ctx, rec) // wake the VM here: its hibernated state is not stored elsewhere
	if ctx.Err() != nil {
		return atOnce
	}
	if err != nil {
		h.log.Warn("vm not woken, it stays hibernated", "vm", rec.ID, "err", err)
		return after(h.dozing.left())
	}
	h.taken(got)
	return atOnce
}

// sleeps records that the VM is hibernated and its state is where it should be. snap is "" when it is in the registry
// only.
func (h *hibernation) sleeps(snap string) turn {
	if h.life.State != contract.LifecycleHibernated {
		h.event(corev1.EventTypeNormal, eventHibernated, "VM %s is hibernated", h.vmName)
		h.log.Info("vm hibernated", "snapshot", snap)
	}
	h.dozing, h.kept = retryTask{}, snap
	h.setLife(contract.LifecycleHibernated, "")
	h.publish(0)
	return whenWoken
}

// wakeLocal resumes the VM from its hibernation snapshot on this node or, if that is damaged, from the registry.
func (h *hibernation) wakeLocal(ctx context.Context, rec *vm.Record) turn {
	got, err := h.states.Wake(ctx, rec)
	if ctx.Err() != nil {
		return atOnce
	}
	h.Metrics.done("wake", err)
	if err == nil {
		h.event(corev1.EventTypeNormal, eventWoken, "VM %s is awake", h.vmName)
		h.waking, h.dozing, h.kept = retryTask{}, retryTask{}, ""
		h.taken(got)
		return atOnce
	}
	if errdefs.Is(err, errdefs.DataLoss) && h.remote() {
		if err = h.replace(ctx, rec, err); err == nil {
			return atOnce
		}
	}
	return h.notAwake(ctx, err)
}

func (h *hibernation) notAwake(ctx context.Context, err error) turn {
	if ctx.Err() != nil {
		return atOnce
	}
	if h.waking.failed(err) {
		reason := eventWakeFailed
		if errdefs.Is(err, errdefs.DataLoss) {
			reason = eventDataLoss
		}
		h.event(corev1.EventTypeWarning, reason, "VM %s not woken: %s", h.vmName, err)
		h.log.Warn("vm not woken", "err", err)
	}
	h.setLife(h.life.State, err.Error())
	h.publish(0)
	return after(h.waking.left())
}

// taken records got as our VM without announcing that it runs.
func (h *hibernation) taken(got vm.Record) {
	h.told = got.StartedAt
	h.take(got)
}

// replace gives up a VM whose local state is damaged, in favor of the state in the registry, but only once that is here
// and intact.
func (h *hibernation) replace(ctx context.Context, rec *vm.Record, cause error) error {
	if err := h.states.Recover(ctx, cause); err != nil {
		return err
	}
	h.log.Warn("hibernated vm is damaged, its state from the registry replaces it", "vm", rec.ID, "err", cause)
	if err := h.vms.Remove(ctx, string(rec.ID), true); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	h.forget()
	return nil
}

// elsewhere finds out whether the VM, which is not on this node, is hibernated in the registry or on a peer. Only managed
// VMs, VMs that hibernate on eviction, and VMs that are told to hibernate or to be restored can be.
func (h *hibernation) elsewhere(ctx context.Context, pod *corev1.Pod) (at podsnapshots.Place, sleeps bool, err error) {
	must := contract.RestoreFromHibernate(pod.Annotations) || h.life.State == contract.LifecycleHibernated
	if h.states == nil || !must && !contract.ComesBack(pod.Annotations) && !contract.Hibernate(pod.Annotations) {
		return at, false, nil
	}
	return h.states.Elsewhere(ctx, must)
}

// tidyUp removes what a hibernation left, once the VM is awake: the tag in the registry, from which a later VM of that
// name would resume, and what was imported here. It returns when to retry, whenWoken when nothing is left.
func (h *hibernation) tidyUp(ctx context.Context, rec *vm.Record) turn {
	if h.tidy || h.states == nil {
		return whenWoken
	}
	if left := h.tidying.left(); left > 0 {
		return after(left)
	}
	switch err := h.states.TidyUp(ctx, h.restored || h.slept(), rec.Snapshot != "" && h.life.State != contract.LifecycleReady); {
	case err == nil:
		h.tidy, h.restored, h.tidying = true, false, retryTask{}
		return whenWoken
	case ctx.Err() != nil:
		return atOnce
	case h.tidying.failed(err):
		h.event(corev1.EventTypeWarning, eventTagLeft, "VM %s is awake, but its hibernated state is still in the registry: %s", h.vmName, err)
	}
	return after(h.tidying.left())
}

package podprovider

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/podsnapshots"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file hibernates and wakes the pod's VM. Each step depends only on the record, the registry and the pod, so that the
// next process can continue at the step at which an earlier process was killed.

// hibernation hibernates and wakes the pod's VM.
type hibernation struct {
	base
	restored    bool   // this process resumed the VM from elsewhere
	kept        string // hibernation snapshot whose state is known to be stored
	hibernating retryTask
	waking      retryTask
	tidying     retryTask
}

// hibernate hibernates rec, unless the registry does not accept the state.
func (h *hibernation) hibernate(ctx context.Context, rec *vm.Record) turn {
	h.setLife(contract.LifecycleHibernating, h.hibernating.cause)
	h.publish(0)
	if err := h.writer.flush(ctx); err != nil { // the written state tells the next process that a tag may exist
		return atOnce
	}
	if err := h.states.Check(ctx); err != nil {
		return h.hibernateFailed(ctx, eventHibernateFailed, err)
	}
	h.volumes.Stop()
	got, err := h.states.Hibernate(ctx, rec)
	if ctx.Err() != nil {
		return atOnce
	}
	h.Metrics.done("hibernate", err)
	if err != nil {
		return h.hibernateFailed(ctx, eventHibernateFailed, err)
	}
	h.health.Stop()
	h.take(got)
	return atOnce
}

// hibernateFailed reports why the VM is not hibernated, and returns when to retry.
func (h *hibernation) hibernateFailed(ctx context.Context, reason string, err error) turn {
	if ctx.Err() != nil {
		return atOnce
	}
	if h.hibernating.failed(err) {
		h.event(corev1.EventTypeWarning, reason, "VM %s cannot be hibernated; the node retries: %s", h.vmName, err)
		h.log.Warn("vm not hibernated", "op", reason, "err", err)
	}
	h.setLife(contract.LifecycleHibernating, err.Error())
	h.publish(0)
	return atOnce // the next step waits until the retry is due
}

// store makes sure that the state of a hibernated VM is in the registry, if the node has one. If that is not possible, it
// wakes the VM.
func (h *hibernation) store(ctx context.Context, rec *vm.Record) turn {
	err := h.states.PushHibernated(ctx, rec)
	switch {
	case ctx.Err() != nil:
		return atOnce
	case err == nil:
		return h.recordHibernated(rec.Snapshot)
	case h.life.State == contract.LifecycleHibernated: // the state is stored already; only the check fails
		h.hibernating.failed(err)
		h.log.Warn("hibernated state not checked in the registry", "vm", rec.ID, "err", err)
		h.publish(0)
		return after(h.hibernating.left())
	}
	h.hibernateFailed(ctx, eventHibernatePushFailed, err)
	got, err := h.states.WakeAgain(ctx, rec) // wake the VM, because its state is only on this node
	if ctx.Err() != nil {
		return atOnce
	}
	if err != nil {
		h.log.Warn("vm not woken, it stays hibernated", "vm", rec.ID, "err", err)
		return after(h.hibernating.left())
	}
	h.taken(got)
	return atOnce
}

// recordHibernated records that the VM is hibernated and its state is stored. snap is "" if the state is only in the registry.
func (h *hibernation) recordHibernated(snap string) turn {
	if h.life.State != contract.LifecycleHibernated {
		h.event(corev1.EventTypeNormal, eventHibernated, "VM %s is hibernated", h.vmName)
		h.log.Info("vm hibernated", "snapshot", snap)
	}
	h.hibernating, h.kept = retryTask{}, snap
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
		h.waking, h.hibernating, h.kept = retryTask{}, retryTask{}, ""
		h.taken(got)
		return atOnce
	}
	if errdefs.Is(err, errdefs.DataLoss) && h.remote() {
		if err = h.replace(ctx, rec, err); err == nil {
			return atOnce
		}
	}
	return h.wakeFailed(ctx, err)
}

func (h *hibernation) wakeFailed(ctx context.Context, err error) turn {
	if ctx.Err() != nil {
		return atOnce
	}
	if h.waking.failed(err) {
		reason := eventWakeFailed
		if errdefs.Is(err, errdefs.DataLoss) {
			reason = eventDataLoss
		}
		h.event(corev1.EventTypeWarning, reason, "VM %s cannot be woken; the node retries: %s", h.vmName, err)
		h.log.Warn("vm not woken", "err", err)
	}
	h.setLife(h.life.State, err.Error())
	h.publish(0)
	return after(h.waking.left())
}

// taken records got as the pod's VM, without an Event that the VM has started.
func (h *hibernation) taken(got vm.Record) {
	h.told = got.StartedAt
	h.take(got)
}

// replace removes a VM whose local state is damaged. Before that, it fetches the state from the registry and verifies it.
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

// elsewhere looks up the hibernated state of the VM, which is not on this node, in the registry or on a peer. Only managed
// VMs, VMs that hibernate on eviction, and VMs that are told to hibernate or to be restored can have such a state.
func (h *hibernation) elsewhere(ctx context.Context, pod *corev1.Pod) (at podsnapshots.Place, sleeps bool, err error) {
	must := contract.RestoreFromHibernate(pod.Annotations) || h.life.State == contract.LifecycleHibernated
	if h.states == nil || !must && !contract.ComesBack(pod.Annotations) && !contract.Hibernate(pod.Annotations) {
		return at, false, nil
	}
	return h.states.FindHibernated(ctx, must)
}

// tidyUp removes what a hibernation left, when the VM is awake: the tag in the registry, from which a later VM of that name
// would resume, and the imported snapshot. It returns when to retry, or whenWoken when nothing is left.
func (h *hibernation) tidyUp(ctx context.Context, pod *corev1.Pod, rec *vm.Record) turn {
	if h.tidy || h.states == nil {
		return whenWoken
	}
	if left := h.tidying.left(); left > 0 {
		return after(left)
	}
	imported := rec.Snapshot != "" && (h.life.State != contract.LifecycleReady || contract.HibernatesOnDelete(pod.Annotations))
	switch err := h.states.TidyUp(ctx, h.restored || h.slept(), imported); {
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

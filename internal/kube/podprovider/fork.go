package podprovider

import (
	"context"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// offer pushes the snapshot for forks of rec to the registry, if the pod says that forks on other nodes wait for it. The
// push runs in parallel to the worker's steps. offer returns when to try again.
func (w *worker) offer(pod *corev1.Pod, rec *vm.Record) turn {
	if !contract.OfferFork(pod.Annotations) || w.states == nil || !w.p.remote() {
		return whenWoken
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.offers == rec.ID {
		return whenWoken
	}
	if left := w.offering.left(); left > 0 {
		return after(left)
	}
	w.offers = rec.ID
	w.background(func(ctx context.Context) {
		err := w.states.Offer(ctx, pod)
		if ctx.Err() == nil && w.hasOffered(err) {
			w.event(corev1.EventTypeWarning, eventForkPushFailed, "VM %s cannot be forked on other nodes: %s", w.vmName, err)
			w.log.Warn("state for forks not in the registry", "err", err)
		}
	})
	return whenWoken
}

// hasOffered records how an offer ended, and reports whether it failed for a new reason.
func (w *worker) hasOffered(err error) (news bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		w.offering = retryTask{}
		return false
	}
	w.offers = ""
	w.poke()
	return w.offering.failed(err)
}

// dropForks removes what existed only for forks, once the pod's VM is gone: the VM's fork state in the registry, and this
// node's fork snapshot of another node's VM, if no fork of that VM is left here.
func (w *worker) dropForks(ctx context.Context) {
	pod, _, _ := w.look()
	if w.states == nil || !w.p.remote() {
		return
	}
	if contract.OfferFork(pod.Annotations) {
		w.states.DropOffer(ctx)
	}
	main := pod.Annotations[contract.KeyForkFrom]
	if pod.Annotations[contract.KeyForkFromID] == "" || main == "" || w.p.forks(main, w) {
		return
	}
	if _, err := w.known(ctx, main); errdefs.IsNotFound(err) {
		w.states.DropFork(ctx, main)
	}
}

// forks reports whether, on this node and in the namespace of not, a pod other than that of not is a fork of main.
func (p *Provider) forks(main string, not *worker) bool {
	p.mu.Lock()
	all := slices.Collect(maps.Values(p.byUID))
	p.mu.Unlock()
	return slices.ContainsFunc(all, func(w *worker) bool {
		pod, _, _ := w.look()
		return w != not && w.owner.Namespace == not.owner.Namespace && pod.Annotations[contract.KeyForkFrom] == main
	})
}

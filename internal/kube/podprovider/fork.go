package podprovider

import (
	"context"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// forkOffer pushes the state of the pod's VM to the registry, so that the VM can be forked on other nodes.
type forkOffer struct {
	base

	mu    sync.Mutex // taken only when no other lock is held
	of    vm.ID      // the VM whose fork state is in the registry, or is being pushed
	retry retryTask
}

// offer pushes the snapshot for forks of rec to the registry, if an annotation of the pod says that forks on other nodes wait
// for the snapshot. The push runs in parallel to the worker's steps. offer returns when to try again.
func (o *forkOffer) offer(pod *corev1.Pod, rec *vm.Record) turn {
	if !contract.OfferFork(pod.Annotations) || o.states == nil || !o.remote() {
		return whenWoken
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.of == rec.ID {
		return whenWoken
	}
	if left := o.retry.left(); left > 0 {
		return after(left)
	}
	o.of = rec.ID
	o.background(func(ctx context.Context) {
		err := o.states.Offer(ctx, pod)
		if ctx.Err() == nil && o.hasOffered(err) {
			o.event(corev1.EventTypeWarning, eventForkPushFailed, "VM %s cannot be forked on other nodes: %s", o.vmName, err)
			o.log.Warn("state for forks not pushed to the registry", "err", err)
		}
	})
	return whenWoken
}

// hasOffered records the result of a push, and reports whether the push failed for a new reason.
func (o *forkOffer) hasOffered(err error) (news bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err == nil {
		o.retry = retryTask{}
		return false
	}
	o.of = ""
	o.poke()
	return o.retry.failed(err)
}

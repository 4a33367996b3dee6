package podprovider

import (
	"context"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// offer pushes the snapshot for forks of rec to the registry, if the pod says that forks on other nodes wait for it. The
// push runs in parallel to the worker's steps. offer returns when to try again.
func (w *worker) offer(pod *corev1.Pod, rec *vm.Record) turn {
	if !contract.OfferFork(pod.Annotations) || w.snaps == nil || !w.p.remote() {
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
		snap, err := w.forkOf(ctx, pod, w.vmName)
		if err == nil {
			err = w.push(ctx, snap.ID, w.ref(w.vmName, contract.ForkSnapshotTag))
		}
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

// offered returns the snapshot for forks of the VM with that ID, which runs on another node. That node pushes the snapshot
// to the registry when it is told to. Until then offered returns Unavailable.
func (w *worker) offered(ctx context.Context, main string, id vm.ID) (snapshot.Snapshot, error) {
	name, ref := forkName(main), w.ref(main, contract.ForkSnapshotTag)
	have, err := w.findSnapshot(ctx, name)
	switch {
	case err == nil && have.Source.VMID == id:
		return have, nil
	case err == nil: // of an earlier VM of that name
		if err := w.snaps.RemoveSnapshot(ctx, have.ID); err != nil && !errdefs.IsNotFound(err) {
			return have, err
		}
	case !errdefs.IsNotFound(err):
		return have, err
	}
	digest, err := w.registry.TagDigest(ctx, ref, w.p.cfg.Registry.Auth)
	if errdefs.IsNotFound(err) || err == nil && digest == w.stale {
		return have, errdefs.Unavailablef("the state of VM %s, which runs on another node, is not in the registry yet", main)
	}
	if err != nil {
		return have, err
	}
	got, err := w.fetchSnapshot(ctx, ref, name)
	if err != nil {
		return got, err
	}
	if got.Source.VMID == id {
		return got, nil
	}
	w.stale = digest
	w.discard(ctx, got.ID)
	return got, errdefs.Unavailablef("the registry has the state of a VM that was called %s before, and not yet of the one that runs", main)
}

// dropForks removes what existed only for forks, once the pod's VM is gone: the VM's fork state in the registry, and this
// node's fork snapshot of another node's VM, if no fork of that VM is left here.
func (w *worker) dropForks(ctx context.Context) {
	pod, _, _ := w.look()
	if w.snaps == nil || !w.p.remote() {
		return
	}
	if contract.OfferFork(pod.Annotations) {
		ref := w.ref(w.vmName, contract.ForkSnapshotTag)
		if err := w.registry.DeleteTag(ctx, ref, w.p.cfg.Registry.Auth); err != nil && ctx.Err() == nil {
			w.log.Warn("state for forks of deleted pod stays in the registry", "op", ref, "err", err)
		}
	}
	main := pod.Annotations[contract.KeyForkFrom]
	if pod.Annotations[contract.KeyForkFromID] == "" || main == "" || w.p.forks(main, w) {
		return
	}
	if _, err := w.known(ctx, main); errdefs.IsNotFound(err) {
		w.discard(ctx, forkName(main))
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

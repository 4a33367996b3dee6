package podsnapshots

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// ForkOf returns the snapshot of the running VM main from which the VM of pod is forked. It is taken once, and all forks share
// it until main is replaced by another VM. If main is not on this node, the state that its node offers in the registry is
// used. Errors: Unavailable while main cannot be forked yet.
func (s *States) ForkOf(ctx context.Context, pod *corev1.Pod, main string) (snapshot.Snapshot, error) {
	unlock, err := s.store.turns.Lock(ctx, "fork "+s.owner.Qualify(main))
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	defer unlock()
	rec, err := s.owner.Find(ctx, main)
	if errdefs.IsNotFound(err) && s.store.Remote() {
		if id := pod.Annotations[contract.KeyForkFromID]; id != "" {
			return s.offered(ctx, main, vm.ID(id))
		}
		return s.stored(ctx, pod, contract.SnapshotRef{Repo: main, Tag: contract.DefaultSnapshotTag}, false)
	}
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	name := forkName(rec.Spec.Name)
	have, ok, err := s.findFit(ctx, name, func(x snapshot.Snapshot) bool { return x.Source.VMID == rec.ID })
	switch {
	case ok || err != nil:
		return have, err
	case !s.owner.Forkable(rec):
		return have, errdefs.Unavailablef("VM %s cannot be forked because it is not ready yet", main)
	}
	return s.save(ctx, rec, name, "taken to fork "+main)
}

// offered returns the snapshot for forks of the VM with that ID, which runs on another node. That node pushes the snapshot
// to the registry when the manager asks for it. Until then offered returns Unavailable.
func (s *States) offered(ctx context.Context, main string, id vm.ID) (snapshot.Snapshot, error) {
	name, ref := forkName(main), s.ref(main, contract.ForkSnapshotTag)
	have, ok, err := s.findFit(ctx, name, func(x snapshot.Snapshot) bool { return x.Source.VMID == id })
	if ok || err != nil {
		return have, err
	}
	digest, err := s.own.digest(ctx, ref)
	if errdefs.IsNotFound(err) || err == nil && s.isStale(digest) {
		return have, errdefs.Unavailablef("VM %s runs on another node, and its state is not in the registry yet", main)
	}
	if err != nil {
		return have, err
	}
	got, err := s.fetch(ctx, ref, name, s.own.pull)
	if err != nil || got.Source.VMID == id {
		return got, err
	}
	s.mu.Lock()
	s.stale = digest
	s.mu.Unlock()
	s.discard(ctx, got.ID)
	return got, errdefs.Unavailablef("the registry has the state of an earlier VM %s, but not yet the state of the running VM", main)
}

// isStale reports whether the fork state with that digest is known to belong to an earlier VM.
func (s *States) isStale(digest string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stale == digest
}

// Offer pushes the snapshot for forks of pod's VM to the registry. Preconditions: the node has a registry.
func (s *States) Offer(ctx context.Context, pod *corev1.Pod) error {
	snap, err := s.ForkOf(ctx, pod, s.owner.VM)
	if err != nil {
		return err
	}
	return s.push(ctx, snap.ID, s.ref(s.owner.VM, contract.ForkSnapshotTag))
}

// DropOffer removes from the registry the snapshot that Offer pushed. A failure is only logged.
func (s *States) DropOffer(ctx context.Context) {
	s.dropTag(ctx, contract.ForkSnapshotTag, "fork state of deleted pod not removed from the registry")
}

// DropFork removes this node's snapshot for forks of the VM main. A failure is only logged.
func (s *States) DropFork(ctx context.Context, main string) { s.discard(ctx, forkName(main)) }

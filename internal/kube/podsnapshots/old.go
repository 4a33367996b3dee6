package podsnapshots

import (
	"context"
	"path"
	"strings"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
)

// This file handles the snapshots of old releases, which did not record owners. They are at the root of the registry, under a
// name that VMs of two namespaces may share. Such a repository is called an old place.

// Place is where the registry has a snapshot of a VM. It is zero if only a peer may have the snapshot.
type Place struct {
	ref, digest string
	old         bool // an old place: the snapshot is used only if it names the VM's namespace as its owner
}

// pinned returns the ref of the place's snapshot by digest, because the tag may name another snapshot by now.
func (p Place) pinned() string { return p.ref[:strings.LastIndexByte(p.ref, ':')] + "@" + p.digest }

// where finds the tag of one of the namespace's VMs, also in an old place. Errors: NotFound.
func (s *States) where(ctx context.Context, vmName, tag string) (Place, error) {
	at, err := s.ask(ctx, Place{ref: s.ref(vmName, tag)})
	old := contract.OldRepository(s.owner.Namespace, vmName)
	if old == "" || !errdefs.IsNotFound(err) {
		return at, err
	}
	return s.ask(ctx, Place{ref: s.store.registry.at(old, tag), old: true})
}

// ask asks the registry for the digest of the snapshot at a place. Errors: NotFound.
func (s *States) ask(ctx context.Context, at Place) (Place, error) {
	var err error
	at.digest, err = s.own.digest(ctx, at.ref)
	return at, err
}

// fetchOld fetches a snapshot from an old place under a local name, if it belongs to the namespace and to that pod ("" for any
// pod). Until that is checked, the local copy belongs to the owner that it names, else to the operator, because any pod of a
// namespace may clone the namespace's snapshots.
func (s *States) fetchOld(ctx context.Context, at Place, name, pod string, ref contract.SnapshotRef) (snapshot.Snapshot, error) {
	if foreign, why := s.rejected(); foreign.Digest == at.digest {
		return snapshot.Snapshot{}, why
	}
	unlock, err := s.store.turns.Lock(ctx, "old "+at.digest)
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	defer unlock()
	operator := s.store.States(Owner{Log: s.owner.Log})
	unclaimed := "unclaimed-" + strings.ReplaceAll(at.digest, ":", "-")
	if left, err := operator.find(ctx, unclaimed); err == nil { // a killed process left it
		operator.discard(ctx, left.ID)
	}
	got, err := operator.pull(ctx, at.pinned(), unclaimed, operator.own.pull)
	if err != nil {
		return got, errdefs.New(errdefs.ClassOf(err), "pull snapshot %s: %w", at.ref, err)
	}
	defer operator.discard(context.WithoutCancel(ctx), got.ID)
	if err := s.inherits(got, at, ref.Repo, pod, ref.Tag); err != nil {
		s.reject(got, at.digest, err)
		return got, err
	}
	return s.fetch(ctx, at.pinned(), name, s.own.pull) // most of the data is already on this node
}

// reject records why the snapshot with that digest at an old place is not used. rejected returns the snapshot and the reason.
func (s *States) reject(snap snapshot.Snapshot, digest string, why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.foreign, s.why = snap, why
	s.foreign.Digest = digest
}

func (s *States) rejected() (snapshot.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.foreign, s.why
}

// inherits fails unless a snapshot from an old place belongs to the namespace and to that pod ("" for any pod). Errors:
// NotFound if it belongs to another owner. FailedPrecondition if it does not name its owner, so that the operator must decide.
func (s *States) inherits(snap snapshot.Snapshot, at Place, vmName, pod, tag string) error {
	namespace, of := snap.Labels[contract.VMLabelPodNamespace], snap.Labels[contract.VMLabelPodName]
	switch {
	case !at.old || namespace == s.owner.Namespace && (pod == "" || of == pod):
		return nil
	case namespace != "":
		return errdefs.NotFoundf("snapshot %s in the registry does not belong to %s", at.ref, path.Join(s.owner.Namespace, pod))
	case s.store.registry.TrustOld:
		return nil
	}
	return errdefs.Preconditionf("%s is from an earlier release and does not name its owner; if it belongs to VM %s of namespace %s, the operator moves it with"+
		" `cocoon snapshot pull --name moved %[1]s` and `cocoon snapshot push moved %[4]s`; with VK_TRUST_OLD_SNAPSHOTS=true the node takes the owner of all such snapshots from their names",
		at.ref, vmName, s.owner.Namespace, s.ref(vmName, tag))
}

// sameState reports whether a and b are copies of the same state of the same VM.
func sameState(a, b snapshot.Snapshot) bool {
	return a.Source.VMID != "" && a.Source.VMID == b.Source.VMID && a.CreatedAt.Equal(b.CreatedAt)
}

// olds returns the digests that the state from which the VM woke may have in an old place: the digest of the push from this
// node, the digest of the pull, or the digest of the rejected snapshot that the operator has copied to the new place.
func (s *States) olds(pulled snapshot.Snapshot) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := []string{s.slept, pulled.Digest}
	if sameState(pulled, s.foreign) {
		all = append(all, s.foreign.Digest)
	}
	return all
}

// dropOld deletes the VM's tag in the old place, if the tag has the given digest. A failure does no harm, because a snapshot
// that does not name its owner is not used.
func (s *States) dropOld(ctx context.Context, tag, digest string) {
	repo := contract.OldRepository(s.owner.Namespace, s.owner.VM)
	if repo == "" || digest == "" {
		return
	}
	ref := s.store.registry.at(repo, tag)
	got, err := s.own.digest(ctx, ref)
	if err == nil && got == digest {
		err = s.own.deleteTag(ctx, ref)
	}
	if err != nil && !errdefs.IsNotFound(err) && ctx.Err() == nil {
		s.owner.Log.Warn("snapshot of an earlier release not removed from the registry", "op", ref, "err", err)
	}
}

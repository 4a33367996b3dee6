package podsnapshots

import (
	"context"
	"path"
	"strings"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
)

// This file handles snapshots that releases before owners left in the registry: at its root, by a name that VMs of two
// namespaces may have had.

// Place is where the registry has a snapshot of a VM. It is zero when only another node could have one.
type Place struct {
	ref, digest string
	old         bool // an earlier release stored it here; it is used only if it says that it belongs to the VM
}

// pinned returns the ref of the place's snapshot by digest, whatever its tag names by now.
func (p Place) pinned() string { return p.ref[:strings.LastIndexByte(p.ref, ':')] + "@" + p.digest }

// where finds the tag of one of the namespace's VMs, also where an earlier release stored it. Errors: NotFound.
func (s *States) where(ctx context.Context, vmName, tag string) (Place, error) {
	at, err := s.ask(ctx, Place{ref: s.ref(vmName, tag)})
	old := contract.OldRepository(s.owner.Namespace, vmName)
	if old == "" || !errdefs.IsNotFound(err) {
		return at, err
	}
	return s.ask(ctx, Place{ref: s.store.registry.at(old, tag), old: true})
}

// ask asks the registry which snapshot is at a place. Errors: NotFound.
func (s *States) ask(ctx context.Context, at Place) (Place, error) {
	var err error
	at.digest, err = s.own.digest(ctx, at.ref)
	return at, err
}

// fetchOld fetches a snapshot from an old place under a local name, if it belongs to the namespace and to that pod ("" for
// any pod). Until that is known, the local copy belongs to the owner that it names, else to the operator, because any pod
// of a namespace may clone what belongs to the namespace.
func (s *States) fetchOld(ctx context.Context, at Place, name, pod string, ref contract.SnapshotRef) (snapshot.Snapshot, error) {
	if foreign, why := s.rejected(); foreign.Digest == at.digest {
		return snapshot.Snapshot{}, why
	}
	give := s.store.turns.take(ctx, "old "+at.digest)
	if give == nil {
		return snapshot.Snapshot{}, ctx.Err()
	}
	defer give()
	operator := s.store.States(Owner{Log: s.owner.Log})
	unclaimed := "unclaimed-" + strings.ReplaceAll(at.digest, ":", "-")
	if left, err := operator.find(ctx, unclaimed); err == nil { // left by a process that was killed
		operator.discard(ctx, left.ID)
	}
	got, err := operator.pull(ctx, at.pinned(), unclaimed)
	if err != nil {
		return got, errdefs.New(errdefs.ClassOf(err), "pull snapshot %s: %w", at.ref, err)
	}
	defer operator.discard(context.WithoutCancel(ctx), got.ID)
	if err := s.inherits(got, at, ref.Repo, pod, ref.Tag); err != nil {
		s.reject(got, at.digest, err)
		return got, err
	}
	return s.fetch(ctx, at.pinned(), name) // most of its data is already here
}

// reject records why the snapshot with that digest at an old place is not used; rejected returns it.
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

// inherits fails unless a snapshot from an old place belongs to the namespace and to that pod ("" for any pod). NotFound:
// it belongs to another. FailedPrecondition: it does not name its owner, and the operator must.
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

// sameState reports whether a and b are copies of the same state of the same VM, wherever each of them was.
func sameState(a, b snapshot.Snapshot) bool {
	return a.Source.VMID != "" && a.Source.VMID == b.Source.VMID && a.CreatedAt.Equal(b.CreatedAt)
}

// olds returns the digests that the state from which the VM woke may have where an earlier release stored it: the digest
// of the push from here, of the pull, or of the snapshot that waited there until the operator put a copy in its place.
func (s *States) olds(pulled snapshot.Snapshot) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := []string{s.slept, pulled.Digest}
	if sameState(pulled, s.foreign) {
		all = append(all, s.foreign.Digest)
	}
	return all
}

// dropOld deletes the VM's tag in the place of an earlier release, if the tag has the given digest. A failure
// does no harm: nobody uses a snapshot that does not name its owner.
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

package podsnapshots

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file handles the state of a hibernated VM: a snapshot of the VM on its node and, if the node has a registry, a copy
// in the registry.

// Check checks whether the registry, if the node has one, accepts the hibernated state.
func (s *States) Check(ctx context.Context) error {
	if !s.store.Remote() {
		return nil
	}
	return s.own.check(ctx, s.ref(s.owner.VM, contract.HibernateSnapshotTag))
}

// Hibernate tells the engine to hibernate rec. It replaces a snapshot of the same name that an earlier hibernation left.
func (s *States) Hibernate(ctx context.Context, rec *vm.Record) (vm.Record, error) {
	began, name := time.Now(), hibernateName(s.owner.VM)
	got, err := s.own.hibernate(ctx, rec.ID, name)
	if errdefs.IsAlreadyExists(err) {
		if err := s.remove(ctx, name); err != nil {
			return got, err
		}
		got, err = s.own.hibernate(ctx, rec.ID, name)
	}
	if err == nil && ctx.Err() == nil {
		s.store.metrics.Saved(time.Since(began))
	}
	return got, err
}

// PushHibernated makes sure that rec's hibernation snapshot is in the registry, if the node has one. A VM with claims wakes only here,
// because their volumes are here: its state is in no registry.
func (s *States) PushHibernated(ctx context.Context, rec *vm.Record) error {
	if !s.store.Remote() || len(rec.Attached) > 0 {
		return nil
	}
	snap, err := s.own.get(ctx, rec.Snapshot)
	if err != nil {
		return err
	}
	ref := s.ref(s.owner.VM, contract.HibernateSnapshotTag)
	if snap.Digest != "" { // this process or an earlier one has pushed the snapshot
		err := s.has(ctx, ref, snap.Digest)
		if !errdefs.IsNotFound(err) && !errdefs.Is(err, errdefs.DataLoss) {
			return err
		}
	}
	if err := s.push(ctx, snap.ID, ref); err != nil {
		return err
	}
	s.dropOld(ctx, contract.HibernateSnapshotTag, snap.Digest)
	return nil
}

// Wake resumes rec from its hibernation snapshot on this node. It remembers the digest of that snapshot for TidyUp. Errors:
// DataLoss if the snapshot is damaged; see Recover.
func (s *States) Wake(ctx context.Context, rec *vm.Record) (vm.Record, error) {
	if snap, err := s.own.get(ctx, rec.Snapshot); err == nil {
		s.mu.Lock()
		s.slept = snap.Digest
		s.mu.Unlock()
	}
	return s.own.wake(ctx, rec.ID)
}

// WakeAgain resumes rec after PushHibernated has failed.
func (s *States) WakeAgain(ctx context.Context, rec *vm.Record) (vm.Record, error) {
	return s.own.wake(ctx, rec.ID)
}

// Recover fetches the hibernated state from the registry, because the snapshot on this node is damaged. cause says how.
func (s *States) Recover(ctx context.Context, cause error) error {
	at, err := s.where(ctx, s.owner.VM, contract.HibernateSnapshotTag)
	if err != nil {
		return errdefs.New(errdefs.DataLoss, "%w (the copy in the registry cannot be used: %v)", cause, err)
	}
	_, err = s.Import(ctx, at)
	return err
}

// FindHibernated looks up the hibernated state of the VM, which is not on this node: the state that Keep left here, or the
// state in the registry or on a peer. must says that such a state must exist. sleeps reports whether it exists.
func (s *States) FindHibernated(ctx context.Context, must bool) (at Place, sleeps bool, err error) {
	here, kept, err := s.kept(ctx)
	if err != nil || kept && (here.Digest == "" || !s.store.Remote()) { // the registry does not have it
		return at, kept, err
	}
	if !s.store.Remote() {
		if must && len(s.store.registry.Peers) == 0 {
			err = errdefs.Preconditionf("VM %s cannot be restored because the node has no registry (EPOCH_URL) and no peers (VK_PEERS)", s.owner.VM)
		}
		return at, must, err
	}
	at, err = s.where(ctx, s.owner.VM, contract.HibernateSnapshotTag)
	if err == nil && at.old { // import the snapshot to read its owner from it
		_, err = s.Import(ctx, at)
	}
	switch {
	case errdefs.IsNotFound(err) && kept: // the VM has woken elsewhere
		if err := s.remove(ctx, here.ID); err != nil {
			return at, false, err
		}
		return s.FindHibernated(ctx, must)
	case errdefs.IsNotFound(err) && must:
		return at, true, errdefs.NotFoundf("VM %s cannot be restored because the registry has no hibernated state of it", s.owner.VM)
	case errdefs.IsNotFound(err):
		return at, false, nil
	case err != nil: // an error, because a new VM must not replace a hibernated VM
		return at, false, errdefs.New(errdefs.ClassOf(err), "ask the registry whether VM %s is hibernated: %w", s.owner.VM, err)
	}
	return at, true, nil
}

// Import returns the VM's hibernated state as a snapshot on this node. It uses the state that Keep left here, else the
// snapshot of an earlier attempt, else fetches the state from a peer, else from the registry. If at has a digest, the snapshot
// must have that digest. Errors: NotFound also if the state belongs to an earlier controller of the pod's name.
func (s *States) Import(ctx context.Context, at Place) (snapshot.Snapshot, error) {
	name, ref := importName(s.owner.VM), contract.SnapshotRef{Repo: s.owner.VM, Tag: contract.HibernateSnapshotTag}
	fits := func(x snapshot.Snapshot) bool { return (at.digest == "" || x.Digest == at.digest) && !s.strange(x) }
	if here, ok, err := s.kept(ctx); err != nil || ok && fits(here) {
		return here, err
	}
	have, ok, err := s.findFit(ctx, name, fits)
	if ok || err != nil {
		return have, err
	}
	if at.old {
		return s.fetchOld(ctx, at, name, s.owner.Pod, ref)
	}
	if got, err := s.fromPeer(ctx, name, fits); err == nil || ctx.Err() != nil {
		return got, err
	}
	if !s.store.Remote() {
		return have, errdefs.NotFoundf("no peer has the hibernated state of VM %s", s.owner.VM)
	}
	got, err := s.fetch(ctx, at.ref, name, s.own.pull)
	switch {
	case err != nil:
		return got, err
	case !fits(got) && !s.strange(got):
		s.discard(ctx, got.ID)
		return got, errdefs.Unavailablef("the hibernated state of VM %s in the registry changed during the pull", s.owner.VM)
	case s.strange(got):
		s.discard(ctx, got.ID)
		if err := s.own.deleteTag(ctx, at.ref); err != nil {
			return got, err
		}
		return got, errdefs.NotFoundf("the hibernated state of VM %s in the registry belongs to an earlier owner of its pod", s.owner.VM)
	}
	return got, nil
}

// fromPeer fetches the VM's hibernated state from the first peer that has a matching one. Errors: NotFound.
func (s *States) fromPeer(ctx context.Context, name string, fits func(snapshot.Snapshot) bool) (got snapshot.Snapshot, err error) {
	for _, peer := range s.store.registry.Peers {
		for _, alias := range contract.Aliases(s.owner.Namespace, s.owner.VM) { // an earlier release used another name
			got, err = s.pull(ctx, snapshot.PeerScheme+peer+"/"+hibernateName(alias), name, s.own.pull)
			switch {
			case ctx.Err() != nil:
				return got, ctx.Err()
			case err == nil && fits(got):
				return got, nil
			case err == nil:
				s.discard(ctx, got.ID) // the peer has the state of another hibernation
			case !errdefs.IsNotFound(err):
				s.owner.Log.Warn("hibernated vm not fetched from peer", "op", peer, "err", err)
			}
		}
	}
	return got, errdefs.NotFoundf("no peer has the hibernated state of VM %s", s.owner.VM)
}

// TidyUp removes what a hibernation left, when the VM is awake: the tag in the registry, from which a later VM of that name
// would resume, the snapshot that Import fetched, and the state that Keep left. slept says that the tag may exist, imported
// that the snapshots may.
func (s *States) TidyUp(ctx context.Context, slept, imported bool) error {
	var left, kept snapshot.Snapshot
	if imported {
		var err error
		if kept, _, err = s.kept(ctx); err != nil {
			return err
		}
		slept = slept || kept.Digest != ""
		if left, err = s.find(ctx, importName(s.owner.VM)); err != nil && !errdefs.IsNotFound(err) {
			return err
		}
		slept = slept || err == nil
	}
	if slept && s.store.Remote() {
		err := s.own.deleteTag(ctx, s.ref(s.owner.VM, contract.HibernateSnapshotTag))
		for _, digest := range s.olds(left) {
			s.dropOld(ctx, contract.HibernateSnapshotTag, digest)
		}
		if err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if left.ID != "" {
		s.discard(ctx, left.ID)
	}
	if kept.ID != "" {
		if err := s.remove(ctx, kept.ID); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.slept = ""
	return nil
}

// DropTag removes the hibernated state from the registry. A failure is only logged.
func (s *States) DropTag(ctx context.Context) {
	s.dropTag(ctx, contract.HibernateSnapshotTag, "hibernated state of deleted pod not removed from the registry")
}

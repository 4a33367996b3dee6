package podsnapshots

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// The steps of SaveAway that can fail, as the reasons of Events.
const (
	SaveFailed = "SnapshotSaveFailed"
	PushFailed = "SnapshotPushFailed"
)

// SaveAway stores the state of rec where it outlives the VM: in the registry as name:latest or, on a node without a
// registry, in a snapshot of that name. On failure it returns the failed step, as the reason for an Event. It can be
// repeated. Each call saves the current state, and removes the snapshot of an earlier attempt when the new state is durable.
func (s *States) SaveAway(ctx context.Context, rec vm.Record) (failed string, err error) {
	ref := contract.SnapshotRef{Repo: rec.Spec.Name, Tag: contract.DefaultSnapshotTag}
	at := s.ref(ref.Repo, ref.Tag)
	if s.store.Remote() {
		if err := s.own.check(ctx, at); err != nil {
			return PushFailed, err
		}
	}
	if rec.State == vm.StateHibernated && s.store.Remote() { // push the hibernation snapshot
		return PushFailed, s.push(ctx, rec.Snapshot, at)
	}
	snap, old, err := s.saveLatest(ctx, rec, ref)
	if err != nil {
		return SaveFailed, err
	}
	if s.store.Remote() {
		if err := s.push(ctx, snap.ID, at); err != nil {
			return PushFailed, err
		}
		s.discard(ctx, snap.ID)
	}
	if old.ID != "" && ours(old) {
		s.discard(ctx, old.ID)
	}
	return "", nil
}

// saveLatest saves rec under one of the two names of its latest snapshot, so that the older snapshot stays until the new one
// exists. It returns the older snapshot too, if it exists.
func (s *States) saveLatest(ctx context.Context, rec vm.Record, ref contract.SnapshotRef) (snap, old snapshot.Snapshot, err error) {
	names := ref.Locals()
	var have [2]snapshot.Snapshot
	for i, name := range names {
		if have[i], err = s.find(ctx, name); err != nil && !errdefs.IsNotFound(err) {
			return snap, old, err
		}
	}
	free := 0
	switch {
	case have[0].ID == "":
	case have[1].ID == "":
		free = 1
	case have[1].CreatedAt.Before(have[0].CreatedAt):
		free = 1
		fallthrough
	default: // both names are taken: a crash left the older snapshot
		if !ours(have[free]) {
			return snap, old, errdefs.Existsf("the node needs the snapshot names %s and %s, but other snapshots have them; rename or remove one", names[0], names[1])
		}
		if err := s.remove(ctx, have[free].ID); err != nil {
			return snap, old, err
		}
	}
	snap, err = s.save(ctx, rec, names[free], "taken before the deletion")
	return snap, have[1-free], err
}

// save takes a snapshot of rec.
func (s *States) save(ctx context.Context, rec vm.Record, name, description string) (snapshot.Snapshot, error) {
	if len(rec.Attached) > 0 {
		return snapshot.Snapshot{}, errdefs.Preconditionf("VM %s uses volume %s, which belongs to a claim and is in no snapshot of the VM; take a VolumeSnapshot of the claim", rec.Spec.Name, rec.Attached[0].Volume)
	}
	began := time.Now()
	labels := map[string]string{}
	for _, key := range []string{contract.VMLabelNode, contract.VMLabelPodNamespace, contract.VMLabelPodName, contract.VMLabelPodUID} {
		if v := rec.Spec.Labels[key]; v != "" {
			labels[key] = v
		}
	}
	if s.owner.SetUID != "" {
		labels[contract.VMLabelOwnerUID] = s.owner.SetUID
	}
	labels[contract.VMLabelNode] = s.store.node // marks the snapshot as removable by a virtual node; see ours
	got, err := s.own.save(ctx, rec.ID, vm.SaveSpec{Name: name, Description: description, Labels: labels})
	if err == nil {
		s.store.metrics.Saved(time.Since(began))
	}
	return got, err
}

// ours reports whether a virtual node took the snapshot, and so may remove it.
func ours(s snapshot.Snapshot) bool { return s.Labels[contract.VMLabelNode] != "" }

package podsnapshots

import (
	"context"
	"strings"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file handles the kept state of a VM: the VM hibernated when its pod was deleted, and its snapshot stays on the node
// after the VM is removed. If the node has a registry, the registry has a copy. A kept state belongs to the controller of the
// deleted pod, by its UID: a later controller of the same name starts anew.

// Keep makes the state in which rec is hibernated outlive rec, on this node and, if the node has one, in the registry. On
// failure it returns the failed step, as the reason for an Event. It can be repeated.
func (s *States) Keep(ctx context.Context, rec *vm.Record) (failed string, err error) {
	name := hibernateName(s.owner.VM)
	keep := func() error {
		_, err := s.save(ctx, *rec, name, "hibernated when its pod was deleted")
		return err
	}
	if err = keep(); errdefs.IsAlreadyExists(err) { // the state of an earlier VM of that name, which this one has replaced
		if err = s.remove(ctx, name); err == nil {
			err = keep()
		}
	}
	if err != nil {
		return SaveFailed, err
	}
	return PushFailed, s.PushHibernated(ctx, rec)
}

// kept returns the kept state on this node, if there is one that belongs to the pod's controller. It removes a state that
// belongs to another controller. Nothing can resume such a state, because its controller no longer exists.
func (s *States) kept(ctx context.Context) (x snapshot.Snapshot, found bool, err error) {
	x, err = s.find(ctx, hibernateName(s.owner.VM))
	switch {
	case errdefs.IsNotFound(err) || err == nil && !ours(x):
		return snapshot.Snapshot{}, false, nil
	case err == nil && s.strange(x):
		if err = s.remove(ctx, x.ID); errdefs.IsFailedPrecondition(err) { // the VM is not removed yet
			err = nil
		}
		return snapshot.Snapshot{}, false, err
	}
	return x, err == nil, err
}

// strange reports whether x is the kept state of another controller than that of the pod.
func (s *States) strange(x snapshot.Snapshot) bool {
	return ours(x) && x.Labels[contract.VMLabelOwnerUID] != s.owner.SetUID
}

// DropKept removes the kept state from this node and, with everywhere, also from the registry, if the registry has the same.
func (s *States) DropKept(ctx context.Context, everywhere bool) error {
	x, err := s.find(ctx, hibernateName(s.owner.VM))
	switch {
	case errdefs.IsNotFound(err) || err == nil && !ours(x):
		return nil
	case err != nil:
		return err
	}
	if ref := s.ref(s.owner.VM, contract.HibernateSnapshotTag); everywhere && s.store.Remote() && x.Digest != "" {
		switch err := s.has(ctx, ref, x.Digest); {
		case errdefs.IsNotFound(err) || errdefs.Is(err, errdefs.DataLoss): // the VM has woken elsewhere
		case err != nil:
			return err
		default:
			if err := s.own.deleteTag(ctx, ref); err != nil {
				return err
			}
		}
	}
	return s.remove(ctx, x.ID)
}

// KeptState names a kept state of the node.
type KeptState struct {
	Owner vm.Owner
	VM    string
}

// Kept returns the kept states of the node.
func (s *Store) Kept(ctx context.Context) (states []KeptState, err error) {
	if s.all == nil {
		return nil, nil
	}
	all, err := s.all.ListSnapshots(ctx)
	if err != nil {
		return nil, err
	}
	for _, x := range all {
		if name, is := strings.CutSuffix(x.Name, ":"+contract.HibernateSnapshotTag); is && ours(x) && !x.Owner.Operator() {
			states = append(states, KeptState{Owner: x.Owner, VM: name})
		}
	}
	return states, nil
}

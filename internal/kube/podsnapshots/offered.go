package podsnapshots

import (
	"context"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// maxOffered is how many snapshots the node's object names; a kubelet names as many images.
const maxOffered = 50

// Offered returns the snapshots of this node that pods can ask for, as NAMESPACE/repo:tag or repo:tag: those that were
// used last, sorted. Schedulers prefer a node that has what a pod clones from.
func (s *Store) Offered(ctx context.Context) ([]corev1.ContainerImage, error) {
	if s.all == nil {
		return nil, nil
	}
	all, err := s.all.ListSnapshots(ctx)
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(all, func(a, b snapshot.Snapshot) int { return lastUse(b).Compare(lastUse(a)) })
	var offered []corev1.ContainerImage
	for _, snap := range all {
		ref, err := contract.LocalSnapshotRef(snap.Name)
		if err != nil || ref.Tag == contract.HibernateSnapshotTag { // it belongs to one VM, which has a claim on its node
			continue
		}
		for _, name := range whose(snap, ref) {
			if !slices.ContainsFunc(offered, func(i corev1.ContainerImage) bool { return i.Names[0] == name }) {
				offered = append(offered, corev1.ContainerImage{Names: []string{name}, SizeBytes: snap.Size})
			}
		}
		if len(offered) >= maxOffered {
			break
		}
	}
	// The order must not change with each use: each change is a write.
	slices.SortFunc(offered, func(a, b corev1.ContainerImage) int { return strings.Compare(a.Names[0], b.Names[0]) })
	return offered, nil
}

// whose returns the names by which pods find the snapshot: NAMESPACE/repo:tag if it belongs to, or is shared with, a
// namespace; repo:tag if the operator shares it with all; otherwise none.
func whose(s snapshot.Snapshot, ref contract.SnapshotRef) (names []string) {
	if !s.Owner.Operator() {
		return []string{s.Owner.Qualify(ref.String())}
	}
	for _, namespace := range s.Published {
		if namespace == vm.Everyone {
			return []string{ref.String()}
		}
		names = append(names, vm.Owner{Namespace: namespace}.Qualify(ref.String()))
	}
	return names
}

func lastUse(s snapshot.Snapshot) time.Time {
	if s.UsedAt.After(s.CreatedAt) {
		return s.UsedAt
	}
	return s.CreatedAt
}

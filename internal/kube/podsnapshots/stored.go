package podsnapshots

import (
	"context"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// This file finds the snapshot from which a pod's VM is cloned. The snapshot belongs to the pod's namespace or is shared with
// the namespace. It is on this node or in the node's registry.

// Clone creates a VM that resumes from a snapshot.
func (s *States) Clone(ctx context.Context, spec vm.CloneSpec, auth []image.RegistryAuth) (vm.Record, error) {
	return s.own.clone(ctx, spec, auth)
}

// Stored returns the snapshot from which pod is cloned. It is on this node, or else pulled from the registry, also from a
// public repository. A snapshot that is pulled may still be arriving: its VM waits for what it needs, if its hypervisor can do that. With a force-pull annotation Stored first asks the registry for a newer snapshot. The local snapshot
// stays until the newer one is on this node.
func (s *States) Stored(ctx context.Context, pod *corev1.Pod, ref contract.SnapshotRef) (snapshot.Snapshot, error) {
	return s.stored(ctx, pod, ref, true)
}

// stored implements Stored. shared says that public repositories of the registry are used.
func (s *States) stored(ctx context.Context, pod *corev1.Pod, ref contract.SnapshotRef, shared bool) (snapshot.Snapshot, error) {
	unlock, err := s.store.turns.Lock(ctx, "snapshot "+s.owner.Qualify(ref.Local()))
	if err != nil {
		return snapshot.Snapshot{}, err
	}
	defer unlock()
	here, err := s.find(ctx, s.locals(ref)...)
	if err != nil && !errdefs.IsNotFound(err) {
		return here, err
	}
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	switch {
	case err == nil && (!ask.ForcePull || !s.store.Remote()):
		return here, nil
	case !s.store.Remote():
		return here, errdefs.NotFoundf("namespace %s has no snapshot %s on this node, and the node has no registry to pull it from; set EPOCH_URL, or import the snapshot with `cocoon snapshot import --name %s` "+
			"and share it with `cocoon snapshot publish %[3]s --to %[1]s`", s.owner.Namespace, ref, ref.Local())
	}
	at, err := s.inRegistry(ctx, ref, shared)
	if err != nil || here.ID != "" && at.digest == here.Digest {
		return here, err
	}
	name, err := s.freeName(ctx, ref, here)
	if err != nil {
		return here, err
	}
	var got snapshot.Snapshot
	switch {
	case at.old:
		got, err = s.fetchOld(ctx, at, name, "", ref)
	case here.ID != "": // stays until all of the newer one is here
		got, err = s.fetch(ctx, at.ref, name, s.own.pull)
	default:
		got, err = s.fetch(ctx, at.ref, name, s.own.pullEarly)
	}
	if err == nil && here.ID != "" && here.Owner.Namespace == s.owner.Namespace {
		s.discard(ctx, here.ID)
	}
	return got, err
}

// locals returns the names that the snapshot may have on this node.
func (s *States) locals(ref contract.SnapshotRef) (names []string) {
	for _, repo := range contract.Aliases(s.owner.Namespace, ref.Repo) {
		names = append(names, contract.SnapshotRef{Repo: repo, Tag: ref.Tag}.Locals()...)
	}
	return names
}

// freeName returns a free name of the namespace for the snapshot on this node. It differs from the name of the snapshot here,
// which is used until the new snapshot exists. It removes a snapshot that a crash left under the free name.
func (s *States) freeName(ctx context.Context, ref contract.SnapshotRef, here snapshot.Snapshot) (string, error) {
	for _, name := range ref.Locals() {
		if name == here.Name && here.Owner.Namespace == s.owner.Namespace {
			continue
		}
		left, err := s.find(ctx, name)
		if err == nil && left.Owner.Namespace == s.owner.Namespace {
			err = s.own.remove(ctx, left.ID)
		}
		if err == nil || errdefs.IsNotFound(err) {
			return name, nil
		}
		return "", err
	}
	return "", errdefs.New(errdefs.Internal, "snapshot %s has no second name", ref) // cannot happen: a ref has two local names
}

// inRegistry returns where the registry has the snapshot: in the namespace (for a VM's snapshot also in an old place), else in
// a public repository.
func (s *States) inRegistry(ctx context.Context, ref contract.SnapshotRef, shared bool) (at Place, err error) {
	switch {
	case strings.HasPrefix(ref.Repo, "vk-"):
		at, err = s.where(ctx, ref.Repo, ref.Tag)
	default:
		at, err = s.ask(ctx, Place{ref: s.ref(ref.Repo, ref.Tag)})
	}
	if errdefs.IsNotFound(err) && shared && s.store.registry.shares(ref) {
		at, err = s.ask(ctx, Place{ref: s.store.registry.at(ref.Repo, ref.Tag)})
	}
	if errdefs.IsNotFound(err) {
		return at, errdefs.NotFoundf("namespace %[1]s has no snapshot %[2]s on this node or in the registry, and none is shared with it; share one of the node with `cocoon snapshot publish %[3]s --to %[1]s`, "+
			"or a repository of the registry with VK_PUBLIC_REPOSITORIES", s.owner.Namespace, ref, ref.Local())
	}
	return at, err
}

// shares reports whether every namespace may clone from ref. The states of VMs are never shared.
func (r Registry) shares(ref contract.SnapshotRef) bool {
	if ref.Tag == contract.HibernateSnapshotTag || ref.Tag == contract.ForkSnapshotTag || strings.HasPrefix(path.Base(ref.Repo), "vk-") {
		return false
	}
	return slices.ContainsFunc(r.Public, func(p string) bool {
		return p == ref.Repo || strings.HasSuffix(p, "/") && strings.HasPrefix(ref.Repo, p)
	})
}

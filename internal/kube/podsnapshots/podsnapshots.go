// Package podsnapshots saves the states of pods' VMs, stores them where they outlive the VM or its node, and finds them
// again.
//
// A state is a snapshot on this node, on another node, or in a registry. The package takes, pushes, fetches, replaces and
// removes the snapshots of a pod's VM, and finds the snapshot from which a VM is cloned. It does not decide when a VM
// hibernates, wakes or is saved. It does not retry, and it sends no Events. It knows a pod only through its Owner.
package podsnapshots

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/keylock"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/vm"
)

// Registry says where snapshots are stored so that they outlive their node.
type Registry struct {
	URL  string        // [http[s]://]HOST[:PORT][/PREFIX]; "": no registry, and snapshots stay on the node
	Auth snapshot.Auth // secret
	// Public lists the repositories from which every namespace may clone. An entry with a / at the end is a prefix of
	// repositories.
	Public []string
	// TrustOld makes the node derive the owner of a snapshot from its name, if an earlier release left the snapshot in the
	// registry without an owner.
	TrustOld bool
	Peers    []string // host:port of other nodes' APIs, which are asked for a hibernated VM before the registry
}

// remote reports whether the node has a registry.
func (r Registry) remote() bool { return r.URL != "" }

// at returns the ref of a repository and tag in the registry.
func (r Registry) at(repo, tag string) string {
	return strings.TrimRight(r.URL, "/") + "/" + repo + ":" + tag
}

// Metrics counts the operations on snapshots. All functions are required.
type Metrics struct {
	Saved          func(time.Duration)
	Pushed, Pulled func(time.Duration, error)
}

// Store holds the snapshots of one node, together with its registry.
type Store struct {
	node     string    // a label of the snapshots that the node takes
	all      Snapshots // nil: the node keeps no snapshots
	registry Registry
	metrics  Metrics
	turns    keylock.Locks[string] // serializes callers that need the same snapshot
}

// New returns the Store of a node. all is nil on a node without snapshots.
func New(node string, all Snapshots, r Registry, m Metrics) *Store {
	return &Store{node: node, all: all, registry: r, metrics: m}
}

// Remote reports whether the node has a registry.
func (s *Store) Remote() bool { return s.registry.remote() }

// Owner names the pod and its VM, and holds the functions that States need from the part that runs the VM. Without the
// functions, only SaveAway, Hibernate, Keep and DropKept of States may be called.
type Owner struct {
	vm.Owner
	Pod string // name of the pod
	VM  string // name of the pod's VM
	Log *slog.Logger
	// Find returns the VM of that name, if it is on this node and belongs to the pod's namespace. Errors: NotFound.
	Find func(ctx context.Context, name string) (vm.Record, error)
	// Forkable reports whether a VM can be forked now.
	Forkable func(vm.Record) bool
	// Pulling is called when the transfer of a snapshot for the pod begins. The function that it returns is called with the
	// snapshot when it is on this node, or all of it but memory that arrives.
	Pulling func(from string) (pulled func(snapshot.Snapshot))
}

// States are the saved states of one pod's VM, and the states from which the VM can be created. Their methods act on behalf of
// the pod. They find snapshots that belong to the pod's namespace or are shared with it. Other snapshots are NotFound.
type States struct {
	store *Store
	own   own
	owner Owner

	mu      sync.Mutex
	stale   string            // digest of a fork state that does not belong to the VM to be forked
	foreign snapshot.Snapshot // the last rejected snapshot of an old place
	why     error             // why foreign is not used
	slept   string            // registry digest of the local snapshot from which the VM woke
}

// States returns the states of a pod's VM, or nil if the node keeps no snapshots.
func (s *Store) States(o Owner) *States {
	if s.all == nil {
		return nil
	}
	return &States{store: s, own: own{s.all, s.registry.Auth, o.Owner}, owner: o}
}

// ref returns the ref, in the registry, of a VM of the namespace and a tag.
func (s *States) ref(vmName, tag string) string {
	return s.store.registry.at(contract.Repository(s.owner.Namespace, vmName), tag)
}

// The names of the snapshots that the node takes.
func hibernateName(vmName string) string { return vmName + ":" + contract.HibernateSnapshotTag }
func importName(vmName string) string    { return vmName + "-hibernate-import" }
func forkName(vmName string) string      { return "fork-" + vmName }

// maxOffered is how many snapshots the Node object lists. A kubelet lists as many images.
const maxOffered = 50

// Offered returns the most recently used snapshots of this node from which pods can be cloned, as NAMESPACE/repo:tag or
// repo:tag, sorted by name. Schedulers prefer a node that has the snapshot of a pod.
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
		if err != nil || ref.Tag == contract.HibernateSnapshotTag { // a hibernated state belongs to one VM, which has a claim on its node
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
	// The order must not change with each use, because each change is a write of the Node object.
	slices.SortFunc(offered, func(a, b corev1.ContainerImage) int { return strings.Compare(a.Names[0], b.Names[0]) })
	return offered, nil
}

// whose returns the names by which pods find the snapshot: NAMESPACE/repo:tag for each namespace to which it belongs or with
// which it is shared, repo:tag if the operator shares it with all, and else none.
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

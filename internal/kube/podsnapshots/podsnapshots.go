// Package podsnapshots saves the states of pods' VMs, keeps them where they outlive the VM or its node, and finds them
// again.
//
// A state is a snapshot on this node, on another node, or in a registry. The package takes, pushes, fetches, replaces and
// removes the snapshots of a pod's VM, and finds the snapshot from which a VM is cloned. It does not decide when a VM
// hibernates, wakes or is saved. It does not retry, and it sends no Events. It knows pods only through their Owner.
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
	// TrustOld makes the node trust the name of a snapshot that an earlier release left in the registry and that does not
	// name its owner.
	TrustOld bool
	Peers    []string // host:port of other nodes' APIs, asked before the registry for a VM that hibernated there
}

// remote reports whether there is a registry.
func (r Registry) remote() bool { return r.URL != "" }

// at returns the ref of a repository and tag in the registry.
func (r Registry) at(repo, tag string) string {
	return strings.TrimRight(r.URL, "/") + "/" + repo + ":" + tag
}

// Metrics counts what is done with snapshots. All functions are required.
type Metrics struct {
	Saved          func(time.Duration)
	Pushed, Pulled func(time.Duration, error)
}

// Store is the snapshots of one node, together with its registry.
type Store struct {
	node     string    // a label of the snapshots that the node takes
	all      Snapshots // nil: the node keeps no snapshots
	registry Registry
	metrics  Metrics
	turns    turns // serializes those who would make the same snapshot
}

// New returns the snapshots of a node. A node without snapshots has nil for all of them.
func New(node string, all Snapshots, r Registry, m Metrics) *Store {
	return &Store{node: node, all: all, registry: r, metrics: m}
}

// Remote reports whether the node has a registry.
func (s *Store) Remote() bool { return s.registry.remote() }

// Owner is whose VM States are about, and what they need from the one that runs it. Without the functions, States can only
// SaveAway.
type Owner struct {
	vm.Owner
	Pod string // its name
	VM  string // the name of its VM
	Log *slog.Logger
	// Find returns a VM of that name on this node and of the pod's namespace. Errors: NotFound.
	Find func(ctx context.Context, name string) (vm.Record, error)
	// Forkable reports whether a VM can be forked now.
	Forkable func(vm.Record) bool
	// Pulling is called when the transfer of a snapshot for the pod begins. The function that it returns is called with the
	// size in bytes once the snapshot is here.
	Pulling func(from string) (pulled func(size int64))
}

// States are the saved states of one pod's VM, and the states from which the VM can be made. On behalf of the pod they
// reach what belongs to its namespace or is shared with it; what belongs to others is NotFound.
type States struct {
	store *Store
	own   own
	owner Owner

	mu      sync.Mutex
	stale   string            // digest of a fork state that does not belong to the VM to be forked
	foreign snapshot.Snapshot // from an old place in the registry; not known to belong to the VM
	why     error             // why foreign is not used
	slept   string            // registry digest of the local snapshot from which the VM woke
}

// States returns the states of the VM of a pod; nil when the node keeps no snapshots.
func (s *Store) States(o Owner) *States {
	if s.all == nil {
		return nil
	}
	return &States{store: s, own: own{s.all, s.registry.Auth, o.Owner}, owner: o}
}

// ref returns where the registry has the snapshots of one of the namespace's VMs, under a tag.
func (s *States) ref(vmName, tag string) string {
	return s.store.registry.at(contract.Repository(s.owner.Namespace, vmName), tag)
}

// The names of snapshots that the node makes.
func hibernateName(vmName string) string { return vmName + ":" + contract.HibernateSnapshotTag }
func importName(vmName string) string    { return vmName + "-hibernate-import" }
func forkName(vmName string) string      { return "fork-" + vmName }

// turns lets one caller at a time through for each name. The zero value is ready.
type turns struct {
	mu sync.Mutex
	at map[string]chan struct{} // closed when the turn is over
}

// take waits for the turn of name and returns the function that gives it back; nil when ctx has ended.
func (t *turns) take(ctx context.Context, name string) (give func()) {
	for {
		t.mu.Lock()
		busy := t.at[name]
		if busy == nil {
			if t.at == nil {
				t.at = map[string]chan struct{}{}
			}
			mine := make(chan struct{})
			t.at[name] = mine
			t.mu.Unlock()
			return func() {
				t.mu.Lock()
				delete(t.at, name)
				t.mu.Unlock()
				close(mine)
			}
		}
		t.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return nil
		}
	}
}

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

package podprovider

import (
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// index finds the pods of the node that have a worker, by name, by UID and by VM.
//
// Lock order of the package: mu comes first. Each other lock (of a podState, a writer, a forkOffer, the deletionLog, the
// volumes and the health) is taken alone or with mu held, and released before another of them is taken.
type index struct {
	metrics *Metrics

	mu       sync.Mutex
	begin    func(s, prior *podState) // starts the worker of s; prior: the earlier pod with the VM name, or nil. nil before Run
	ended    bool                     // Run has ended
	pods     map[string]*podState     // by namespace/name: the current pod
	byUID    map[types.UID]*podState
	holders  map[string]*podState // by namespace and VM name: the last pod that got the name
	adopters map[vm.ID]*podState  // by VM without our label: the pod that adopted it
}

func newIndex(metrics *Metrics) *index {
	return &index{metrics: metrics, pods: map[string]*podState{}, byUID: map[types.UID]*podState{}, holders: map[string]*podState{}, adopters: map[vm.ID]*podState{}}
}

// open sets begin, with which ensure starts workers.
func (x *index) open(begin func(s, prior *podState)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.begin = begin
}

// close makes ensure start no more workers.
func (x *index) close() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.ended = true
}

// ensure makes sure that pod has a worker, and gives the worker the latest state of the pod. create returns the first state of
// a new worker.
func (x *index) ensure(pod *corev1.Pod, create func() *podState) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.begin == nil:
		return errdefs.Unavailablef("the virtual node is not running")
	case x.ended:
		return nil // no error, because virtual-kubelet would write it to the pod's status; the next process adopts the pod
	}
	if s := x.pods[pod.Namespace+"/"+pod.Name]; s != nil {
		if s.uid == pod.UID {
			s.update(pod)
			return nil
		}
		s.replaced()
	}
	s := create()
	prior, rec := x.holders[s.vmKey()], s.look().rec
	x.pods[s.key], x.byUID[s.uid], x.holders[s.vmKey()] = s, s, s
	if rec != nil && rec.Spec.Labels[contract.VMLabelPodUID] == "" {
		x.adopters[rec.ID] = s
	}
	x.metrics.tableSize.Set(float64(len(x.byUID)))
	x.begin(s, prior)
	return nil
}

// drop removes a pod whose VM is gone.
func (x *index) drop(s *podState) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.pods[s.key] == s {
		delete(x.pods, s.key)
	}
	if x.holders[s.vmKey()] == s {
		delete(x.holders, s.vmKey())
	}
	delete(x.byUID, s.uid)
	maps.DeleteFunc(x.adopters, func(_ vm.ID, a *podState) bool { return a == s })
	x.metrics.tableSize.Set(float64(len(x.byUID)))
}

// find returns the pod of that name, or nil.
func (x *index) find(namespace, name string) *podState {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.pods[namespace+"/"+name]
}

// withUID returns the pod with that uid, or nil if it is not on this node or was replaced.
func (x *index) withUID(uid types.UID) *podState {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.byUID[uid]
}

// holds reports whether a pod has the VM with that key; see vmKey.
func (x *index) holds(vmKey string) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.holders[vmKey] != nil
}

// clash reports whether another pod's VM has a port of the node that the new pod s wants. It is false for a pod that a ReplicaSet
// or ReplicationController would replace at once, so that none of them fails pods without end: such a pod waits for the port.
func (x *index) clash(s *podState) bool {
	f := s.look()
	want := convert.HostPorts(f.pod)
	if len(want) == 0 || f.status.Phase != "" && f.status.Phase != corev1.PodPending {
		return false
	}
	if c := metav1.GetControllerOf(f.pod); c != nil && (c.Kind == "ReplicaSet" || c.Kind == "ReplicationController") {
		return false
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, other := range x.byUID {
		if o := other.look(); other != s && o.rec != nil && slices.ContainsFunc(convert.HostPorts(o.pod), func(p vm.PortMapping) bool {
			return slices.ContainsFunc(want, p.Clashes)
		}) && o.status.Phase != corev1.PodSucceeded && o.status.Phase != corev1.PodFailed {
			return true
		}
	}
	return false
}

// current returns the pods that find can return.
func (x *index) current() []*podState {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Collect(maps.Values(x.pods))
}

// all returns every pod, also replaced pods whose VM is not gone yet.
func (x *index) all() []*podState {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Collect(maps.Values(x.byUID))
}

// known returns the VMs that workers own. It must be called before the Runtime's list is requested.
func (x *index) known() map[vm.ID]*podState {
	out := map[vm.ID]*podState{}
	for _, s := range x.all() {
		if rec := s.look().rec; rec != nil {
			out[rec.ID] = s
		}
	}
	return out
}

// withVM returns the pod whose worker owns a VM, or nil.
func (x *index) withVM(id vm.ID) *podState {
	for _, s := range x.all() {
		if rec := s.look().rec; rec != nil && rec.ID == id {
			return s
		}
	}
	return nil
}

// dispatch passes an event to the worker whose pod is named by the VM's label, or to the worker that adopted the VM.
func (x *index) dispatch(e vm.Event) {
	x.mu.Lock()
	s := x.byUID[types.UID(e.Record.Spec.Labels[contract.VMLabelPodUID])]
	if s == nil {
		s = x.adopters[e.Record.ID]
	}
	x.mu.Unlock()
	if s != nil {
		s.apply(e)
	}
}

// reserve assigns a VM without our label to s. If another pod has the VM, it returns that pod instead.
func (x *index) reserve(s *podState, id vm.ID) *podState {
	x.mu.Lock()
	defer x.mu.Unlock()
	if other := x.adopters[id]; other != nil && other != s {
		return other
	}
	x.adopters[id] = s
	return nil
}

// forks reports whether a pod other than not, on this node and in not's namespace, is a fork of main.
func (x *index) forks(main string, not *podState) bool {
	return slices.ContainsFunc(x.all(), func(s *podState) bool {
		return s != not && s.owner.Namespace == not.owner.Namespace && s.look().pod.Annotations[contract.KeyForkFrom] == main
	})
}

// deletionLog has the pods that workers are deleting, and for a while the pods that they have deleted.
type deletionLog struct {
	mu   sync.Mutex
	pods map[types.UID]time.Time // when the pod was deleted; zero: not yet
}

// remember is how long deletionLog keeps a deleted pod, because a cache may still have the pod.
const remember = time.Minute

func (l *deletionLog) has(uid types.UID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.pods[uid]
	return ok
}

func (l *deletionLog) add(uid types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for old, at := range l.pods {
		if !at.IsZero() && time.Since(at) > remember {
			delete(l.pods, old)
		}
	}
	l.pods[uid] = time.Time{}
}

func (l *deletionLog) done(uid types.UID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.pods[uid]; ok {
		l.pods[uid] = time.Now()
	}
}

// sweepPeriod is the pause between two checks of the kept states.
const sweepPeriod = 20 * time.Second

// sweepTrust is how long after the last sight of a claim its absence means that the owner is gone. The manager deletes the claims
// of a node that is away for longer than that, and then another node may need the state in the registry.
const sweepTrust = 2 * sweepPeriod

// keeper has, for VMs whose states are kept on this node, when the node last had the claim of the VM; see retention.
type keeper struct {
	mu   sync.Mutex
	seen map[string]time.Time // by namespace and VM name
}

func (k *keeper) saw(key string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.seen[key] = time.Now()
}

// recent reports whether the node had the claim a short time ago.
func (k *keeper) recent(key string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return time.Since(k.seen[key]) <= sweepTrust
}

func (k *keeper) forget(key string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.seen, key)
}

// Package stickyvm is a plugin of kube-scheduler. It sends a VM's next pod to
// the node that holds the VM's state. For a clone it prefers a node that has
// its snapshot.
//
// It reads the node from informers: from the VMPlacement that a Cocoon node
// creates before it creates the VM, or from the annotation that this plugin sets
// on a KubeVirt VirtualMachine before it binds the VM's pod. It reads a node's
// snapshots from the Node object. The plugin writes only that annotation to the
// API server.
//
// The module imports no package of Cocoon, so it repeats the few names of
// Cocoon's API. The end-to-end tests compare them with the originals.
package stickyvm

import (
	"context"
	"fmt"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/dynamic"
	listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
)

// Name is the plugin's name in the scheduler's configuration.
const Name = "StickyVM"

const stateKey fwk.StateKey = Name

// Plugin implements the extension points below. It is safe for concurrent use.
type Plugin struct {
	handle  fwk.Handle
	client  dynamic.Interface
	nodes   listers.NodeLister
	holders cache.Indexer // of nodes
	pods    cache.Indexer
	objects objects

	// going records the nodes that the pods of a VM are being bound to. The pod
	// informer may report a binding late, but another pod of the VM must go there too.
	mu    sync.Mutex
	going map[string]journey // by VM
}

type journey struct {
	pod  types.UID
	node string
}

var (
	_ fwk.PreFilterPlugin   = &Plugin{}
	_ fwk.FilterPlugin      = &Plugin{}
	_ fwk.ReservePlugin     = &Plugin{}
	_ fwk.PreBindPlugin     = &Plugin{}
	_ fwk.SignPlugin        = &Plugin{}
	_ fwk.EnqueueExtensions = &Plugin{}
)

// New is the plugin's factory. Its informers run until ctx ends. If the cluster
// lacks an API, its informer keeps waiting. Only the pods that need that API are delayed.
func New(ctx context.Context, _ runtime.Object, h fwk.Handle) (fwk.Plugin, error) {
	client, err := dynamic.NewForConfig(h.KubeConfig())
	if err != nil {
		return nil, fmt.Errorf("%s: client: %w", Name, err)
	}
	pl, err := build(ctx, h, client)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Name, err)
	}
	return pl, nil
}

func build(ctx context.Context, h fwk.Handle, client dynamic.Interface) (*Plugin, error) {
	core := h.SharedInformerFactory().Core().V1()
	pods := core.Pods().Informer()
	if err := pods.AddIndexers(indexers); err != nil {
		return nil, fmt.Errorf("index pods: %w", err)
	}
	nodes := core.Nodes().Informer()
	if err := nodes.AddIndexers(nodeIndexers); err != nil {
		return nil, fmt.Errorf("index nodes: %w", err)
	}
	pl := &Plugin{handle: h, client: client, nodes: core.Nodes().Lister(), holders: nodes.GetIndexer(), pods: pods.GetIndexer(), going: map[string]journey{}}
	_, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		UpdateFunc: func(_, now any) {
			if pod, ok := now.(*v1.Pod); ok && pod.Spec.NodeName != "" {
				pl.arrived(pod)
			}
		},
		DeleteFunc: func(o any) {
			if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = gone.Obj
			}
			if pod, ok := o.(*v1.Pod); ok {
				pl.arrived(pod)
			}
		},
	})
	if err != nil {
		return nil, fmt.Errorf("watch pods: %w", err)
	}
	pl.objects, err = watch(ctx, client, pl.wake)
	return pl, err
}

// Name implements fwk.Plugin.
func (pl *Plugin) Name() string { return Name }

// PreFilter finds the one node that the pod may go to. It skips Filter for a pod
// whose VM is not sticky, or whose VM may go to any node.
func (pl *Plugin) PreFilter(_ context.Context, state fwk.CycleState, pod *v1.Pod, _ []fwk.NodeInfo) (*fwk.PreFilterResult, *fwk.Status) {
	t, status := pl.resolve(pod)
	if !status.IsSuccess() {
		return nil, status
	}
	if t == nil {
		return nil, fwk.NewStatus(fwk.Skip)
	}
	state.Write(stateKey, t)
	if t.node == "" {
		return nil, fwk.NewStatus(fwk.Skip)
	}
	node, err := pl.nodes.Get(t.node)
	if err != nil { // the lister only returns "not found"
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, fmt.Sprintf("node %s, which holds the state of %s, was removed; to give that state up, %s", t.node, t.vm, t.release))
	}
	if !t.is(node) {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, fmt.Sprintf("node %s is now another machine, which does not hold the state of %s; to give that state up, %s", t.node, t.vm, t.release))
	}
	return &fwk.PreFilterResult{NodeNames: sets.New(t.node)}, nil
}

// PreFilterExtensions implements fwk.PreFilterPlugin. Other pods do not affect the result.
func (pl *Plugin) PreFilterExtensions() fwk.PreFilterExtensions { return nil }

// Filter rejects every node but the one from PreFilter. Preemption cannot
// change that.
func (pl *Plugin) Filter(_ context.Context, state fwk.CycleState, _ *v1.Pod, info fwk.NodeInfo) *fwk.Status {
	if t := read(state); t != nil && t.node != "" && t.node != info.Node().Name {
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, "node does not hold the state of "+t.vm)
	}
	return nil
}

// Reserve records where the pod goes, for the next pod of its VM.
func (pl *Plugin) Reserve(_ context.Context, state fwk.CycleState, pod *v1.Pod, node string) *fwk.Status {
	t := read(state)
	if t == nil {
		return nil
	}
	pl.mu.Lock()
	defer pl.mu.Unlock()
	if other, ok := pl.going[t.vm]; ok && other.pod != pod.UID && other.node != node {
		return fwk.NewStatus(fwk.Unschedulable, fmt.Sprintf("another pod of %s is being bound to node %s", t.vm, other.node))
	}
	pl.going[t.vm] = journey{pod.UID, node}
	return nil
}

// Unreserve removes what Reserve recorded.
func (pl *Plugin) Unreserve(_ context.Context, _ fwk.CycleState, pod *v1.Pod, _ string) {
	pl.arrived(pod)
}

// arrived removes the record of the pod's binding: the informer now reports its
// node, or the pod is gone.
func (pl *Plugin) arrived(pod *v1.Pod) {
	pl.mu.Lock()
	defer pl.mu.Unlock()
	for _, vm := range keys(pod) {
		if pl.going[vm].pod == pod.UID {
			delete(pl.going, vm)
		}
	}
}

// PreBindPreFlight reports whether PreBind has to record the node. The node
// itself creates a VMPlacement before the VM. For a VirtualMachine nobody else records it.
func (pl *Plugin) PreBindPreFlight(_ context.Context, state fwk.CycleState, _ *v1.Pod, _ string) (*fwk.PreBindPreFlightResult, *fwk.Status) {
	if t := read(state); t == nil || t.machine == nil || t.recorded {
		return nil, fwk.NewStatus(fwk.Skip)
	}
	return &fwk.PreBindPreFlightResult{AllowParallel: true}, nil
}

// PreBind records the node on the VirtualMachine that the informer returned. If
// someone has changed it since, or the API server rejects the change, the pod is
// not bound and is retried.
func (pl *Plugin) PreBind(ctx context.Context, state fwk.CycleState, pod *v1.Pod, node string) *fwk.Status {
	t := read(state)
	if t == nil || t.machine == nil {
		return nil
	}
	n, err := pl.nodes.Get(node)
	if err != nil {
		return fwk.AsStatus(fmt.Errorf("record node %s on %s: %w", node, t.vm, err))
	}
	if err := record(ctx, pl.client, t.machine, n); err != nil {
		return fwk.AsStatus(fmt.Errorf("record node %s on %s: %w", node, t.vm, err))
	}
	klog.FromContext(ctx).V(2).Info("Recorded the node of a VM", "vm", t.vm, "node", node, "pod", klog.KObj(pod))
	return nil
}

// SignPod distinguishes pods that may go to different nodes, or that prefer
// different nodes.
func (pl *Plugin) SignPod(_ context.Context, pod *v1.Pod) ([]fwk.SignFragment, *fwk.Status) {
	t, status := pl.resolve(pod)
	switch {
	case !status.IsSuccess():
		return nil, fwk.NewStatus(fwk.Unschedulable, status.Message())
	case t == nil:
		t = &target{}
	}
	return []fwk.SignFragment{{Key: Name, Value: t.node + " " + snapshotOf(pod)}}, nil
}

// EventsToRegister names the events that can end the wait of a pod that this plugin
// rejected, or change the reason: its node is added or removed. Claims and VMs are not listed, because the
// scheduler would not start in a cluster that lacks their API; see wake.
func (pl *Plugin) EventsToRegister(context.Context) ([]fwk.ClusterEventWithHint, error) {
	change := fwk.Add | fwk.Delete | fwk.UpdateNodeCondition | fwk.UpdateNodeLabel
	return []fwk.ClusterEventWithHint{{Event: fwk.ClusterEvent{Resource: fwk.Node, ActionType: change}, QueueingHintFn: pl.onNode}}, nil
}

func (pl *Plugin) onNode(_ klog.Logger, pod *v1.Pod, before, now any) (fwk.QueueingHint, error) {
	if now == nil { // the node is deleted
		now = before
	}
	node, ok := now.(*v1.Node)
	if !ok {
		return fwk.Queue, fmt.Errorf("%s: a node is a %T", Name, now)
	}
	t, status := pl.resolve(pod)
	if status.IsSuccess() && t != nil && t.node != "" && t.node != node.Name {
		return fwk.QueueSkip, nil
	}
	return fwk.Queue, nil
}

// wake makes the scheduler retry the pods of a VM after its objects changed.
func (pl *Plugin) wake(vm string) {
	found, err := pl.pods.ByIndex(podsByVM, vm)
	if err != nil {
		return // cannot happen: the index exists
	}
	waiting := map[string]*v1.Pod{}
	for _, o := range found {
		if pod, ok := o.(*v1.Pod); ok && pod.Spec.NodeName == "" {
			waiting[pod.Namespace+"/"+pod.Name] = pod
		}
	}
	if len(waiting) > 0 {
		pl.handle.Activate(klog.Background(), waiting)
	}
}

package stickyvm

import (
	"context"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
	fwk "k8s.io/kube-scheduler/framework"
)

// Of Cocoon's API (api/contract): what a pod's VM is cloned from.
const (
	modeAnnotation    = "cocoonset.cocoonstack.io/mode"
	managedAnnotation = "cocoonset.cocoonstack.io/managed"
	imageAnnotation   = "cocoonset.cocoonstack.io/image"
	forkAnnotation    = "vm.cocoonstack.io/fork-from"
	dirAnnotation     = "vm.cocoonstack.io/clone-from-dir"
	classLabel        = "cocoonstack.io/snapshot-cpu-class" // on a node
)

// alikeScore is that of a node which lacks the snapshot, but whose CPUs are of the class of one that has it.
const alikeScore = fwk.MaxNodeScore / 2

var (
	_ fwk.PreScorePlugin = &Plugin{}
	_ fwk.ScorePlugin    = &Plugin{}
)

const nodesBySnapshot = Name

// nodeIndexers find the nodes that have a snapshot. Virtual nodes of Cocoon name theirs where kubelets name images.
var nodeIndexers = cache.Indexers{nodesBySnapshot: func(o any) ([]string, error) {
	node, ok := o.(*v1.Node)
	if !ok {
		return nil, nil
	}
	var names []string
	for _, image := range node.Status.Images {
		names = append(names, image.Names...)
	}
	return names, nil
}}

// snapshotOf is what the pod's VM is cloned from, repo:tag; "" when it boots, or goes on from something else.
func snapshotOf(pod *v1.Pod) string {
	a := pod.Annotations
	clones := a[modeAnnotation] == "clone" || a[modeAnnotation] == "" && a[managedAnnotation] == "true"
	if !clones || a[forkAnnotation] != "" || a[dirAnnotation] != "" {
		return ""
	}
	name := a[imageAnnotation]
	if name == "" && len(pod.Spec.Containers) > 0 {
		name = pod.Spec.Containers[0].Image
	}
	if name != "" && !strings.Contains(name, ":") {
		name += ":latest"
	}
	return name
}

const originKey fwk.StateKey = Name + "/origin"

// origin is where the snapshot of a pod is. It is never changed.
type origin struct {
	snapshots []string        // its names on nodes
	classes   map[string]bool // of the CPUs there
}

// Clone implements fwk.StateData.
func (o *origin) Clone() fwk.StateData { return o }

// PreScore finds out what is known of the snapshot that the pod's VM is cloned from. Without one, or when no node has it,
// Score is skipped.
func (pl *Plugin) PreScore(_ context.Context, state fwk.CycleState, pod *v1.Pod, _ []fwk.NodeInfo) *fwk.Status {
	o := &origin{classes: map[string]bool{}}
	var holders []any
	if name := snapshotOf(pod); name != "" {
		o.snapshots = []string{pod.Namespace + "/" + name, name} // of the pod's namespace, and shared with all
	}
	for _, name := range o.snapshots {
		found, err := pl.holders.ByIndex(nodesBySnapshot, name)
		if err != nil { // there is such an index
			return fwk.NewStatus(fwk.Skip)
		}
		holders = append(holders, found...)
	}
	if len(holders) == 0 {
		return fwk.NewStatus(fwk.Skip)
	}
	for _, h := range holders {
		if node, ok := h.(*v1.Node); ok && node.Labels[classLabel] != "" {
			o.classes[node.Labels[classLabel]] = true
		}
	}
	state.Write(originKey, o)
	return nil
}

// Score prefers a node that has the snapshot, where nothing is transferred, and then one whose CPUs are of the same class,
// which the snapshot's memory goes on with.
func (pl *Plugin) Score(_ context.Context, state fwk.CycleState, _ *v1.Pod, info fwk.NodeInfo) (int64, *fwk.Status) {
	data, err := state.Read(originKey)
	if err != nil {
		return 0, fwk.AsStatus(err) // Skip spares this
	}
	o, ok := data.(*origin)
	if !ok {
		return 0, nil
	}
	for _, name := range o.snapshots {
		if _, has := info.GetImageStates()[name]; has {
			return fwk.MaxNodeScore, nil
		}
	}
	if o.classes[info.Node().Labels[classLabel]] {
		return alikeScore, nil
	}
	return 0, nil
}

// ScoreExtensions implements fwk.ScorePlugin: the scores need no change.
func (pl *Plugin) ScoreExtensions() fwk.ScoreExtensions { return nil }

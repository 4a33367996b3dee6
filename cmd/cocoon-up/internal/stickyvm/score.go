package stickyvm

import (
	"context"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"
	fwk "k8s.io/kube-scheduler/framework"
)

// From Cocoon's API (api/contract): the source that a pod's VM is cloned from.
const (
	modeAnnotation    = "cocoonset.cocoonstack.io/mode"
	managedAnnotation = "cocoonset.cocoonstack.io/managed"
	imageAnnotation   = "cocoonset.cocoonstack.io/image"
	forkAnnotation    = "vm.cocoonstack.io/fork-from"
	dirAnnotation     = "vm.cocoonstack.io/clone-from-dir"
	classLabel        = "cocoonstack.io/snapshot-cpu-class" // on a node
)

// alikeScore is the score of a node that lacks the snapshot, but has CPUs of the same class as a node that has it.
const alikeScore = fwk.MaxNodeScore / 2

var (
	_ fwk.PreScorePlugin = &Plugin{}
	_ fwk.ScorePlugin    = &Plugin{}
)

const nodesBySnapshot = Name

// nodeIndexers find the nodes that have a snapshot. Cocoon's virtual nodes list snapshots where kubelets list images.
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

// snapshotOf is the snapshot that the pod's VM is cloned from, as repo:tag. "" means that the VM boots or resumes something else.
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

// origin says where the snapshot of a pod is. It is immutable.
type origin struct {
	snapshots []string        // the names of the snapshot on nodes
	classes   map[string]bool // CPU classes of the nodes that have it
}

// Clone implements fwk.StateData.
func (o *origin) Clone() fwk.StateData { return o }

// PreScore looks up the snapshot that the pod's VM is cloned from. If there is no snapshot, or no node has it, Score is
// skipped.
func (pl *Plugin) PreScore(_ context.Context, state fwk.CycleState, pod *v1.Pod, _ []fwk.NodeInfo) *fwk.Status {
	o := &origin{classes: map[string]bool{}}
	var holders []any
	if name := snapshotOf(pod); name != "" {
		o.snapshots = []string{pod.Namespace + "/" + name, name} // the namespace's snapshot, and the one shared with all
	}
	for _, name := range o.snapshots {
		found, err := pl.holders.ByIndex(nodesBySnapshot, name)
		if err != nil { // cannot happen: the index exists
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

// Score prefers a node that has the snapshot, because nothing is transferred. Next it prefers a node whose CPUs are of the same
// class, because the snapshot's memory can resume there.
func (pl *Plugin) Score(_ context.Context, state fwk.CycleState, _ *v1.Pod, info fwk.NodeInfo) (int64, *fwk.Status) {
	data, err := state.Read(originKey)
	if err != nil {
		return 0, fwk.AsStatus(err) // not reached when PreScore returned Skip
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

// ScoreExtensions implements fwk.ScorePlugin. The scores need no normalization.
func (pl *Plugin) ScoreExtensions() fwk.ScoreExtensions { return nil }

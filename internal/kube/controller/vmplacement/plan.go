package vmplacement

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/placement"
)

// view is the input of a plan: a claim and the related objects.
type view struct {
	claim *v1.VMPlacement // nil: no claim exists (any more)
	node  *corev1.Node    // the node of the claim; nil: the node does not exist
	pods  []*corev1.Pod   // the pods of the VM
	// durable says that the registry has the VM's hibernated state. Waking removes that state from the registry. Other
	// snapshots do not count, because they may be older than the state on the node. It is looked up only if the node is gone.
	durable bool
	now     time.Time
}

// actions are the next steps.
type actions struct {
	status  v1.VMPlacementStatus
	release string        // why the claim is released; "": it is not
	again   time.Duration // 0: only when something changes
	waiting string        // why pods wait for the node; "": they do not wait
	reason  string        // the condition's reason for waiting
	stale   []*corev1.Pod // pods bound to a node to which the claim no longer binds them
}

// plan decides the next steps. It is pure.
func plan(v view) actions {
	a := actions{stale: stale(v)}
	if v.claim == nil {
		return a
	}
	a.status = *v.claim.Status.DeepCopy()
	if v.claim.Status.NodeName != "" { // "": a node is about to claim the VM
		a.held(v)
	}
	return a
}

func (a *actions) held(v view) {
	a.reason, a.waiting = placement.Unavailable(v.claim, v.node)
	if a.reason == "" {
		a.status.NodeUID = v.node.UID // the node may have been registered again
		a.setCondition(v, metav1.ConditionTrue, v1.ReasonNodeReady, "")
		return
	}
	policy := v.claim.Spec
	gone := a.reason == v1.ReasonNodeRemoved || a.reason == v1.ReasonNodeReplaced
	since := a.setCondition(v, metav1.ConditionFalse, a.reason, a.waiting)
	switch {
	case policy.Release == v1.ReleaseNever:
		a.waiting += "; the VM waits for the node (release Never); to give the state up, delete the VMPlacement " + v.claim.Name
	case v.inUse():
	case gone && v.durable:
		a.release = a.waiting + "; the registry has the state"
	case policy.WaitSeconds == nil:
		a.waiting += "; the VM waits for the node; to give the state up, delete the VMPlacement " + v.claim.Name
	default:
		limit := time.Duration(*policy.WaitSeconds) * time.Second
		if a.again = limit - v.now.Sub(since); a.again <= 0 {
			a.again, a.release = 0, a.waiting+" for "+limit.String()
		}
		a.waiting += "; the VM waits for the node for " + limit.String()
	}
	if a.release == "" {
		a.setCondition(v, metav1.ConditionFalse, a.reason, a.waiting)
	}
}

// setCondition sets the condition and returns its last transition time.
func (a *actions) setCondition(v view, status metav1.ConditionStatus, reason, text string) time.Time {
	meta.SetStatusCondition(&a.status.Conditions, metav1.Condition{
		Type: v1.ConditionNodeAvailable, Status: status, Reason: reason, Message: text,
		ObservedGeneration: v.claim.Generation, LastTransitionTime: metav1.NewTime(v.now.Truncate(time.Second)),
	})
	return meta.FindStatusCondition(a.status.Conditions, v1.ConditionNodeAvailable).LastTransitionTime.Time
}

// inUse reports whether a pod of the VM is on the node of the claim. The claim of a running VM is never released.
func (v view) inUse() bool {
	return slices.ContainsFunc(v.pods, func(p *corev1.Pod) bool {
		return p.Spec.NodeName == v.claim.Status.NodeName && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed
	})
}

// unplaced reports whether the pod waits for a node.
func unplaced(p *corev1.Pod) bool { return p.Spec.NodeName == "" && p.DeletionTimestamp == nil }

// stale returns the pods whose node affinity, set at creation, requires a node that no claim names now. Such pods cannot run
// on any other node.
func stale(v view) (pods []*corev1.Pod) {
	for _, p := range v.pods {
		if on := p.Annotations[contract.KeyPlacedOn]; on != "" && unplaced(p) && on != placement.Bound(v.claim) {
			pods = append(pods, p)
		}
	}
	return pods
}

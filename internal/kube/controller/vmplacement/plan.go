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

// view is what a plan is made from: a claim and what it is about.
type view struct {
	claim *v1.VMPlacement // nil: there is none (any more)
	node  *corev1.Node    // of the claim; nil: there is none
	pods  []*corev1.Pod   // of the VM
	// The registry has the state that the VM fell asleep with, which is taken away when it wakes: another snapshot of it may
	// be older than what the node holds. Asked for when the node is gone.
	durable bool
	now     time.Time
}

// actions is what to do next.
type actions struct {
	status  v1.VMPlacementStatus
	release string        // why the claim ends; "": it does not
	again   time.Duration // 0: when something changes
	waiting string        // why pods wait; "": they do not wait for the node
	reason  string        // of waiting, in a word
	stale   []*corev1.Pod // were bound to a node that the claim does not bind them to any more
}

// plan decides what to do next. It is pure.
func plan(v view) actions {
	a := actions{stale: stale(v)}
	if v.claim == nil {
		return a
	}
	a.status = *v.claim.Status.DeepCopy()
	if v.claim.Status.NodeName != "" { // else a node is about to claim it
		a.held(v)
	}
	return a
}

func (a *actions) held(v view) {
	a.reason, a.waiting = placement.Unavailable(v.claim, v.node)
	if a.reason == "" {
		a.status.NodeUID = v.node.UID // it may have been registered anew
		a.judge(v, metav1.ConditionTrue, v1.ReasonNodeReady, "")
		return
	}
	policy := v.claim.Spec
	gone := a.reason == v1.ReasonNodeRemoved || a.reason == v1.ReasonNodeReplaced
	since := a.judge(v, metav1.ConditionFalse, a.reason, a.waiting)
	switch {
	case policy.Release == v1.ReleaseNever:
		a.waiting += "; it waits for it in any case (release Never); to give the state up, delete the VMPlacement " + v.claim.Name
	case v.inUse():
	case gone && v.durable:
		a.release = a.waiting + "; the registry has the state"
	case policy.WaitSeconds == nil:
		a.waiting += "; it waits for it; to give the state up, delete the VMPlacement " + v.claim.Name
	default:
		limit := time.Duration(*policy.WaitSeconds) * time.Second
		if a.again = limit - v.now.Sub(since); a.again <= 0 {
			a.again, a.release = 0, a.waiting+" for "+limit.String()
		}
		a.waiting += "; it waits for it " + limit.String()
	}
	if a.release == "" {
		a.judge(v, metav1.ConditionFalse, a.reason, a.waiting)
	}
}

// judge writes the condition and returns since when its status is what it is.
func (a *actions) judge(v view, status metav1.ConditionStatus, reason, text string) time.Time {
	meta.SetStatusCondition(&a.status.Conditions, metav1.Condition{
		Type: v1.ConditionNodeAvailable, Status: status, Reason: reason, Message: text,
		ObservedGeneration: v.claim.Generation, LastTransitionTime: metav1.NewTime(v.now.Truncate(time.Second)),
	})
	return meta.FindStatusCondition(a.status.Conditions, v1.ConditionNodeAvailable).LastTransitionTime.Time
}

// inUse reports whether a pod of the VM is on the node of the claim: what runs is never given up.
func (v view) inUse() bool {
	return slices.ContainsFunc(v.pods, func(p *corev1.Pod) bool {
		return p.Spec.NodeName == v.claim.Status.NodeName && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed
	})
}

// unplaced reports whether the pod waits for a node.
func unplaced(p *corev1.Pod) bool { return p.Spec.NodeName == "" && p.DeletionTimestamp == nil }

// stale are the pods that were bound, when they were created, to a node that no claim binds them to now. They can run nowhere
// else as they are.
func stale(v view) (pods []*corev1.Pod) {
	for _, p := range v.pods {
		if on := p.Annotations[contract.KeyPlacedOn]; on != "" && unplaced(p) && on != placement.Bound(v.claim) {
			pods = append(pods, p)
		}
	}
	return pods
}

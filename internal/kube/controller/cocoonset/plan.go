package cocoonset

import (
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/controller"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/placement"
)

// rebuildPauses are the delays before a failed sub-agent is recreated, by the number of earlier attempts. After the last
// attempt the sub-agent is not recreated until the spec changes.
var rebuildPauses = []time.Duration{0, time.Second, 5 * time.Second, 30 * time.Second}

// view is the input of a plan: the set, its pods, and which VMs have their state in the registry.
type view struct {
	set        *v1.CocoonSet
	pods       []*corev1.Pod              // all pods that the set owns, including pods that are being deleted
	durable    map[string]bool            // by VM name: the registry has the VM's hibernated state; only for the VMs that asks returns
	noRegistry bool                       // no registry is configured
	claims     map[string]*v1.VMPlacement // by VM name
	now        time.Time
}

// actions are the next steps and the new status of the set.
type actions struct {
	create []*corev1.Pod
	remove []removal
	mark   []marking
	offer  *corev1.Pod // the main VM's pod, if its node must offer its state for forks on other nodes; else nil
	// VMs that the set no longer wants and whose hibernated state may be in the registry.
	hibernated []string
	free       []string // VMs whose VMPlacements are deleted, because their state is in the registry
	status     v1.CocoonSetStatus
	again      time.Duration // 0: only when something changes
	events     []note
}

type removal struct {
	pod  *corev1.Pod
	keep bool // the registry has the VM's state: the node neither saves it again nor deletes it
}

type marking struct {
	pod        *corev1.Pod
	hibernate  bool
	generation string
}

type note struct{ kind, reason, text string }

// planner makes the plan of one view.
type planner struct {
	view
	members  []member
	byName   map[string]*corev1.Pod
	leaving  bool // a pod of the set is being deleted
	surplus  bool // the set has pods that it does not want
	moving   bool // a VM is not on the node that spec.nodeName names
	rebuilds map[int32]v1.AgentStatus
	actions
}

// plan decides the next steps. It is pure: the same view always gives the same plan.
func plan(v view) actions {
	p := newPlanner(v)
	p.status = *v.set.Status.DeepCopy()
	p.status.ObservedGeneration = v.set.Generation
	p.surplus = p.trim()
	switch {
	case v.set.Spec.Suspend:
		p.suspend(v.set.Spec.HibernatePolicy == v1.HibernateRelease)
	case p.moving:
		p.suspend(true)
	default:
		p.run()
	}
	p.observe()
	return p.actions
}

func newPlanner(v view) *planner {
	p := &planner{view: v, members: members(v.set), byName: map[string]*corev1.Pod{}, rebuilds: map[int32]v1.AgentStatus{}}
	for _, pod := range v.pods {
		p.byName[pod.Name] = pod
		p.leaving = p.leaving || pod.DeletionTimestamp != nil
	}
	for _, a := range v.set.Status.Agents {
		if v.set.Status.ObservedGeneration == v.set.Generation { // a change of the spec resets the attempts
			p.rebuilds[a.Slot] = a
		}
	}
	if node := v.set.Spec.NodeName; node != "" {
		for _, m := range p.members {
			if pod := p.live(m); m.managed() && pod != nil && pod.Spec.NodeName != "" && pod.Spec.NodeName != node {
				p.moving = true
			}
		}
	}
	return p
}

// asks returns the VMs whose hibernated state the caller must look up in the registry before plan.
func asks(v view) []string {
	p := newPlanner(v)
	var names []string
	restoring := v.set.Status.SuspendedOn != "" || v.set.Status.Phase == v1.SetMigrating
	for _, m := range p.members {
		pod := p.byName[m.name()]
		switch {
		case !m.managed():
		case pod == nil && (restoring || v.set.Spec.Suspend), pod != nil && (p.moving || v.set.Spec.Suspend) && controller.Hibernated(pod):
			names = append(names, m.vmName())
		}
	}
	return names
}

// live returns the pod of m, or nil if the pod does not exist or is being deleted.
func (p *planner) live(m member) *corev1.Pod {
	if pod := p.byName[m.name()]; pod != nil && pod.DeletionTimestamp == nil {
		return pod
	}
	return nil
}

// asleep reports whether the VM is hibernated and its state durable in the registry.
func (p *planner) asleep(m member, pod *corev1.Pod) bool {
	return controller.Hibernated(pod) && p.durable[m.vmName()]
}

// suspend hibernates every VM. If release is set, it removes the pods when the states of all VMs are durable.
func (p *planner) suspend(release bool) {
	all, waits := !p.surplus, false
	for _, m := range p.members {
		pod := p.live(m)
		switch {
		case !m.managed():
		case pod == nil: // the VM's state is in the registry, or the VM never existed
			going := p.byName[m.name()]
			all = all && (going == nil || contract.KeepSnapshot(going.Annotations))
		case !contract.Hibernate(pod.Annotations) || !controller.Marked(pod, fieldOwner):
			all = false
			p.mark = append(p.mark, marking{pod, true, p.generation()})
		case !p.asleep(m, pod):
			all = false
			waits = waits || controller.Hibernated(pod)
		}
	}
	if waits { // the node has reported the state, but the registry does not have it yet
		p.again = 2 * time.Second
	}
	if !all {
		p.status.Phase = p.either(v1.SetMigrating, v1.SetSuspending)
		return
	}
	if !release {
		p.status.Phase = v1.SetSuspended
		return
	}
	p.status.Phase = p.either(v1.SetMigrating, v1.SetSuspended)
	for _, m := range p.members {
		if pod := p.live(m); pod != nil && m.managed() {
			p.status.SuspendedOn = pod.Spec.NodeName
			p.remove = append(p.remove, removal{pod, true})
			if p.claims[m.vmName()] != nil {
				p.free = append(p.free, m.vmName())
			}
		}
	}
}

func (p *planner) either(moving, suspended v1.SetPhase) v1.SetPhase {
	if p.moving && !p.set.Spec.Suspend {
		return moving
	}
	return suspended
}

func (p *planner) generation() string { return strconv.FormatInt(p.set.Generation, 10) }

// run creates and wakes all wanted VMs, and removes drifted and orphaned pods.
func (p *planner) run() {
	for _, m := range p.members {
		pod := p.byName[m.name()]
		switch {
		case pod == nil:
			p.prepare(m)
		case pod.DeletionTimestamp != nil:
		case drifted(m.pod, pod), p.orphaned(pod):
			p.remove = append(p.remove, removal{pod: pod})
		case controller.Marked(pod, fieldOwner):
			p.mark = append(p.mark, marking{pod, false, p.generation()})
		default:
			p.recover(m, pod)
		}
	}
	p.share()
}

// orphaned reports whether pod waits to be forked from a main VM that was recreated meanwhile.
func (p *planner) orphaned(pod *corev1.Pod) bool {
	from := pod.Annotations[contract.KeyForkFromID]
	main := p.live(p.members[0])
	return from != "" && pod.Annotations[contract.KeyID] == "" && main != nil && main.Annotations[contract.KeyID] != "" && main.Annotations[contract.KeyID] != from
}

// share tells the main VM's node to offer its state if a sub-agent is to be forked on another node.
func (p *planner) share() {
	main := p.live(p.members[0])
	if main == nil || !controller.Ready(main) || contract.OfferFork(main.Annotations) {
		return
	}
	for _, m := range p.members {
		pod := p.live(m)
		if pod != nil && pod.Annotations[contract.KeyForkFromID] != "" && pod.Annotations[contract.KeyID] == "" && !p.orphaned(pod) &&
			pod.Spec.NodeName != "" && pod.Spec.NodeName != main.Spec.NodeName {
			p.offer = main
			return
		}
	}
}

// trim removes the pods that the set no longer wants, and reports whether any exist.
func (p *planner) trim() (any bool) {
	wanted := map[string]bool{}
	for _, m := range p.members {
		wanted[m.name()] = true
	}
	for _, pod := range p.pods {
		if wanted[pod.Name] {
			continue
		}
		any = true
		if pod.DeletionTimestamp == nil {
			p.remove = append(p.remove, removal{pod: pod})
			if state := controller.Life(pod).State; state == contract.LifecycleHibernating || state == contract.LifecycleHibernated {
				p.hibernated = append(p.hibernated, convert.VMName(pod))
			}
		}
	}
	return any
}

// prepare plans the creation of the pod of m with its placement, if the pod can be created now.
func (p *planner) prepare(m member) {
	pod := m.pod.DeepCopy()
	if node := p.set.Spec.NodeName; node != "" {
		pinned(pod, node)
	} else if node := p.set.Status.SuspendedOn; node != "" && m.managed() {
		preferring(pod, node)
	}
	switch {
	case m.managed() && p.durable[m.vmName()]: // queried only where the state may exist
		pod.Annotations[contract.KeyRestoreFromHibernate] = "true"
		if claim := p.claims[m.vmName()]; p.set.Spec.NodeName != "" && claim != nil {
			p.free = append(p.free, claim.Name)
		}
	case m.role == v1.RoleSubAgent:
		main := p.live(p.members[0])
		if main == nil || !controller.Ready(main) || contract.Hibernate(main.Annotations) {
			return // no main VM to fork from yet
		}
		pod.Annotations[contract.KeyForkFrom] = convert.VMName(main) // a VM of an earlier release may have another name
		if p.set.Spec.Agent.ForkPolicy == v1.ForkPreferMainNode {
			preferring(pod, main.Spec.NodeName)
			if id := main.Annotations[contract.KeyID]; id != "" {
				pod.Annotations[contract.KeyForkFromID] = id
			}
		} else if p.set.Spec.NodeName == "" {
			pinned(pod, main.Spec.NodeName)
		}
		if wait := p.rebuildIn(m.slot); wait > 0 {
			p.again = sooner(p.again, wait)
			return
		}
	}
	if p.set.Spec.NodeName == "" {
		placement.Stamp(pod, p.claims[m.vmName()])
	}
	p.create = append(p.create, pod)
}

// recover removes the pod of a failed sub-agent, so that it is recreated, a limited number of times. A failed main VM is kept,
// because it may hold data that somebody needs.
func (p *planner) recover(m member, pod *corev1.Pod) {
	why, failed := controller.Failed(pod)
	if !failed || m.role != v1.RoleSubAgent {
		return
	}
	a := p.rebuilds[m.slot]
	if a.LastRebuild != nil && !a.LastRebuild.Before(&pod.CreationTimestamp) { // this failure is already counted; the cache is stale
		p.remove = append(p.remove, removal{pod: pod})
		return
	}
	if int(a.Rebuilds) >= len(rebuildPauses) {
		if a.Phase != phaseDeadLetter {
			p.events = append(p.events, note{corev1.EventTypeWarning, ReasonDeadLetter, "sub-agent " + pod.Name + " failed again and is not recreated until the spec changes: " + why})
		}
		return
	}
	a.Slot, a.Rebuilds, a.LastRebuild = m.slot, a.Rebuilds+1, &metav1.Time{Time: p.now}
	p.rebuilds[m.slot] = a
	p.remove = append(p.remove, removal{pod: pod})
	p.events = append(p.events, note{corev1.EventTypeWarning, ReasonRebuilding, "sub-agent " + pod.Name + " failed and is recreated: " + why})
}

// rebuildIn returns the remaining delay before a failed sub-agent is recreated.
func (p *planner) rebuildIn(slot int32) time.Duration {
	a := p.rebuilds[slot]
	if a.Rebuilds == 0 || a.LastRebuild == nil {
		return 0
	}
	pause := rebuildPauses[min(int(a.Rebuilds), len(rebuildPauses))-1]
	return max(0, pause-p.now.Sub(a.LastRebuild.Time))
}

func sooner(a, b time.Duration) time.Duration {
	if a == 0 {
		return b
	}
	return min(a, b)
}

// vmNames returns, for the cleanup, the VM names of all pods that the set has or wants.
func vmNames(set *v1.CocoonSet, pods []*corev1.Pod) []string {
	var names []string
	for _, m := range members(set) {
		if m.managed() {
			names = append(names, m.vmName())
		}
	}
	for _, pod := range pods {
		if pod.Annotations[contract.KeyManaged] == "true" {
			names = append(names, convert.VMName(pod))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// own returns the given and the recorded names, without names that VMs of the set cannot have. Users can write names to pods
// and to the set, and the registry holds the VMs of all users.
func own(set *v1.CocoonSet, names []string) []string {
	var all []string
	for _, name := range append(strings.Split(set.Annotations[contract.KeyDeleteVMNames], ","), names...) {
		if contract.MayNameOf(set.Namespace, set.Name, name) {
			all = append(all, contract.CanonicalVMName(set.Namespace, name))
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

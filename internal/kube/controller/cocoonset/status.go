package cocoonset

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/controller"
)

// phaseDeadLetter is the phase of a sub-agent that is no longer recreated.
const phaseDeadLetter = "DeadLetter"

// observe sets the status from the observed state.
func (p *planner) observe() {
	s := &p.status
	s.Agents, s.Toolboxes = nil, nil
	s.ReadyAgents, s.DesiredAgents, s.ReadyToolboxes, s.DesiredToolboxes = 0, p.set.Spec.Agent.Replicas+1, 0, int32(len(p.set.Spec.Toolboxes))
	for _, m := range p.members {
		pod := p.byName[m.name()]
		ready := pod != nil && controller.Ready(pod) && !contract.Hibernate(pod.Annotations)
		if m.role == v1.RoleToolbox {
			s.Toolboxes = append(s.Toolboxes, toolbox(m, pod))
			if ready {
				s.ReadyToolboxes++
			}
			continue
		}
		s.Agents = append(s.Agents, p.agent(m, pod))
		if ready {
			s.ReadyAgents++
		}
	}
	if p.set.Spec.Suspend || p.moving {
		if why, failed := p.mainFailed(); failed { // a failed VM cannot hibernate
			p.fail(why)
		}
		p.condition(v1.ConditionReady, false, string(s.Phase), "the VMs of the set hibernate or are hibernated"+p.awaited()+p.stateless())
		p.condition(v1.ConditionProgressing, s.Phase != v1.SetSuspended && s.Phase != v1.SetFailed, string(s.Phase), "")
		return
	}
	p.sum()
}

// awaited names the VMs whose hibernated state is not durable, each with the known reason.
func (p *planner) awaited() string {
	var all []string
	for _, m := range p.members {
		pod := p.live(m)
		if !m.managed() || pod == nil || p.asleep(m, pod) {
			continue
		}
		switch why, failed := controller.Failed(pod); {
		case failed:
			all = append(all, m.vmName()+" failed: "+why)
		case controller.Hibernated(pod) && p.noRegistry:
			all = append(all, m.vmName()+" is hibernated on its node, but the manager has no registry to confirm that the state is saved; set EPOCH_URL of the manager")
		case controller.Hibernated(pod):
			all = append(all, m.vmName()+" is hibernated, but its state is not in the registry yet")
		case controller.Life(pod).Message != "":
			all = append(all, m.vmName()+": "+controller.Life(pod).Message)
		case pod.Spec.NodeName == "":
			all = append(all, m.vmName()+" has no node yet")
		}
	}
	if more := len(all) - 5; more > 0 {
		all = append(all[:5], fmt.Sprintf("and %d more", more))
	}
	if len(all) == 0 {
		return ""
	}
	return "; " + strings.Join(all, "; ")
}

// mainFailed reports whether the main VM has failed permanently, and why.
func (p *planner) mainFailed() (why string, failed bool) {
	if main := p.live(p.members[0]); main != nil {
		return controller.Failed(main)
	}
	return "", false
}

// fail sets the phase to Failed, and emits one Event for it.
func (p *planner) fail(why string) {
	p.status.Phase = v1.SetFailed
	if p.set.Status.Phase != v1.SetFailed {
		p.events = append(p.events, note{corev1.EventTypeWarning, ReasonMainFailed, "the main VM failed: " + why})
	}
}

// stateless names the VMs that have neither a pod nor a state in the registry. They will start from their image.
func (p *planner) stateless() string {
	var names []string
	for _, m := range p.members {
		if m.managed() && p.byName[m.name()] == nil && !p.durable[m.vmName()] {
			names = append(names, m.vmName())
		}
	}
	if len(names) == 0 {
		return ""
	}
	return "; these VMs have no state and will start from their image: " + strings.Join(names, ", ")
}

// sum sets the phase and the condition of a set that is not suspended.
func (p *planner) sum() {
	s := &p.status
	main := p.live(p.members[0])
	settled := s.ReadyAgents == s.DesiredAgents && s.ReadyToolboxes == s.DesiredToolboxes && !p.leaving && len(p.create)+len(p.remove)+len(p.mark) == 0
	before := p.set.Status.Phase
	why, failed := "", false
	if len(p.remove) == 0 {
		why, failed = p.mainFailed()
	}
	switch {
	case failed:
		p.fail(why)
	case settled:
		s.Phase, s.SuspendedOn = v1.SetRunning, ""
		if before == v1.SetFailed {
			p.events = append(p.events, note{corev1.EventTypeNormal, "RecoveredFromFailure", "all VMs of the set are ready again"})
		}
	case before == v1.SetMigrating:
	case before == v1.SetSuspending || before == v1.SetSuspended || before == v1.SetWaking:
		s.Phase = v1.SetWaking
	case main == nil || !controller.Ready(main):
		s.Phase = v1.SetPending
	default:
		s.Phase = v1.SetScaling
	}
	ready, reason, text := s.ReadyAgents == s.DesiredAgents, "AllAgentsReady", ""
	if !ready {
		reason, text = "AgentsNotReady", fmt.Sprintf("%d of %d agents are ready", s.ReadyAgents, s.DesiredAgents)
	}
	if failed {
		text = "the main VM failed: " + why
	}
	p.condition(v1.ConditionReady, ready, reason, text)
	if settled || failed {
		p.condition(v1.ConditionProgressing, false, "Stable", "")
	} else {
		p.condition(v1.ConditionProgressing, true, "Reconciling", "")
	}
}

func (p *planner) condition(kind string, is bool, reason, text string) {
	c := metav1.Condition{Type: kind, Status: metav1.ConditionFalse, Reason: reason, Message: text, ObservedGeneration: p.set.Generation}
	if is {
		c.Status = metav1.ConditionTrue
	}
	c.LastTransitionTime = metav1.Time{Time: p.now}
	meta.SetStatusCondition(&p.status.Conditions, c)
}

func (p *planner) agent(m member, pod *corev1.Pod) v1.AgentStatus {
	before := p.rebuilds[m.slot]
	a := v1.AgentStatus{Slot: m.slot, Role: m.role, PodName: m.name(), VMName: m.vmName(), Rebuilds: before.Rebuilds, LastRebuild: before.LastRebuild}
	if m.role == v1.RoleSubAgent {
		a.ForkedFrom = m.pod.Annotations[contract.KeyForkFrom]
	}
	if pod == nil {
		return a
	}
	a.VMID, a.IP, a.Phase = pod.Annotations[contract.KeyID], pod.Annotations[contract.KeyIP], phase(pod)
	if _, failed := controller.Failed(pod); failed && m.role == v1.RoleSubAgent && int(before.Rebuilds) >= len(rebuildPauses) && pod.DeletionTimestamp == nil {
		a.Phase = phaseDeadLetter
	}
	return a
}

func toolbox(m member, pod *corev1.Pod) v1.ToolboxStatus {
	ask, _ := contract.ParseVMSpec(m.pod.Annotations)
	t := v1.ToolboxStatus{Name: m.toolbox.Name, PodName: m.name(), VMName: m.vmName(), VNCPort: m.toolbox.VNCPort, ConnType: connType(ask, m.toolbox.VNCPort)}
	if pod != nil {
		t.VMID, t.IP, t.Phase = pod.Annotations[contract.KeyID], pod.Annotations[contract.KeyIP], phase(pod)
	}
	return t
}

// phase returns the lifecycle of the pod's VM if it says more than the pod's phase, else the pod's phase.
func phase(pod *corev1.Pod) string {
	switch life := controller.Life(pod); {
	case pod.DeletionTimestamp != nil:
		return "Terminating"
	case life.State == contract.LifecycleHibernating:
		return "Hibernating"
	case life.State == contract.LifecycleHibernated:
		return "Hibernated"
	case life.State == contract.LifecycleFailed:
		return "Failed"
	}
	return string(pod.Status.Phase)
}

// connType returns how users connect to the guest: the requested type, else VNC if the guest has a VNC port, else the default
// of its OS.
func connType(ask contract.VMSpec, vncPort int32) contract.ConnType {
	switch {
	case ask.ConnType != "":
		return ask.ConnType
	case vncPort != 0:
		return contract.ConnVNC
	case ask.OS == contract.OSAndroid:
		return contract.ConnADB
	case ask.OS == contract.OSWindows:
		return contract.ConnRDP
	}
	return contract.ConnSSH
}

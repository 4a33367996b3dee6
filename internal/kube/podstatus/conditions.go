package podstatus

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// ConditionDiskFault is True while the host's disk does not accept the VM's writes. A pod that never had the fault lacks
// the condition.
const ConditionDiskFault corev1.PodConditionType = "vm.cocoonstack.io/DiskFault"

// DiskFault returns the reason if rec runs and its disk has a fault, otherwise "".
func DiskFault(rec *vm.Record) string {
	if fault := Fault(rec); vm.OfDisk(fault) {
		return fault
	}
	return ""
}

// Fault returns the reason if rec runs with a fault that an operator must know, otherwise "".
func Fault(rec *vm.Record) string {
	if rec != nil && rec.State == vm.StateRunning && vm.Passing(rec.Reason) {
		return rec.Reason
	}
	return ""
}

// conditions replaces our conditions in prev and leaves the others as they are.
func (v View) conditions(s corev1.PodStatus, prev []corev1.PodCondition, now time.Time) []corev1.PodCondition {
	out := slices.Clone(prev)
	set := func(kind corev1.PodConditionType, ok bool, reason, message string) {
		c := corev1.PodCondition{Type: kind, Status: corev1.ConditionFalse, Reason: reason, Message: message}
		if ok {
			c.Status = corev1.ConditionTrue
		}
		out = setCondition(out, c, now)
	}
	done := s.Phase == corev1.PodSucceeded || s.Phase == corev1.PodFailed
	if v.Record == nil && v.Verdict != nil {
		return out // the pod was refused before any step that a condition describes
	}
	running := Up(v.Record)
	set(corev1.PodReadyToStartContainers, (running || v.Asleep) && v.IP != "", "", "")
	initReason := ""
	if s.Phase == corev1.PodSucceeded {
		initReason = reasonPodCompleted
	}
	if v.initialized() || s.Phase == corev1.PodSucceeded {
		set(corev1.PodInitialized, true, initReason, "")
	} else {
		set(corev1.PodInitialized, false, reasonNotInitialized, "containers with incomplete status: ["+strings.Join(v.incomplete(), " ")+"]")
	}
	switch {
	case s.Phase == corev1.PodSucceeded:
		set(corev1.ContainersReady, false, reasonPodCompleted, "")
		set(corev1.PodReady, false, reasonPodCompleted, "")
	case done:
		set(corev1.ContainersReady, false, reasonPodFailed, "")
		set(corev1.PodReady, false, reasonPodFailed, "")
	case !running || !v.Reach.Ready || len(v.unreadyNames(s)) > 0:
		why := "containers with unready status: [" + strings.Join(v.unreadyNames(s), " ") + "]"
		switch {
		case running && v.Reach.Why != "":
			why += ": " + v.Reach.Why
		case running && v.problem() != "":
			why += ": " + v.problem()
		}
		if v.Asleep {
			why += ": the VM is hibernated"
		}
		reason := reasonNotReady
		if Paused(v.Record) {
			reason = ReasonPaused
		}
		set(corev1.ContainersReady, false, reason, why)
		set(corev1.PodReady, false, reason, why)
	default:
		set(corev1.ContainersReady, true, "", "")
		closed := v.closedGates()
		if len(closed) > 0 {
			set(corev1.PodReady, false, reasonGatesNotReady, "readiness gates not open: "+strings.Join(closed, ", "))
		} else {
			set(corev1.PodReady, true, "", "")
		}
	}
	set(corev1.PodScheduled, true, "", "")
	if fault := DiskFault(v.Record); fault != "" {
		set(ConditionDiskFault, true, fault, v.Record.Message)
	} else if slices.ContainsFunc(prev, func(c corev1.PodCondition) bool { return c.Type == ConditionDiskFault }) {
		set(ConditionDiskFault, false, "", "")
	}
	if connected := agentConnected(v.Record); connected || slices.ContainsFunc(prev, func(c corev1.PodCondition) bool { return c.Type == contract.ConditionAgent }) {
		set(contract.ConditionAgent, connected, "", "")
	}
	if l := v.Logins; l.Failure != "" {
		set(contract.ConditionLogins, false, ReasonLoginsFailed, l.Failure)
	} else if l.Known {
		set(contract.ConditionLogins, true, ReasonLoginsSet, "")
	} else if i := slices.IndexFunc(prev, func(c corev1.PodCondition) bool { return c.Type == contract.ConditionLogins }); i >= 0 { // an earlier process knew
		set(contract.ConditionLogins, prev[i].Status == corev1.ConditionTrue, prev[i].Reason, prev[i].Message)
	}
	if v.Networks != "" {
		set(contract.ConditionNetworks, false, ReasonNetworksFailed, v.Networks)
	} else if slices.ContainsFunc(prev, func(c corev1.PodCondition) bool { return c.Type == contract.ConditionNetworks }) {
		set(contract.ConditionNetworks, true, "", "")
	}
	if frozen := Up(v.Record) && v.Record.Frozen; frozen || slices.ContainsFunc(prev, func(c corev1.PodCondition) bool { return c.Type == contract.ConditionFrozen }) {
		set(contract.ConditionFrozen, frozen, "", "")
	}
	if Paused(v.Record) {
		set(contract.ConditionPaused, true, ReasonPaused, pausedText(v.Record))
	} else if slices.ContainsFunc(prev, func(c corev1.PodCondition) bool { return c.Type == contract.ConditionPaused }) {
		set(contract.ConditionPaused, false, "", "")
	}
	return out
}

// agentConnected reports whether a qemu-guest-agent answers in the guest. A guest without one never has the condition.
func agentConnected(rec *vm.Record) bool {
	return Up(rec) && rec.ImageType == vm.ImageDisk && rec.AgentReady
}

// problem returns the problem of the first container that has a known one, or "".
func (v View) problem() string {
	for _, c := range convert.Observed(v.Pod) {
		if why := v.healthOf(c.Name).Why; why != "" {
			return why
		}
	}
	return ""
}

// unreadyNames returns the app containers and sidecars that are not ready.
func (v View) unreadyNames(s corev1.PodStatus) (names []string) {
	for i, c := range v.Pod.Spec.InitContainers {
		if convert.IsSidecar(&c) && i < len(s.InitContainerStatuses) && !s.InitContainerStatuses[i].Ready {
			names = append(names, c.Name)
		}
	}
	for _, c := range s.ContainerStatuses {
		if !c.Ready {
			names = append(names, c.Name)
		}
	}
	return names
}

func (v View) closedGates() []string {
	var closed []string
	for _, g := range v.Pod.Spec.ReadinessGates {
		open := slices.ContainsFunc(v.Gates, func(c corev1.PodCondition) bool {
			return c.Type == g.ConditionType && c.Status == corev1.ConditionTrue
		})
		if !open {
			closed = append(closed, string(g.ConditionType))
		}
	}
	return closed
}

// setCondition sets c in all. It keeps the transition time if the condition's status does not change.
func setCondition(all []corev1.PodCondition, c corev1.PodCondition, now time.Time) []corev1.PodCondition {
	c.LastTransitionTime = Stamp(now)
	for i := range all {
		if all[i].Type != c.Type {
			continue
		}
		if all[i].Status == c.Status {
			c.LastTransitionTime = all[i].LastTransitionTime
		}
		c.LastProbeTime, c.ObservedGeneration = all[i].LastProbeTime, all[i].ObservedGeneration
		all[i] = c
		return all
	}
	return append(all, c)
}

package kubevirt

import (
	"cmp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
)

// Reasons of conditions of a VirtualMachineInstance.
const (
	ReasonNotSupported = "NotSupported" // Synchronized: the instance asks for what Cocoon refuses
	ReasonPodGone      = "PodDeleted"
	ReasonNoClaim      = "FailedPvcNotFound" // Synchronized: the claim of a volume does not exist
	ReasonPausedByUser = "PausedByUser"      // Paused
)

// FSFrozen is the value of status.fsFreezeStatus while the file systems of the guest are frozen.
const FSFrozen = "frozen"

// Quiet is how long after the creation of an instance the steps until its guest runs are not told. A guest that is up until then costs one write
// of the instance and one of its machine. Times of the API have whole seconds.
const Quiet = 2 * time.Second

// Phase returns the phase of an instance whose pod is pod.
func Phase(pod *corev1.Pod) v1.VirtualMachineInstancePhase {
	switch {
	case pod.Status.Phase == corev1.PodSucceeded:
		return v1.Succeeded
	case pod.Status.Phase == corev1.PodFailed:
		return v1.Failed
	case pod.Status.Phase == corev1.PodRunning:
		return v1.Running
	case pod.Spec.NodeName != "":
		return v1.Scheduled
	}
	return v1.Scheduling
}

// Observe returns the status of vmi, whose pod is pod, at now. It changes nothing of the old status that is still true.
func Observe(vmi *v1.VirtualMachineInstance, pod *corev1.Pod, now time.Time) v1.VirtualMachineInstanceStatus {
	s := *vmi.Status.DeepCopy()
	SetPhase(&s, Phase(pod), now)
	s.NodeName, s.QOSClass = pod.Spec.NodeName, nil
	if q := pod.Status.QOSClass; q != "" {
		s.QOSClass = &q
	}
	s.ActivePods = map[types.UID]string{pod.UID: pod.Spec.NodeName}
	s.Machine = &v1.Machine{Type: "q35"}
	s.CurrentCPUTopology = shownTopology(&vmi.Spec)
	observeSize(&s, vmi, pod, now)
	s.Interfaces = interfaces(&vmi.Spec, pod)
	s.VolumeStatus = append(hotplugged(pod), dumps(vmi, pod)...)
	s.KernelBootStatus = kernelBootStatus(pod)
	s.VSOCKCID = nil
	if cid := contract.VSOCKCID(pod.Annotations); cid != 0 {
		s.VSOCKCID = &cid
	}
	ready := condition(pod, corev1.PodReady)
	set(&s, v1.VirtualMachineInstanceReady, ready.Status == corev1.ConditionTrue, cmp.Or(ready.Reason, "GuestNotRunning"), ready.Message, now)
	if placed := condition(pod, corev1.PodScheduled); placed.Status == corev1.ConditionFalse {
		set(&s, v1.VirtualMachineInstanceConditionType(corev1.PodScheduled), false, placed.Reason, placed.Message, now)
	} else {
		drop(&s, v1.VirtualMachineInstanceConditionType(corev1.PodScheduled))
	}
	if paused := condition(pod, contract.ConditionPaused); paused.Status == corev1.ConditionTrue {
		set(&s, v1.VirtualMachineInstancePaused, true, ReasonPausedByUser, "VMI was paused by user", now)
	} else {
		drop(&s, v1.VirtualMachineInstancePaused)
	}
	s.FSFreezeStatus = ""
	if condition(pod, contract.ConditionFrozen).Status == corev1.ConditionTrue {
		s.FSFreezeStatus = FSFrozen
	}
	if condition(pod, contract.ConditionAgent).Status == corev1.ConditionTrue {
		set(&s, v1.VirtualMachineInstanceAgentConnected, true, "", "", now)
	} else {
		drop(&s, v1.VirtualMachineInstanceAgentConnected)
	}
	switch logins := condition(pod, contract.ConditionLogins); logins.Status {
	case corev1.ConditionTrue, corev1.ConditionFalse:
		set(&s, v1.VirtualMachineInstanceAccessCredentialsSynchronized, logins.Status == corev1.ConditionTrue, logins.Reason, logins.Message, now)
	default:
		drop(&s, v1.VirtualMachineInstanceAccessCredentialsSynchronized)
	}
	if why := waiting(pod); why != nil {
		set(&s, v1.VirtualMachineInstanceSynchronized, false, why.Reason, why.Message, now)
	} else if why := unconnected(pod); why != "" {
		set(&s, v1.VirtualMachineInstanceSynchronized, false, ReasonNoNetwork, why, now)
	} else {
		drop(&s, v1.VirtualMachineInstanceSynchronized)
	}
	set(&s, v1.VirtualMachineInstanceIsMigratable, false, v1.VirtualMachineInstanceReasonNotMigratable, "nodes of Cocoon do not migrate VMs", now)
	return s
}

// shownTopology returns how the guest sees its CPUs.
func shownTopology(s *v1.VirtualMachineInstanceSpec) *v1.CPUTopology {
	t := guestTopology(s)
	if t == (contract.Topology{}) {
		t = contract.Topology{Sockets: 1, Cores: int(cpus(s)), Threads: 1}
	}
	return &v1.CPUTopology{Sockets: uint32(t.Sockets), Cores: uint32(t.Cores), Threads: uint32(t.Threads)} //nolint:gosec // at most 255
}

// waiting returns why the VM is not created yet, nil if nothing is wrong.
func waiting(pod *corev1.Pod) *corev1.ContainerStateWaiting {
	for _, c := range pod.Status.ContainerStatuses {
		if w := c.State.Waiting; w != nil && w.Message != "" {
			return w
		}
	}
	return nil
}

// SetPhase sets the phase and notes when it began.
func SetPhase(s *v1.VirtualMachineInstanceStatus, phase v1.VirtualMachineInstancePhase, now time.Time) {
	if s.Phase == phase {
		return
	}
	s.Phase = phase
	s.PhaseTransitionTimestamps = append(s.PhaseTransitionTimestamps, v1.VirtualMachineInstancePhaseTransitionTimestamp{Phase: phase, PhaseTransitionTimestamp: metav1.NewTime(now)})
}

// Ran reports whether the instance has been Running.
func Ran(vmi *v1.VirtualMachineInstance) bool {
	return slices.ContainsFunc(vmi.Status.PhaseTransitionTimestamps, func(t v1.VirtualMachineInstancePhaseTransitionTimestamp) bool { return t.Phase == v1.Running })
}

// Fail returns the status of an instance that has failed, with the reason.
func Fail(vmi *v1.VirtualMachineInstance, reason, message string, now time.Time) v1.VirtualMachineInstanceStatus {
	s := *vmi.Status.DeepCopy()
	SetPhase(&s, v1.Failed, now)
	s.Reason = reason
	set(&s, v1.VirtualMachineInstanceReady, false, reason, message, now)
	set(&s, v1.VirtualMachineInstanceSynchronized, false, reason, message, now)
	return s
}

// Wait returns the status of an instance that cannot have its pod yet.
func Wait(vmi *v1.VirtualMachineInstance, reason, message string, now time.Time) v1.VirtualMachineInstanceStatus {
	s := *vmi.Status.DeepCopy()
	SetPhase(&s, v1.Pending, now)
	set(&s, v1.VirtualMachineInstanceSynchronized, false, reason, message, now)
	return s
}

// Condition returns the condition of vmi, nil if it has none of the kind.
func Condition(vmi *v1.VirtualMachineInstance, kind v1.VirtualMachineInstanceConditionType) *v1.VirtualMachineInstanceCondition {
	for i := range vmi.Status.Conditions {
		if vmi.Status.Conditions[i].Type == kind {
			return &vmi.Status.Conditions[i]
		}
	}
	return nil
}

func set(s *v1.VirtualMachineInstanceStatus, kind v1.VirtualMachineInstanceConditionType, yes bool, reason, message string, now time.Time) {
	c := v1.VirtualMachineInstanceCondition{Type: kind, Status: corev1.ConditionFalse, Reason: reason, Message: message, LastTransitionTime: metav1.NewTime(now)}
	if yes {
		c.Status = corev1.ConditionTrue
		if kind != v1.VirtualMachineInstancePaused { // nothing is wrong
			c.Reason, c.Message = "", ""
		}
	}
	s.Conditions = SetCondition(s.Conditions, c, func(c *v1.VirtualMachineInstanceCondition) (v1.VirtualMachineInstanceConditionType, corev1.ConditionStatus, *metav1.Time) {
		return c.Type, c.Status, &c.LastTransitionTime
	})
}

// SetCondition returns all with c in the place of the condition of its type. c keeps the time of the last transition if the status is the
// same. parts returns type, status and that time of a condition: each group of KubeVirt's API has a type of its own for conditions.
func SetCondition[C any, T ~string](all []C, c C, parts func(*C) (T, corev1.ConditionStatus, *metav1.Time)) []C {
	kind, status, at := parts(&c)
	for i := range all {
		if wasKind, was, since := parts(&all[i]); wasKind == kind {
			if was == status {
				*at = *since
			}
			all[i] = c
			return all
		}
	}
	return append(all, c)
}

func drop(s *v1.VirtualMachineInstanceStatus, kind v1.VirtualMachineInstanceConditionType) {
	s.Conditions = slices.DeleteFunc(s.Conditions, func(c v1.VirtualMachineInstanceCondition) bool { return c.Type == kind })
}

// condition returns the condition of the pod, an empty one if it has none of the kind.
func condition(pod *corev1.Pod, kind corev1.PodConditionType) corev1.PodCondition {
	for _, c := range pod.Status.Conditions {
		if c.Type == kind {
			return c
		}
	}
	return corev1.PodCondition{}
}

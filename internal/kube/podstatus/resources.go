package podstatus

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
)

// resources shows in out what the containers of list were created with. A VM keeps its size, so a later change of the pod shows
// only in spec. prev is the status before.
func resources(out, prev []corev1.ContainerStatus, list []corev1.Container) {
	for i := range out {
		c := &out[i]
		at := slices.IndexFunc(list, func(s corev1.Container) bool { return s.Name == c.Name })
		if c.ContainerID == "" || at < 0 {
			continue
		}
		spec := list[at].Resources.DeepCopy()
		c.Resources = &corev1.ResourceRequirements{Limits: spec.Limits, Requests: spec.Requests}
		for _, b := range prev {
			if b.Name == c.Name && b.Resources != nil && VMOf(b.ContainerID) == VMOf(c.ContainerID) {
				c.Resources = b.Resources.DeepCopy()
			}
		}
		c.AllocatedResources = c.Resources.Requests.DeepCopy()
	}
}

// resized reports whether somebody has resized a container of list since it was created.
func resized(out []corev1.ContainerStatus, list []corev1.Container) bool {
	return slices.ContainsFunc(out, func(c corev1.ContainerStatus) bool {
		return c.Resources != nil && slices.ContainsFunc(list, func(s corev1.Container) bool {
			return s.Name == c.Name && !apiequality.Semantic.DeepEqual(
				corev1.ResourceRequirements{Limits: s.Resources.Limits, Requests: s.Resources.Requests}, *c.Resources)
		})
	})
}

// noResize is the message of the condition of a pod that was resized.
const noResize = "the CPUs and memory of a VM do not change while it exists; create the pod again"

// resizing sets the condition that says that a resize is not possible, and removes it when the pod has its old size again.
func (v View) resizing(s corev1.PodStatus, conditions []corev1.PodCondition, now time.Time) []corev1.PodCondition {
	if v.Record != nil && (resized(s.ContainerStatuses, v.Pod.Spec.Containers) || resized(s.InitContainerStatuses, v.Pod.Spec.InitContainers)) {
		return setCondition(conditions, corev1.PodCondition{
			Type: corev1.PodResizePending, Status: corev1.ConditionTrue, Reason: corev1.PodReasonInfeasible, Message: noResize,
		}, now)
	}
	return slices.DeleteFunc(conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodResizePending })
}

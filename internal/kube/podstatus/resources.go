package podstatus

import (
	"cmp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// Resize is how far the containers of a pod have the resources of its spec. The status shows what they have.
type Resize struct {
	Made   *corev1.Pod // as it was when its VM was created; nil: as it is now
	Done   bool        // the containers of the VM have the resources of the spec by now
	Failed string      // why the last attempt to give them these failed, and is repeated
	Later  string      // why the node has no room for them now
	Never  string      // why the guest cannot give them these; see Infeasible too
}

// resources shows in out what the containers of list have: what they were created with, until a resize is done. prev is the status
// before. of returns the list in a pod.
func (v View) resources(out, prev []corev1.ContainerStatus, of func(*corev1.Pod) []corev1.Container) {
	list := of(v.Pod)
	if v.Resize.Made != nil && !v.Resize.Done {
		list = of(v.Resize.Made)
	}
	for i := range out {
		c := &out[i]
		at := slices.IndexFunc(list, func(s corev1.Container) bool { return s.Name == c.Name })
		if c.ContainerID == "" || at < 0 {
			continue
		}
		spec := list[at].Resources.DeepCopy()
		c.Resources = &corev1.ResourceRequirements{Limits: spec.Limits, Requests: spec.Requests}
		for _, b := range prev {
			if b.Name == c.Name && b.Resources != nil && VMOf(b.ContainerID) == VMOf(c.ContainerID) && !v.Resize.Done {
				c.Resources = b.Resources.DeepCopy()
			}
		}
		c.AllocatedResources = c.Resources.Requests.DeepCopy()
	}
}

// Resizing returns the containers of pod that have other resources than those of the spec, according to its status. A container
// that its guest has not reported yet has those of the spec.
func Resizing(pod *corev1.Pod, status corev1.PodStatus) (names []string) {
	for _, part := range []struct {
		list []corev1.Container
		all  []corev1.ContainerStatus
	}{{pod.Spec.InitContainers, status.InitContainerStatuses}, {pod.Spec.Containers, status.ContainerStatuses}} {
		for _, c := range part.all {
			at := slices.IndexFunc(part.list, func(s corev1.Container) bool { return s.Name == c.Name })
			if c.Resources != nil && at >= 0 && !sameResources(part.list[at].Resources, *c.Resources) {
				names = append(names, c.Name)
			}
		}
	}
	return names
}

func sameResources(a, b corev1.ResourceRequirements) bool {
	return apiequality.Semantic.DeepEqual(a.Limits, b.Limits) && apiequality.Semantic.DeepEqual(a.Requests, b.Requests)
}

// RestartsToResize reports whether c must be started again to have the resources of its spec instead of those in status.
func RestartsToResize(c *corev1.Container, status corev1.PodStatus) bool {
	for _, s := range slices.Concat(status.InitContainerStatuses, status.ContainerStatuses) {
		if s.Name != c.Name || s.Resources == nil {
			continue
		}
		return slices.ContainsFunc(c.ResizePolicy, func(p corev1.ContainerResizePolicy) bool {
			return p.RestartPolicy == corev1.RestartContainer &&
				(differ(c.Resources.Limits, s.Resources.Limits, p.ResourceName) || differ(c.Resources.Requests, s.Resources.Requests, p.ResourceName))
		})
	}
	return false
}

func differ(a, b corev1.ResourceList, name corev1.ResourceName) bool {
	x, y := a[name], b[name]
	return x.Cmp(y) != 0
}

// Infeasible returns why rec cannot give the containers of pod other resources while it exists; "": it can.
func Infeasible(pod *corev1.Pod, rec *vm.Record) string {
	switch {
	case rec.ImageType == vm.ImageDisk && rec.Spec.CanGrow():
		if _, err := rec.Spec.Grown(convert.Size(pod)); err != nil {
			return err.Error()
		}
		return ""
	case rec.ImageType == vm.ImageDisk:
		return "the system of this machine is its own, and the CPUs and memory of a VM do not change while it exists; create the pod again"
	case len(rec.Containers) == 0:
		return "this VM has a process instead of containers, and the CPUs and memory of a VM do not change while it exists; create the pod again"
	}
	return convert.Outgrown(pod, *rec)
}

// resizing sets the conditions of a resize that goes on or is not possible, and removes them when the containers have the
// resources of the spec.
func (v View) resizing(s corev1.PodStatus, conditions []corev1.PodCondition, now time.Time) []corev1.PodCondition {
	c := corev1.PodCondition{Type: corev1.PodResizeInProgress, Status: corev1.ConditionTrue}
	never := ""
	if v.Record != nil {
		never = cmp.Or(Infeasible(v.Pod, v.Record), v.Resize.Never)
	}
	switch {
	case v.Record == nil || len(Resizing(v.Pod, s)) == 0:
		c.Type = ""
	case never != "":
		c.Type, c.Reason, c.Message = corev1.PodResizePending, corev1.PodReasonInfeasible, never
	case v.Asleep:
		c.Type, c.Reason, c.Message = corev1.PodResizePending, corev1.PodReasonDeferred, "the VM is hibernated; its containers are resized when it wakes"
	case v.Resize.Later != "":
		c.Type, c.Reason, c.Message = corev1.PodResizePending, corev1.PodReasonDeferred, v.Resize.Later
	case v.Resize.Failed != "":
		c.Reason, c.Message = corev1.PodReasonError, v.Resize.Failed
	}
	conditions = slices.DeleteFunc(conditions, func(o corev1.PodCondition) bool {
		return o.Type != c.Type && (o.Type == corev1.PodResizePending || o.Type == corev1.PodResizeInProgress)
	})
	if c.Type == "" {
		return conditions
	}
	conditions = setCondition(conditions, c, now)
	at := slices.IndexFunc(conditions, func(o corev1.PodCondition) bool { return o.Type == c.Type })
	conditions[at].ObservedGeneration = v.Pod.Generation
	return conditions
}

package kubevirt

import (
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/vm"
)

// ConfigName is the name of the object that has the configuration of KubeVirt, as of KubeVirt's own installation.
var ConfigName = types.NamespacedName{Namespace: "kubevirt", Name: "kubevirt"}

// cpuShare is how many thousandths of a CPU the pod of an instance requests for each CPU of its guest, as in KubeVirt.
const cpuShare = 100

// ReasonNotResized is the reason of a condition that says why a guest has not got what its instance says.
const ReasonNotResized = "ResizeRefused"

// maxSockets returns the most sockets that the guest can have while it runs; 0: their number stays. What the instance requests itself does not
// follow the number of CPUs, so the scheduler would not count them.
func maxSockets(s *v1.VirtualMachineInstanceSpec) int {
	c := s.Domain.CPU
	if c == nil || c.MaxSockets == 0 || guestTopology(s).Sockets == 0 {
		return 0
	}
	for _, list := range []corev1.ResourceList{s.Domain.Resources.Requests, s.Domain.Resources.Limits} {
		if q := list[corev1.ResourceCPU]; !q.IsZero() {
			return 0
		}
	}
	return int(min(c.MaxSockets, maxCPUs+1))
}

// maxMemory returns how many bytes of memory the running guest can have at most. 0 means that its memory stays as it is.
func maxMemory(s *v1.VirtualMachineInstanceSpec) int64 {
	if m := s.Domain.Memory; m != nil && m.MaxGuest != nil && m.Guest != nil && m.Hugepages == nil {
		return m.MaxGuest.Value()
	}
	return 0
}

// growth refuses a maximum that no guest can have.
func (c *check) growth() {
	t := vm.Topology(guestTopology(c.spec))
	size, _ := memory(c.spec)
	domain := c.at.Child("domain")
	if n := maxSockets(c.spec); n > 0 {
		if err := (vm.Growth{Sockets: n}).Validate(vm.Size{CPUs: int(cpus(c.spec)), Memory: size}, t); err != nil {
			c.invalid(domain.Child("cpu", "maxSockets"), n, err.Error())
		}
	}
	if n := maxMemory(c.spec); n > 0 {
		if err := (vm.Growth{Memory: n}).Validate(vm.Size{CPUs: 1, Memory: size}, vm.Topology{}); err != nil {
			c.invalid(domain.Child("memory", "maxGuest"), n, err.Error())
		}
	}
}

// SpecOf returns the spec that an instance like vmi has when it is made from a template now.
func SpecOf(vmi *v1.VirtualMachineInstance, template *v1.VirtualMachineInstanceTemplateSpec) v1.VirtualMachineInstanceSpec {
	spec := *template.Spec.DeepCopy()
	if _, asks := vmi.Spec.Domain.Resources.Requests[corev1.ResourceMemory]; asks { // one of an earlier release may not
		requestMemory(&spec)
	}
	return spec
}

// requestMemory makes an instance that requests no memory request that of its guest, as KubeVirt does: programs such as virtctl read the request
// where the size of the guest is meant. The pod is the same.
func requestMemory(s *v1.VirtualMachineInstanceSpec) {
	size, ok := memory(s)
	if _, asks := s.Domain.Resources.Requests[corev1.ResourceMemory]; asks || !ok {
		return
	}
	requests := corev1.ResourceList{corev1.ResourceMemory: *resource.NewQuantity(size, resource.BinarySI)}
	maps.Copy(requests, s.Domain.Resources.Requests)
	s.Domain.Resources.Requests = requests
}

// Live returns the spec of a running instance with the CPUs, the memory and the interfaces of want, if nothing else differs and the guest can get them
// while it runs. Otherwise why says what stands against it; "" if more than these differ.
func Live(is, want v1.VirtualMachineInstanceSpec) (next *v1.VirtualMachineInstanceSpec, why string) {
	want = Known(want, is)
	next = is.DeepCopy()
	next.Networks, next.Domain.Devices.Interfaces = want.Networks, want.Domain.Devices.Interfaces
	if c, w := next.Domain.CPU, want.Domain.CPU; c != nil && w != nil {
		c.Sockets = w.Sockets
	}
	if m, w := next.Domain.Memory, want.Domain.Memory; m != nil && w != nil && m.Guest != nil && w.Guest != nil {
		guest := w.Guest.DeepCopy()
		m.Guest = &guest
	}
	was, _ := memory(&is)
	now, _ := memory(next)
	q, asks := want.Domain.Resources.Requests[corev1.ResourceMemory]
	if _, asked := next.Domain.Resources.Requests[corev1.ResourceMemory]; asks && asked && now > was { // what it requests grows with its guest
		next.Domain.Resources.Requests[corev1.ResourceMemory] = q
	}
	if !apiequality.Semantic.DeepEqual(*next, want) {
		return nil, ""
	}
	if ok, why := liveInterfaces(&is, next); !ok {
		return nil, why
	}
	switch more := cpus(next) - cpus(&is); {
	case more < 0 || now < was:
		return nil, "CPUs and memory are not taken from a running guest"
	case more > 0 && maxSockets(&is) == 0:
		return nil, "the instance was started without cpu.maxSockets, or requests a number of CPUs itself, so its guest cannot get CPUs while it runs"
	case more > 0 && guestTopology(next).Sockets > maxSockets(&is):
		return nil, fmt.Sprintf("the guest can have %d sockets while it runs", maxSockets(&is))
	case now > was && maxMemory(&is) == 0:
		return nil, "the instance was started without memory.maxGuest, so its guest cannot get memory while it runs"
	case now > was && now > maxMemory(&is):
		return nil, "the guest can have " + is.Domain.Memory.MaxGuest.String() + " of memory while it runs"
	case (now-was)%vm.MemoryStep != 0:
		return nil, fmt.Sprintf("the memory of a running guest grows by multiples of %d MiB", vm.MemoryStep>>20)
	}
	return next, ""
}

// Resized returns the resources that the container of the pod has to have so that the guest has the size of the instance; nil: it has them.
func Resized(vmi *v1.VirtualMachineInstance, pod *corev1.Pod) *corev1.ResourceRequirements {
	if maxSockets(&vmi.Spec) == 0 && maxMemory(&vmi.Spec) == 0 || len(pod.Spec.Containers) == 0 || pod.DeletionTimestamp != nil {
		return nil
	}
	size, _ := memory(&vmi.Spec)
	want, is := resources(&vmi.Spec, size), &pod.Spec.Containers[0].Resources
	next := is.DeepCopy()
	same := true
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
		for _, l := range []struct{ want, is corev1.ResourceList }{{want.Requests, next.Requests}, {want.Limits, next.Limits}} {
			if q, ok := l.want[name]; ok && l.is != nil && q.Cmp(l.is[name]) != 0 {
				same, l.is[name] = false, q
			}
		}
	}
	if same {
		return nil
	}
	return next
}

// observeSize says in s what the guest has been given, according to the status of its pod, and what it has not got yet.
func observeSize(s *v1.VirtualMachineInstanceStatus, vmi *v1.VirtualMachineInstance, pod *corev1.Pod, now time.Time) {
	size, _ := memory(&vmi.Spec)
	want := resource.NewQuantity(size, resource.BinarySI)
	sockets, given := int64(s.CurrentCPUTopology.Sockets), *want
	if maxSockets(&vmi.Spec) > 0 || maxMemory(&vmi.Spec) > 0 {
		for _, c := range pod.Status.ContainerStatuses {
			if c.Name != Container || c.Resources == nil {
				continue
			}
			if each := int64(s.CurrentCPUTopology.Cores) * int64(s.CurrentCPUTopology.Threads) * cpuShare; maxSockets(&vmi.Spec) > 0 && each > 0 {
				sockets = c.Resources.Requests.Cpu().MilliValue() / each
			}
			if q, ok := c.Resources.Limits[corev1.ResourceMemory]; ok && maxMemory(&vmi.Spec) > 0 {
				given = q.DeepCopy()
			}
		}
	}
	atBoot := given
	if s.Memory != nil && s.Memory.GuestAtBoot != nil {
		atBoot = *s.Memory.GuestAtBoot
	}
	wanted := s.CurrentCPUTopology.Sockets
	if sockets > 0 && sockets <= maxCPUs {
		s.CurrentCPUTopology.Sockets = uint32(sockets)
	}
	s.Memory = &v1.MemoryStatus{GuestAtBoot: &atBoot, GuestCurrent: &given, GuestRequested: want}
	pending := condition(pod, corev1.PodResizePending)
	if pending.Status != corev1.ConditionTrue {
		if pending = condition(pod, corev1.PodResizeInProgress); pending.Reason != corev1.PodReasonError {
			pending = corev1.PodCondition{}
		}
	}
	waits := func(kind v1.VirtualMachineInstanceConditionType, differs bool) {
		c := Condition(&v1.VirtualMachineInstance{Status: *s}, kind)
		switch {
		case !differs:
			drop(s, kind)
		case pending.Reason != "":
			set(s, kind, false, pending.Reason, pending.Message, now)
		case c == nil || c.Reason != ReasonNotResized: // that one stays until the instance or the pod changes
			set(s, kind, true, "", "", now)
		}
	}
	waits(v1.VirtualMachineInstanceVCPUChange, s.CurrentCPUTopology.Sockets != wanted)
	waits(v1.VirtualMachineInstanceMemoryChange, given.Cmp(*want) != 0)
}

// NotResized says in s why the API server refuses to resize the pod.
func NotResized(s *v1.VirtualMachineInstanceStatus, why string, now time.Time) {
	for _, kind := range []v1.VirtualMachineInstanceConditionType{v1.VirtualMachineInstanceVCPUChange, v1.VirtualMachineInstanceMemoryChange} {
		if Condition(&v1.VirtualMachineInstance{Status: *s}, kind) != nil {
			set(s, kind, false, ReasonNotResized, why, now)
		}
	}
}

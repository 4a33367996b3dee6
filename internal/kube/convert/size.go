package convert

import (
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// hugePages is the resource that the memory of a VM may be.
func hugePages(p vm.HugePages) corev1.ResourceName {
	return corev1.ResourceName(corev1.ResourceHugePagesPrefix + p.String())
}

// hugePagesOf returns the size of the huge pages that the container of a VM has as its limit; 0: none.
func hugePagesOf(pod *corev1.Pod) vm.HugePages {
	for _, p := range vm.AllHugePages {
		if q, ok := quantity(pod, hugePages(p)); ok && q > 0 {
			return p
		}
	}
	return 0
}

// size is the size of a VM; 0 means the engine's default.
type size struct {
	cpus    int
	memory  int64 // bytes
	storage int64 // bytes
}

// sizeOf returns the size of pod's VM. It uses the limits, else the requests, of the container, else those of the pod. With
// several containers it uses those of the pod, else the sum that the containers need, but not less than the default if one of them
// does not say what it needs. Annotations take precedence, ours over
// Virtlet's.
func sizeOf(pod *corev1.Pod, ask contract.VMSpec) size {
	s := size{cpus: DefaultCPUs, memory: DefaultMemory}
	if q, ok := quantity(pod, corev1.ResourceCPU); ok {
		s.cpus = int(min(max(q, 1), math.MaxInt32))
	}
	if q, ok := quantity(pod, corev1.ResourceMemory); ok {
		s.memory = max(q, vm.MinMemory)
	}
	if p := hugePagesOf(pod); p > 0 { // instead of other memory
		s.memory, _ = quantity(pod, hugePages(p))
	}
	if unbounded(pod) {
		s.memory = max(s.memory, DefaultMemory)
	}
	if q, ok := quantity(pod, corev1.ResourceEphemeralStorage); ok {
		s.storage = max(q, vm.MinStorage)
	}
	old, _ := contract.ParseVirtlet(pod.Annotations)
	if old.VCPUs > 0 {
		s.cpus = old.VCPUs
	}
	if n := sharedCPUs(pod); n > 0 {
		s.cpus = n
	}
	if !old.RootVolumeSize.IsZero() {
		s.storage = max(old.RootVolumeSize.Value(), vm.MinStorage)
	}
	if !ask.Storage.IsZero() {
		s.storage = ask.Storage.Value()
	}
	return s
}

// Size returns the size of pod's VM, of which a part can change while it runs.
func Size(pod *corev1.Pod) vm.Size {
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	s := sizeOf(pod, ask)
	return vm.Size{CPUs: s.cpus, Memory: s.memory}
}

// sharedCPUs returns how many CPUs the guest of pod has by what the pod requests; 0: that does not say it.
func sharedCPUs(pod *corev1.Pod) int {
	ask, _ := contract.ParseMachine(pod.Annotations)
	c := container(pod)
	if ask.Hardware.CPUShare <= 0 || c == nil {
		return 0
	}
	return int(min(c.Resources.Requests.Cpu().MilliValue()/ask.Hardware.CPUShare, math.MaxInt32))
}

// unbounded reports whether pod has several containers, and nothing says how much memory one of those needs that run together.
func unbounded(pod *corev1.Pod) bool {
	if r := pod.Spec.Resources; !Several(pod) || r != nil && len(r.Limits)+len(r.Requests) > 0 {
		return false
	}
	return slices.ContainsFunc(containers(pod), func(c *corev1.Container) bool {
		return isRunning(pod, c) && c.Resources.Limits.Memory().IsZero() && c.Resources.Requests.Memory().IsZero()
	})
}

// isRunning reports whether c, a container of pod, runs together with the other ones: it is no plain init container.
func isRunning(pod *corev1.Pod, c *corev1.Container) bool {
	return IsSidecar(c) || !slices.ContainsFunc(pod.Spec.InitContainers, func(i corev1.Container) bool { return i.Name == c.Name })
}

// quantity returns the amount of one resource, rounded up to a whole unit. An amount of zero counts as not set.
func quantity(pod *corev1.Pod, name corev1.ResourceName) (int64, bool) {
	in := func(lists ...corev1.ResourceList) (resource.Quantity, bool) {
		for _, l := range lists {
			if q, ok := l[name]; ok && !q.IsZero() {
				return q, true
			}
		}
		return resource.Quantity{}, false
	}
	var whole corev1.ResourceRequirements
	if pod.Spec.Resources != nil {
		whole = *pod.Spec.Resources
	}
	if Several(pod) {
		q, ok := in(whole.Limits)
		if !ok {
			q, ok = sum(pod, func(c *corev1.Container) (resource.Quantity, bool) {
				return in(c.Resources.Limits, c.Resources.Requests)
			})
		}
		if !ok {
			q, ok = in(whole.Requests)
		}
		return q.Value(), ok
	}
	c := container(pod)
	if c == nil {
		c = &corev1.Container{}
	}
	q, ok := in(c.Resources.Limits, whole.Limits, c.Resources.Requests, whole.Requests)
	return q.Value(), ok
}

package convert

import (
	"math"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// size is what a VM gets; 0 means the engine's default.
type size struct {
	cpus    int
	memory  int64 // bytes
	storage int64 // bytes
}

// sizeOf reads the limits, else the requests, of the container and then of the pod as a whole. Annotations win over them,
// our own over Virtlet's.
func sizeOf(pod *corev1.Pod, ask contract.VMSpec) size {
	s := size{cpus: DefaultCPUs, memory: DefaultMemory}
	if q, ok := quantity(pod, corev1.ResourceCPU); ok {
		s.cpus = int(min(max(q, 1), math.MaxInt32))
	}
	if q, ok := quantity(pod, corev1.ResourceMemory); ok {
		s.memory = max(q, vm.MinMemory)
	}
	if q, ok := quantity(pod, corev1.ResourceEphemeralStorage); ok {
		s.storage = max(q, vm.MinStorage)
	}
	old, _ := contract.ParseVirtlet(pod.Annotations)
	if old.VCPUs > 0 {
		s.cpus = old.VCPUs
	}
	if !old.RootVolumeSize.IsZero() {
		s.storage = max(old.RootVolumeSize.Value(), vm.MinStorage)
	}
	if !ask.Storage.IsZero() {
		s.storage = ask.Storage.Value()
	}
	return s
}

// quantity returns the amount of one resource, rounded up to a whole unit. Zero counts as not given.
func quantity(pod *corev1.Pod, name corev1.ResourceName) (int64, bool) {
	var lists []corev1.ResourceList
	if c := container(pod); c != nil {
		lists = append(lists, c.Resources.Limits)
	}
	if pod.Spec.Resources != nil {
		lists = append(lists, pod.Spec.Resources.Limits)
	}
	if c := container(pod); c != nil {
		lists = append(lists, c.Resources.Requests)
	}
	if pod.Spec.Resources != nil {
		lists = append(lists, pod.Spec.Resources.Requests)
	}
	for _, l := range lists {
		if q, ok := l[name]; ok && !q.IsZero() {
			return q.Value(), true
		}
	}
	return 0, false
}

package convert

import (
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// growth is how far a guest of this size can grow on a node with most: what a pod may get while it runs. Each CPU that the guest may get takes
// memory of it.
func growth(now, most vm.Size) *vm.Hardware {
	const times = 4
	h := vm.Hardware{Topology: vm.Topology{Sockets: now.CPUs, Cores: 1, Threads: 1}}
	if n := min(times*now.CPUs, most.CPUs, h.Topology.Room()); n > now.CPUs {
		h.Growth.Sockets = n
	}
	if more := (min(times*now.Memory, most.Memory, vm.MaxMemory) - now.Memory) / vm.MemoryStep * vm.MemoryStep; now.Memory > 0 && more > 0 {
		h.Growth.Memory = now.Memory + more
	}
	if h.Growth == (vm.Growth{}) {
		return nil
	}
	return &h
}

// Sized returns the size that the VM of r must have for a pod with these resources, which are the sum over its containers. A VM never shrinks. A
// resource without a limit takes nothing.
// Errors: FailedPrecondition with the remedy, if the VM cannot grow so far while it runs.
func Sized(r vm.Record, size *cri.LinuxContainerResources) (vm.Size, error) {
	const advice = "delete the pod, so that it is created again with that size, or resize it back"
	to := r.Spec.Size()
	if n := wholeCPUs(size); n > r.Spec.MaxCPUs() {
		return to, errdefs.Preconditionf("the pod needs %d CPUs, and its VM can have %d: %s", n, r.Spec.MaxCPUs(), advice)
	} else if n > to.CPUs {
		to.CPUs = n
	}
	if n := memory(size, Node{}); n > r.Spec.MaxMemory() {
		return to, errdefs.Preconditionf("the pod needs a VM with %d bytes of memory, %d of them for the guest itself, and its VM can have %d: %s", n, int64(GuestOverhead), r.Spec.MaxMemory(), advice)
	} else if n > to.Memory {
		to.Memory += min((n-to.Memory+vm.MemoryStep-1)/vm.MemoryStep*vm.MemoryStep, r.Spec.MaxMemory()-to.Memory)
	}
	return to, nil
}

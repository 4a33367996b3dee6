package convert

import (
	"fmt"
	"math"
	"math/bits"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"cocoonstack.io/cocoon/internal/vm"
)

// The OOM score adjustments of a kubelet. A burstable container is between the other two.
const (
	oomGuaranteed = -997
	oomBestEffort = 1000

	nodeCritical = "system-node-critical" // the priority class of pods that a node needs
)

// resources returns what c, a container of pod, may use, as a kubelet calculates it.
func resources(pod *corev1.Pod, c *corev1.Container, node Node) *vm.Resources {
	var whole corev1.ResourceList
	if pod.Spec.Resources != nil {
		whole = pod.Spec.Resources.Limits
	}
	limit := func(name corev1.ResourceName) resource.Quantity {
		if q, ok := c.Resources.Limits[name]; ok {
			return q
		}
		return whole[name]
	}
	cpu, memory := limit(corev1.ResourceCPU), limit(corev1.ResourceMemory)
	asked, ok := c.Resources.Requests[corev1.ResourceCPU]
	if !ok {
		asked = cpu
	}
	return &vm.Resources{
		CPULimit: min(max(cpu.MilliValue(), 0), vm.MaxCPUs*1000), CPUWeight: weight(asked.MilliValue()), MemoryLimit: min(max(memory.Value(), 0), vm.MaxMemory),
		OOMScoreAdj: oomScoreAdj(pod, c, node),
	}
}

// weight returns cpu.weight for a request in thousandths of a CPU, which a kubelet turns into CPU shares.
func weight(milli int64) int64 {
	if milli >= vm.MaxCPUShares { // far more than a CPU for each share; it also must not overflow
		return vm.CPUWeightOf(vm.MaxCPUShares)
	}
	return vm.CPUWeightOf(milli * 1024 / 1000)
}

// oomScoreAdj returns the OOM score adjustment of a container: the more memory of the node it requests, the lower it is.
func oomScoreAdj(pod *corev1.Pod, c *corev1.Container, node Node) int {
	if pod.Spec.PriorityClassName == nodeCritical {
		return oomGuaranteed
	}
	switch qosOf(pod) {
	case corev1.PodQOSGuaranteed:
		return oomGuaranteed
	case corev1.PodQOSBestEffort:
		return oomBestEffort
	case corev1.PodQOSBurstable:
	}
	size := node.Memory
	if size < vm.MinMemory { // it is not known
		size = math.MaxInt64
	}
	of := func(c *corev1.Container) int64 { return c.Resources.Requests.Memory().Value() }
	asked := of(c) + unshared(pod)
	for i := range pod.Spec.InitContainers {
		if init := &pod.Spec.InitContainers[i]; init.Name == c.Name && IsSidecar(init) { // it survives the apps that request least
			least := int64(math.MaxInt64)
			for j := range pod.Spec.Containers {
				least = min(least, of(&pod.Spec.Containers[j])+unshared(pod))
			}
			if len(pod.Spec.Containers) > 0 {
				asked = max(asked, least)
			}
		}
	}
	high, low := bits.Mul64(oomBestEffort, uint64(min(max(asked, 0), size)))
	part, _ := bits.Div64(high, low, uint64(size))
	return min(max(oomBestEffort-int(part), oomBestEffort+oomGuaranteed), oomBestEffort-1)
}

// unshared returns how much of the memory that a pod as a whole requests falls to each container beyond what it requests itself.
func unshared(pod *corev1.Pod) int64 {
	if pod.Spec.Resources == nil {
		return 0
	}
	whole, n := pod.Spec.Resources.Requests.Memory().Value(), int64(0)
	if whole == 0 {
		return 0
	}
	sumOf, _ := sum(pod, func(c *corev1.Container) (resource.Quantity, bool) {
		n++
		q, ok := c.Resources.Requests[corev1.ResourceMemory]
		return q, ok
	})
	if n == 0 {
		return 0
	}
	return max(whole-sumOf.Value(), 0) / n
}

// qosOf returns the quality of service of a pod: from its own resources, else from those of its containers.
func qosOf(pod *corev1.Pod) corev1.PodQOSClass {
	if r := pod.Spec.Resources; r != nil && len(r.Requests)+len(r.Limits) > 0 {
		return qosIn(*r)
	}
	var all corev1.PodQOSClass
	for _, c := range containers(pod) {
		switch q := qosIn(c.Resources); all {
		case "":
			all = q
		case q:
		default:
			return corev1.PodQOSBurstable
		}
	}
	if all == "" {
		return corev1.PodQOSBestEffort
	}
	return all
}

func qosIn(r corev1.ResourceRequirements) corev1.PodQOSClass {
	set := 0
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
		asked, limit := r.Requests[name], r.Limits[name]
		switch {
		case !asked.Equal(limit):
			return corev1.PodQOSBurstable
		case !asked.IsZero():
			set++
		}
	}
	switch set {
	case 0:
		return corev1.PodQOSBestEffort
	case 1:
		return corev1.PodQOSBurstable
	}
	return corev1.PodQOSGuaranteed
}

// Resized returns what the containers of pod may use, by name.
func Resized(pod *corev1.Pod, node Node) map[string]vm.Resources {
	out := map[string]vm.Resources{}
	for _, c := range containers(pod) {
		out[c.Name] = *resources(pod, c, node)
	}
	return out
}

// Outgrown returns why the VM of rec is too small for the containers of pod; "": it is not.
func Outgrown(pod *corev1.Pod, rec vm.Record) string {
	const advice = "a VM's own CPUs and memory do not grow while it exists; create the pod again"
	if q, _ := quantity(pod, corev1.ResourceCPU); q > int64(rec.Spec.CPUs) {
		return fmt.Sprintf("the containers may use %d CPUs, but the VM has %d: %s", q, rec.Spec.CPUs, advice)
	}
	if q, _ := quantity(pod, corev1.ResourceMemory); q > rec.Spec.Memory {
		return fmt.Sprintf("the containers may use %d bytes of memory, but the VM has %d: %s", q, rec.Spec.Memory, advice)
	}
	return ""
}

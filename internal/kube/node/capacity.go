package node

import (
	"math"
	"runtime"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"cocoonstack.io/cocoon/internal/kube/stats"
	"cocoonstack.io/cocoon/internal/vm"
)

// Sizes overrides parts of the node's capacity. For zero values the node reports the capacity of the host.
type Sizes struct {
	CPU       resource.Quantity
	Memory    resource.Quantity
	Storage   resource.Quantity
	Hugepages resource.Quantity // in pages of 2 MiB
	Pods      int64             // default 256
	Virtual   int               // virtual CPUs that pods may request for each CPU; 0 means 1
}

// MaxVirtual is the largest Sizes.Virtual.
const MaxVirtual = 1000

// DefaultPods is the default maximum number of pods of a node.
const DefaultPods = 256

// resourceHugepages is the resource of huge pages of a size.
func resourceHugepages(p vm.HugePages) corev1.ResourceName {
	return corev1.ResourceName(corev1.ResourceHugePagesPrefix + p.String())
}

// usage holds the total and free resources of the host. Sizes are in bytes.
type usage struct {
	cpus              int64
	memory, memFree   int64
	huge              map[vm.HugePages]int64
	disk, diskFree    int64
	inodes, inodeFree int64
	pids, pidsCeiling int64
}

func measure(h stats.Host) (usage, error) {
	u := usage{cpus: int64(runtime.NumCPU())}
	m, err := h.Memory()
	if err != nil {
		return u, err
	}
	u.memory, u.memFree, u.huge = m.Total, m.Available, m.Huge
	d, err := h.Disk()
	if err != nil {
		return u, err
	}
	u.disk, u.diskFree, u.inodes, u.inodeFree = d.Total, d.Available, d.Inodes, d.InodesFree
	u.pids, u.pidsCeiling = h.Threads()
	return u, nil
}

// storageStep is the step, in bytes, in which free space is reported. Each change of the node object is a write that every
// watcher of nodes receives. Steps with hysteresis avoid writes for small variations.
const storageStep = 1 << 30

// steady returns how many free bytes to report. last is the amount that was reported last. It returns last as long as free is
// at least last and less than two steps above it.
func steady(last, free int64) int64 {
	step := int64(storageStep)
	if free < 4*step {
		step = 64 << 20 // smaller steps for a small or nearly full disk
	}
	if last > 0 && last <= free && free-last < 2*step {
		return last
	}
	return free / step * step
}

// capacity returns the resources that the node has, and those that it offers to pods: all but reserve per cent. It offers
// s.Virtual virtual CPUs for each CPU. Of storage it offers only free space, because images and existing disks use the rest.
func capacity(u usage, s Sizes, reserve int) (all, allocatable corev1.ResourceList) {
	pick := func(forced resource.Quantity, found int64, f resource.Format) resource.Quantity {
		if !forced.IsZero() {
			return forced
		}
		return *resource.NewQuantity(found, f)
	}
	pods := s.Pods
	if pods <= 0 {
		pods = DefaultPods
	}
	all = corev1.ResourceList{
		corev1.ResourceCPU:              pick(s.CPU, u.cpus, resource.DecimalSI),
		corev1.ResourceMemory:           pick(s.Memory, u.memory, resource.BinarySI),
		corev1.ResourceEphemeralStorage: pick(s.Storage, u.disk, resource.BinarySI),
		corev1.ResourcePods:             *resource.NewQuantity(pods, resource.DecimalSI),
	}
	for p, n := range u.huge {
		all[resourceHugepages(p)] = *resource.NewQuantity(n, resource.BinarySI)
	}
	all[resourceHugepages(vm.HugePages2M)] = pick(s.Hugepages, u.huge[vm.HugePages2M], resource.BinarySI)
	allocatable = all.DeepCopy()
	if s.Storage.IsZero() {
		allocatable[corev1.ResourceEphemeralStorage] = *resource.NewQuantity(u.diskFree, resource.BinarySI)
	}
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage} {
		q := allocatable[name]
		if name == corev1.ResourceMemory { // what is set aside is no other memory, as for a kubelet
			for _, p := range vm.AllHugePages {
				q.Sub(allocatable[resourceHugepages(p)])
			}
		}
		if name == corev1.ResourceCPU {
			q = *resource.NewMilliQuantity(times(share(q.MilliValue(), reserve), s.Virtual), resource.DecimalSI)
		} else {
			q = *resource.NewQuantity(share(q.Value(), reserve), resource.BinarySI)
		}
		allocatable[name] = q
	}
	return all, allocatable
}

// same reports whether two lists have the same amounts.
func same(a, b corev1.ResourceList) bool {
	if len(a) != len(b) {
		return false
	}
	for name, q := range a {
		if other, ok := b[name]; !ok || q.Cmp(other) != 0 {
			return false
		}
	}
	return true
}

// times returns n multiplied by factor, without overflow. A factor of 0 is 1.
func times(n int64, factor int) int64 {
	if factor > 1 && n <= math.MaxInt64/int64(factor) {
		return n * int64(factor)
	}
	return n
}

// share returns n less reserve per cent, without overflow.
func share(n int64, reserve int) int64 {
	keep := int64(100 - reserve)
	return min(n/100*keep+n%100*keep/100, math.MaxInt64)
}

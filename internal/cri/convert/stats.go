package convert

import (
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// ContainerStats returns what a container of r uses, as its guest tells.
func ContainerStats(r vm.Record, e vm.Ephemeral, st guest.Stats, at time.Time) *cri.ContainerStats {
	c := ListedContainer(r, e)
	out := &cri.ContainerStats{
		Attributes: &cri.ContainerAttributes{Id: c.GetId(), Metadata: c.GetMetadata(), Labels: c.GetLabels(), Annotations: c.GetAnnotations()},
	}
	for _, one := range st.Containers {
		if one.Name == e.Spec.Name {
			out.Cpu, out.Memory = cpu(one.CPUSeconds, at), memoryUsage(one.Memory, at)
		}
	}
	return out
}

// SandboxStats returns what the guest of r and its running containers use.
func SandboxStats(r vm.Record, st guest.Stats, at time.Time) *cri.PodSandboxStats {
	i := Listed(r)
	linux := &cri.LinuxPodSandboxStats{
		Cpu: cpu(st.CPUSeconds, at), Memory: memoryUsage(st.MemoryUsed, at),
		Network: &cri.NetworkUsage{Timestamp: at.UnixNano(), DefaultInterface: &cri.NetworkInterfaceUsage{
			Name: "eth0", RxBytes: number(st.NetworkRxBytes), TxBytes: number(st.NetworkTxBytes),
		}},
		Process: &cri.ProcessUsage{Timestamp: at.UnixNano(), ProcessCount: number(int64(st.Processes))},
	}
	for _, e := range r.Ephemeral {
		if e.Record.Status.State == vm.ContainerRunning {
			linux.Containers = append(linux.Containers, ContainerStats(r, e, st, at))
		}
	}
	return &cri.PodSandboxStats{
		Attributes: &cri.PodSandboxAttributes{Id: i.GetId(), Metadata: i.GetMetadata(), Labels: i.GetLabels(), Annotations: i.GetAnnotations()},
		Linux:      linux,
	}
}

func cpu(seconds float64, at time.Time) *cri.CpuUsage {
	return &cri.CpuUsage{Timestamp: at.UnixNano(), UsageCoreNanoSeconds: number(int64(seconds * float64(time.Second)))}
}

func memoryUsage(bytes int64, at time.Time) *cri.MemoryUsage {
	return &cri.MemoryUsage{Timestamp: at.UnixNano(), WorkingSetBytes: number(bytes), UsageBytes: number(bytes)}
}

func number(n int64) *cri.UInt64Value {
	return &cri.UInt64Value{Value: uint64(max(n, 0))}
}

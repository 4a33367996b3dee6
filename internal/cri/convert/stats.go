package convert

import (
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// ContainerStats returns what a container of r uses, as its guest tells. store is the folder of the node with the disks of VMs.
func ContainerStats(r vm.Record, e vm.Ephemeral, st guest.Stats, store string, at time.Time) *cri.ContainerStats {
	c := ListedContainer(r, e)
	out := &cri.ContainerStats{
		Attributes: &cri.ContainerAttributes{Id: c.GetId(), Metadata: c.GetMetadata(), Labels: c.GetLabels(), Annotations: c.GetAnnotations()},
	}
	use, known := useOf(r, e, st)
	if !known {
		return out
	}
	ns := at.UnixNano()
	out.Cpu, out.Memory, out.Io = cpu(use.CPUSeconds, use.Pressure.CPU, at), memoryUsage(use, at), io(use.Pressure.IO, at)
	if limit := e.Spec.Resources; limit != nil && limit.MemoryLimit > 0 {
		out.Memory.AvailableBytes = number(limit.MemoryLimit - use.Memory)
	}
	if w := use.Written; w != nil {
		out.WritableLayer = &cri.FilesystemUsage{
			Timestamp: ns, FsId: &cri.FilesystemIdentifier{Mountpoint: store}, UsedBytes: number(w.Bytes), InodesUsed: number(w.Inodes),
		}
	}
	return out
}

// useOf returns what a container of r uses; false: its guest does not tell.
func useOf(r vm.Record, e vm.Ephemeral, st guest.Stats) (guest.ContainerStats, bool) {
	if r.Boots(e.Spec.Name) { // it is the whole guest
		use := whole(st)
		if st.DiskTotal > 0 {
			use.Written = &guest.DiskUse{Bytes: st.DiskUsed}
		}
		return use, true
	}
	for _, one := range st.Containers {
		if one.Name == e.Spec.Name {
			return one, true
		}
	}
	return guest.ContainerStats{}, false
}

// whole returns what a guest uses, as if it were a container.
func whole(st guest.Stats) guest.ContainerStats {
	return guest.ContainerStats{CPUSeconds: st.CPUSeconds, Memory: st.MemoryUsed, MemoryTotal: st.MemoryUsed, Pressure: st.Pressure}
}

// SandboxStats returns what the guest of r and its running containers use.
func SandboxStats(r vm.Record, st guest.Stats, store string, at time.Time) *cri.PodSandboxStats {
	i := Listed(r)
	linux := &cri.LinuxPodSandboxStats{
		Cpu: cpu(st.CPUSeconds, st.Pressure.CPU, at), Memory: memoryUsage(whole(st), at), Io: io(st.Pressure.IO, at),
		Network: &cri.NetworkUsage{Timestamp: at.UnixNano(), DefaultInterface: &cri.NetworkInterfaceUsage{
			Name: "eth0", RxBytes: number(st.NetworkRxBytes), TxBytes: number(st.NetworkTxBytes),
		}},
		Process: &cri.ProcessUsage{Timestamp: at.UnixNano(), ProcessCount: number(int64(st.Processes))},
	}
	linux.Memory.AvailableBytes = number(st.MemoryTotal - st.MemoryUsed)
	for _, e := range r.Ephemeral {
		if e.Record.Status.State == vm.ContainerRunning {
			linux.Containers = append(linux.Containers, ContainerStats(r, e, st, store, at))
		}
	}
	return &cri.PodSandboxStats{
		Attributes: &cri.PodSandboxAttributes{Id: i.GetId(), Metadata: i.GetMetadata(), Labels: i.GetLabels(), Annotations: i.GetAnnotations()},
		Linux:      linux,
	}
}

func cpu(seconds float64, s *guest.Stall, at time.Time) *cri.CpuUsage {
	return &cri.CpuUsage{Timestamp: at.UnixNano(), UsageCoreNanoSeconds: number(int64(seconds * float64(time.Second))), Psi: psi(s)}
}

func memoryUsage(use guest.ContainerStats, at time.Time) *cri.MemoryUsage {
	out := &cri.MemoryUsage{
		Timestamp: at.UnixNano(), WorkingSetBytes: number(use.Memory), UsageBytes: number(max(use.MemoryTotal, use.Memory)), Psi: psi(use.Pressure.Memory),
	}
	if use.PageFaults > 0 { // else its guest does not tell
		out.RssBytes, out.PageFaults, out.MajorPageFaults = number(use.Anonymous), number(use.PageFaults), number(use.MajorFaults)
	}
	return out
}

// io returns nil if the guest tells nothing.
func io(s *guest.Stall, at time.Time) *cri.IoUsage {
	if s == nil {
		return nil
	}
	return &cri.IoUsage{Timestamp: at.UnixNano(), Psi: psi(s)}
}

func psi(s *guest.Stall) *cri.PsiStats {
	if s == nil {
		return nil
	}
	data := func(w guest.Waits) *cri.PsiData {
		return &cri.PsiData{Total: uint64(max(w.Total, 0)), Avg10: w.Avg10, Avg60: w.Avg60, Avg300: w.Avg300}
	}
	return &cri.PsiStats{Some: data(s.Some), Full: data(s.Full)}
}

func number(n int64) *cri.UInt64Value {
	return &cri.UInt64Value{Value: uint64(max(n, 0))}
}

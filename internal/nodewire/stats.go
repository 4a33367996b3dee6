package nodewire

import (
	"time"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/guest"
)

// EncodeStats returns s as a message.
func EncodeStats(s guest.Stats) *nodev1.StatsResponse {
	return &nodev1.StatsResponse{
		CpuSeconds: s.CPUSeconds, MemoryTotal: s.MemoryTotal, MemoryUsed: s.MemoryUsed, DiskTotal: s.DiskTotal, DiskUsed: s.DiskUsed,
		Processes: int64(s.Processes), LoadAverage1: s.LoadAverage1, NetworkRxBytes: s.NetworkRxBytes, NetworkTxBytes: s.NetworkTxBytes,
		Containers: each(s.Containers, encodeContainerStats),
		Volumes: each(s.Volumes, func(v guest.VolumeStats) *nodev1.VolumeStats {
			return &nodev1.VolumeStats{Name: v.Name, Size: v.Size, Used: v.Used, Available: v.Available, Inodes: v.Inodes, InodesFree: v.InodesFree}
		}),
		Pressure: encodePressure(s.Pressure),
	}
}

// DecodeStats returns the stats in m.
func DecodeStats(m *nodev1.StatsResponse) guest.Stats {
	return guest.Stats{
		CPUSeconds: m.GetCpuSeconds(), MemoryTotal: m.GetMemoryTotal(), MemoryUsed: m.GetMemoryUsed(), DiskTotal: m.GetDiskTotal(), DiskUsed: m.GetDiskUsed(),
		Processes: int(m.GetProcesses()), LoadAverage1: m.GetLoadAverage1(), NetworkRxBytes: m.GetNetworkRxBytes(), NetworkTxBytes: m.GetNetworkTxBytes(),
		Containers: each(m.GetContainers(), decodeContainerStats),
		Volumes: each(m.GetVolumes(), func(v *nodev1.VolumeStats) guest.VolumeStats {
			return guest.VolumeStats{Name: v.GetName(), Size: v.GetSize(), Used: v.GetUsed(), Available: v.GetAvailable(), Inodes: v.GetInodes(), InodesFree: v.GetInodesFree()}
		}),
		Pressure: decodePressure(m.GetPressure()),
	}
}

func encodeContainerStats(c guest.ContainerStats) *nodev1.ContainerStats {
	m := &nodev1.ContainerStats{
		Name: c.Name, CpuSeconds: c.CPUSeconds, Memory: c.Memory, MemoryTotal: c.MemoryTotal, Anonymous: c.Anonymous,
		PageFaults: c.PageFaults, MajorFaults: c.MajorFaults, Pressure: encodePressure(c.Pressure),
	}
	if w := c.Written; w != nil {
		m.Written = &nodev1.DiskUse{Bytes: w.Bytes, Inodes: w.Inodes}
	}
	return m
}

func decodeContainerStats(m *nodev1.ContainerStats) guest.ContainerStats {
	c := guest.ContainerStats{
		Name: m.GetName(), CPUSeconds: m.GetCpuSeconds(), Memory: m.GetMemory(), MemoryTotal: m.GetMemoryTotal(), Anonymous: m.GetAnonymous(),
		PageFaults: m.GetPageFaults(), MajorFaults: m.GetMajorFaults(), Pressure: decodePressure(m.GetPressure()),
	}
	if w := m.GetWritten(); w != nil {
		c.Written = &guest.DiskUse{Bytes: w.GetBytes(), Inodes: w.GetInodes()}
	}
	return c
}

func encodePressure(p guest.Pressure) *nodev1.Pressure {
	if p == (guest.Pressure{}) {
		return nil
	}
	return &nodev1.Pressure{Cpu: encodeStall(p.CPU), Memory: encodeStall(p.Memory), Io: encodeStall(p.IO)}
}

func decodePressure(m *nodev1.Pressure) guest.Pressure {
	return guest.Pressure{CPU: decodeStall(m.GetCpu()), Memory: decodeStall(m.GetMemory()), IO: decodeStall(m.GetIo())}
}

func encodeStall(s *guest.Stall) *nodev1.Stall {
	if s == nil {
		return nil
	}
	waits := func(w guest.Waits) *nodev1.Waits {
		return &nodev1.Waits{TotalNs: int64(w.Total), Avg10: w.Avg10, Avg60: w.Avg60, Avg300: w.Avg300}
	}
	return &nodev1.Stall{Some: waits(s.Some), Full: waits(s.Full)}
}

func decodeStall(m *nodev1.Stall) *guest.Stall {
	if m == nil {
		return nil
	}
	waits := func(w *nodev1.Waits) guest.Waits {
		return guest.Waits{Total: time.Duration(w.GetTotalNs()), Avg10: w.GetAvg10(), Avg60: w.GetAvg60(), Avg300: w.GetAvg300()}
	}
	return &guest.Stall{Some: waits(m.GetSome()), Full: waits(m.GetFull())}
}

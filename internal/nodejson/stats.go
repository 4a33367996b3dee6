package nodejson

import "cocoonstack.io/cocoon/internal/guest"

// Stats is what one guest uses.
type Stats struct {
	Name           string           `json:"name"`
	CPUSeconds     float64          `json:"cpu_seconds"`
	MemoryTotal    int64            `json:"memory_total"`
	MemoryUsed     int64            `json:"memory_used"`
	DiskTotal      int64            `json:"disk_total"`
	DiskUsed       int64            `json:"disk_used"`
	Processes      int              `json:"processes"`
	LoadAverage1   float64          `json:"load_average_1"`
	NetworkRxBytes int64            `json:"network_rx_bytes"`
	NetworkTxBytes int64            `json:"network_tx_bytes"`
	Containers     []ContainerStats `json:"containers,omitempty"` // of a VM with several containers
	Volumes        []VolumeStats    `json:"volumes,omitempty"`    // disks of the volume store that the guest has mounted
	Pressure       guest.Pressure   `json:"pressure,omitzero"`
}

// VolumeStats is what the mounted file system of one volume has.
type VolumeStats struct {
	Name       string `json:"name"`
	Size       int64  `json:"size"`
	Used       int64  `json:"used"`
	Available  int64  `json:"available"`
	Inodes     int64  `json:"inodes"`
	InodesFree int64  `json:"inodes_free"`
}

// ContainerStats is what one container uses.
type ContainerStats struct {
	Name       string  `json:"name"`
	CPUSeconds float64 `json:"cpu_seconds"`
	Memory     int64   `json:"memory"`

	MemoryTotal int64          `json:"memory_total"`
	Anonymous   int64          `json:"anonymous"`
	PageFaults  int64          `json:"page_faults"`
	MajorFaults int64          `json:"major_faults"`
	Written     *guest.DiskUse `json:"written,omitempty"`
	Pressure    guest.Pressure `json:"pressure,omitzero"`
}

// FromStats returns s as JSON of the VM called name.
func FromStats(name string, s guest.Stats) Stats {
	out := Stats{
		Name: name, CPUSeconds: s.CPUSeconds, MemoryTotal: s.MemoryTotal, MemoryUsed: s.MemoryUsed, DiskTotal: s.DiskTotal, DiskUsed: s.DiskUsed,
		Processes: s.Processes, LoadAverage1: s.LoadAverage1, NetworkRxBytes: s.NetworkRxBytes, NetworkTxBytes: s.NetworkTxBytes,
		Pressure: s.Pressure,
	}
	for _, c := range s.Containers {
		out.Containers = append(out.Containers, ContainerStats(c))
	}
	for _, v := range s.Volumes {
		out.Volumes = append(out.Volumes, VolumeStats(v))
	}
	return out
}

// Stats is the reverse of FromStats.
func (s Stats) Stats() guest.Stats {
	out := guest.Stats{
		CPUSeconds: s.CPUSeconds, MemoryTotal: s.MemoryTotal, MemoryUsed: s.MemoryUsed, DiskTotal: s.DiskTotal, DiskUsed: s.DiskUsed,
		Processes: s.Processes, LoadAverage1: s.LoadAverage1, NetworkRxBytes: s.NetworkRxBytes, NetworkTxBytes: s.NetworkTxBytes,
		Pressure: s.Pressure,
	}
	for _, c := range s.Containers {
		out.Containers = append(out.Containers, guest.ContainerStats(c))
	}
	for _, v := range s.Volumes {
		out.Volumes = append(out.Volumes, guest.VolumeStats(v))
	}
	return out
}

package stats

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	summary "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
)

// Summary returns the answer of a kubelet at /stats/summary.
func (c *Collector) Summary(ctx context.Context) *summary.Summary {
	s := &summary.Summary{Node: c.node(), Pods: []summary.PodStats{}}
	for _, u := range c.CollectContainers(ctx) {
		if u.Process != nil {
			s.Pods = append(s.Pods, pod(u))
		}
	}
	return s
}

func (c *Collector) node() summary.NodeStats {
	now := metav1.Now()
	n := summary.NodeStats{NodeName: c.cfg.Node}
	if used, boot, err := c.host.CPU(); err == nil {
		n.StartTime = metav1.NewTime(boot)
		n.CPU = &summary.CPUStats{Time: now, UsageCoreNanoSeconds: nanoseconds(used)}
	}
	if m, err := c.host.Memory(); err == nil {
		n.Memory = &summary.MemoryStats{
			Time: now, AvailableBytes: number(m.Total - m.WorkingSet()), UsageBytes: number(m.Total - m.Free), WorkingSetBytes: number(m.WorkingSet()),
		}
	}
	if d, err := c.host.Disk(); err == nil {
		n.Fs = &summary.FsStats{
			Time: now, AvailableBytes: number(d.Available), CapacityBytes: number(d.Total), UsedBytes: number(d.Total - d.Available),
			Inodes: number(d.Inodes), InodesFree: number(d.InodesFree), InodesUsed: number(d.Inodes - d.InodesFree),
		}
	}
	if have, most := c.host.Threads(); most > 0 {
		n.Rlimit = &summary.RlimitStats{Time: now, MaxPID: &most, NumOfRunningProcesses: &have}
	}
	return n
}

func pod(u Usage) summary.PodStats {
	at, since := metav1.NewTime(u.At), metav1.NewTime(u.Process.Since)
	cpu := &summary.CPUStats{Time: at, UsageCoreNanoSeconds: nanoseconds(u.Process.CPU)}
	memory := &summary.MemoryStats{Time: at, UsageBytes: &u.Process.RSS, WorkingSetBytes: &u.Process.WorkingSet, RSSBytes: &u.Process.RSS}
	p := summary.PodStats{
		PodRef: summary.PodReference{Name: u.VM.Pod, Namespace: u.VM.Namespace, UID: u.VM.UID}, StartTime: since, CPU: cpu, Memory: memory,
	}
	for i := range u.Containers {
		c, at := &u.Containers[i], metav1.NewTime(u.Containers[i].At)
		p.Containers = append(p.Containers, summary.ContainerStats{
			Name: c.Name, StartTime: since,
			CPU:    &summary.CPUStats{Time: at, UsageCoreNanoSeconds: nanoseconds(c.CPU)},
			Memory: &summary.MemoryStats{Time: at, UsageBytes: &c.RSS, WorkingSetBytes: &c.WorkingSet, RSSBytes: &c.RSS},
		})
	}
	for _, v := range u.Volumes {
		p.VolumeStats = append(p.VolumeStats, summary.VolumeStats{
			Name: v.Name, PVCRef: &summary.PVCReference{Name: v.Claim, Namespace: u.VM.Namespace},
			FsStats: summary.FsStats{
				Time: metav1.NewTime(v.At), CapacityBytes: number(v.Size), AvailableBytes: number(v.Available), UsedBytes: number(v.Used),
				Inodes: number(v.Inodes), InodesFree: number(v.InodesFree), InodesUsed: number(v.Inodes - v.InodesFree),
			},
		})
	}
	if n := u.Network; n != nil {
		card := summary.InterfaceStats{Name: "eth0", RxBytes: &n.RxBytes, RxErrors: &n.RxErrors, TxBytes: &n.TxBytes, TxErrors: &n.TxErrors}
		p.Network = &summary.NetworkStats{Time: at, InterfaceStats: card, Interfaces: []summary.InterfaceStats{card}}
	}
	if u.Disk != nil {
		p.EphemeralStorage = &summary.FsStats{Time: at, UsedBytes: u.Disk}
		for i, used := range divide(*u.Disk, make([]uint64, len(p.Containers))) { // the disk's usage is not counted per container
			p.Containers[i].Rootfs = &summary.FsStats{Time: at, UsedBytes: &used}
		}
	}
	return p
}

func nanoseconds(d time.Duration) *uint64 { return number(d.Nanoseconds()) }

func number(n int64) *uint64 { return new(uint64(max(n, 0))) }

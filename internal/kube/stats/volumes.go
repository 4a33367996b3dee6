package stats

import (
	"context"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/vm"
)

// VolumeUsage is what the file system of a claim's volume has, as its guest tells.
type VolumeUsage struct {
	guest.VolumeStats
	Namespace, Claim string
	At               time.Time
}

// volumeAnswer is what a guest told last about its volumes.
type volumeAnswer struct {
	pid int // the VM's process at that time
	at  time.Time
	all []guest.VolumeStats
}

func (a *volumeAnswer) fresh(v VM) bool { return a.pid == v.PID && time.Since(a.at) < askFresh }

// told returns the usage of v's claims, from what the guest said now or a short time ago.
func (a *volumeAnswer) told(v VM, now time.Time, said answers) (out []VolumeUsage) {
	if s, ok := said[v.ID]; ok {
		*a = volumeAnswer{pid: v.PID, at: now, all: s.Volumes}
	}
	if a.pid != v.PID || now.Sub(a.at) > askStale {
		return nil
	}
	for _, s := range a.all {
		if claim := v.Claims[s.Name]; claim != "" {
			out = append(out, VolumeUsage{VolumeStats: s, Namespace: v.Namespace, Claim: claim, At: a.at})
		}
	}
	return out
}

// The families of the volumes of claims have the names that a kubelet gives them.
var (
	claimLabels = []string{"namespace", "persistentvolumeclaim"}

	claimSize       = prometheus.NewDesc("kubelet_volume_stats_capacity_bytes", "Size of the file system of a claim.", claimLabels, nil)
	claimAvailable  = prometheus.NewDesc("kubelet_volume_stats_available_bytes", "Bytes that ordinary users may still write to a claim.", claimLabels, nil)
	claimUsed       = prometheus.NewDesc("kubelet_volume_stats_used_bytes", "Bytes in use in the file system of a claim.", claimLabels, nil)
	claimInodes     = prometheus.NewDesc("kubelet_volume_stats_inodes", "Inodes of the file system of a claim.", claimLabels, nil)
	claimInodesFree = prometheus.NewDesc("kubelet_volume_stats_inodes_free", "Free inodes of the file system of a claim.", claimLabels, nil)
	claimInodesUsed = prometheus.NewDesc("kubelet_volume_stats_inodes_used", "Inodes in use of the file system of a claim.", claimLabels, nil)
)

// Claims collects the kubelet_volume_stats_* families. It asks the guests that have claims.
type Claims struct{ *Collector }

var _ prometheus.Collector = Claims{}

// Describe implements prometheus.Collector.
func (Claims) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{claimSize, claimAvailable, claimUsed, claimInodes, claimInodesFree, claimInodesUsed} {
		out <- d
	}
}

// volumes returns the usage of the claims of all VMs, by VM. It measures nothing else.
func (c *Collector) volumes(ctx context.Context) map[vm.ID][]VolumeUsage {
	c.asking.Lock()
	defer c.asking.Unlock()
	all := slices.DeleteFunc(c.cfg.Source(), func(v VM) bool { return len(v.Claims) == 0 })
	said, now := c.ask(ctx, all), time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[vm.ID][]VolumeUsage{}
	for _, v := range all {
		out[v.ID] = c.account(v.ID).volumes.told(v, now, said)
	}
	return out
}

// Collect implements prometheus.Collector. Pods may share a claim; it is told once.
func (c Claims) Collect(out chan<- prometheus.Metric) {
	seen := map[[2]string]bool{}
	for _, all := range c.volumes(context.Background()) {
		for _, v := range all {
			labels := [2]string{v.Namespace, v.Claim}
			if seen[labels] {
				continue
			}
			seen[labels] = true
			send := func(d *prometheus.Desc, n int64) {
				out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), labels[:]...)
			}
			send(claimSize, v.Size)
			send(claimAvailable, v.Available)
			send(claimUsed, v.Used)
			send(claimInodes, v.Inodes)
			send(claimInodesFree, v.InodesFree)
			send(claimInodesUsed, v.Inodes-v.InodesFree)
		}
	}
}

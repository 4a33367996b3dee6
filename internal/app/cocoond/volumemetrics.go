package cocoond

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

// volumeMeter is the part of the volume store that is read at every scrape. It starts no program and reads no bytes of volumes.
type volumeMeter interface {
	List(ctx context.Context) ([]volume.Volume, error)
	Usage(ctx context.Context) (map[vm.ID]volume.Usage, error)
}

// volumeCollector reports each volume at every scrape.
type volumeCollector struct{ store volumeMeter }

var (
	volumeLabels    = []string{"volume", "namespace", "kind"}
	volumeSize      = prometheus.NewDesc("cocoon_volume_size_bytes", "Size of a volume as a guest sees it; namespace is empty for volumes of the operator.", volumeLabels, nil)
	volumeAllocated = prometheus.NewDesc("cocoon_volume_allocated_bytes", "Bytes that a volume occupies on the node.", volumeLabels, nil)
	volumeAttached  = prometheus.NewDesc("cocoon_volume_attachments", "VMs that have a volume.", volumeLabels, nil)
)

func (volumeCollector) Describe(out chan<- *prometheus.Desc) {
	describe(out, volumeSize, volumeAllocated, volumeAttached)
}

func (c volumeCollector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout)
	defer cancel()
	usage, err := c.store.Usage(ctx)
	if err != nil {
		out <- prometheus.NewInvalidMetric(volumeAllocated, err)
		return
	}
	all, err := c.store.List(ctx)
	if err != nil {
		out <- prometheus.NewInvalidMetric(volumeSize, err)
		return
	}
	for _, v := range all {
		gauge := func(d *prometheus.Desc, n int64) {
			out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), v.Name, v.Owner.Namespace, v.Kind)
		}
		gauge(volumeSize, v.Size)
		gauge(volumeAttached, int64(len(v.Attachments)))
		if u, ok := usage[v.ID]; ok { // a volume that was just made, or whose bytes are lost, has no figure
			gauge(volumeAllocated, u.Allocated)
		}
	}
}

package cocoond

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/volume"
)

// thinPoolCollector reports the pools of volumes at every scrape. It starts no program.
type thinPoolCollector struct{ store volume.Pooled }

var (
	poolOfVolumes     = []string{"pool", "kind"}
	volumePoolSize    = prometheus.NewDesc("cocoon_volume_pool_size_bytes", "Size of a pool of volumes.", poolOfVolumes, nil)
	volumePoolUsed    = prometheus.NewDesc("cocoon_volume_pool_used_bytes", "Bytes in use of a pool of volumes.", poolOfVolumes, nil)
	volumePoolMeta    = prometheus.NewDesc("cocoon_volume_pool_metadata_size_bytes", "Size of the metadata of a pool of volumes.", poolOfVolumes, nil)
	volumePoolMetaUse = prometheus.NewDesc("cocoon_volume_pool_metadata_used_bytes", "Bytes in use of the metadata of a pool of volumes.", poolOfVolumes, nil)
	volumePoolUsable  = prometheus.NewDesc("cocoon_volume_pool_usable", "1 if volumes can be made and grown in a pool, 0 if it is too full or has a fault.", poolOfVolumes, nil)
)

func (thinPoolCollector) Describe(out chan<- *prometheus.Desc) {
	describe(out, volumePoolSize, volumePoolUsed, volumePoolMeta, volumePoolMetaUse, volumePoolUsable)
}

func (c thinPoolCollector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout)
	defer cancel()
	for _, p := range c.store.Pools(ctx) {
		gauge := func(d *prometheus.Desc, n int64) {
			out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), p.Name, p.Kind)
		}
		usable := int64(1)
		if p.Fault != "" {
			usable = 0
		}
		gauge(volumePoolUsable, usable)
		if p.Size == 0 { // it cannot be examined
			continue
		}
		gauge(volumePoolSize, p.Size)
		gauge(volumePoolUsed, p.Used)
		gauge(volumePoolMeta, p.MetadataSize)
		gauge(volumePoolMetaUse, p.MetadataUsed)
	}
}

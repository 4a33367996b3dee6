package cocoond

import (
	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/engine"
)

// poolCollector reads the state of the clone pool at every scrape.
type poolCollector struct{ pooler }

type pooler interface{ Pool() engine.PoolStats }

var (
	poolEntries = prometheus.NewDesc("cocoon_pool_entries", "Clones that wait in the pool.", nil, nil)
	poolMemory  = prometheus.NewDesc("cocoon_pool_guest_memory_bytes", "Memory of the guests that wait in the pool.", nil, nil)
	poolClones  = prometheus.NewDesc("cocoon_pool_clones_total", "VMs cloned that can come from the pool, by whether one was ready (hit, miss).", []string{"result"}, nil)
)

func (poolCollector) Describe(out chan<- *prometheus.Desc) {
	out <- poolEntries
	out <- poolMemory
	out <- poolClones
}

func (c poolCollector) Collect(out chan<- prometheus.Metric) {
	s := c.Pool()
	out <- prometheus.MustNewConstMetric(poolEntries, prometheus.GaugeValue, float64(s.Entries))
	out <- prometheus.MustNewConstMetric(poolMemory, prometheus.GaugeValue, float64(s.Memory))
	out <- prometheus.MustNewConstMetric(poolClones, prometheus.CounterValue, float64(s.Hits), "hit")
	out <- prometheus.MustNewConstMetric(poolClones, prometheus.CounterValue, float64(s.Misses), "miss")
}

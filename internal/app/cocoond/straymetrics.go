package cocoond

import "github.com/prometheus/client_golang/prometheus"

// strayCollector counts stray VMs at every scrape.
type strayCollector struct{ strayKeeper }

type strayKeeper interface{ StrayCount() int }

var strayVMs = prometheus.NewDesc("cocoon_stray_vms", "VMs that are on this host and not in its journal; they are kept aside.", nil, nil)

func (strayCollector) Describe(out chan<- *prometheus.Desc) { out <- strayVMs }

func (c strayCollector) Collect(out chan<- prometheus.Metric) {
	out <- prometheus.MustNewConstMetric(strayVMs, prometheus.GaugeValue, float64(c.StrayCount()))
}

package podprovider

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are the provider's own counters, under the names people's dashboards know.
type Metrics struct {
	lifecycle *prometheus.CounterVec
	boot      *prometheus.HistogramVec
	probe     prometheus.Histogram
	tableSize prometheus.Gauge
	orphans   prometheus.Gauge
}

// NewMetrics registers the provider's metrics with r.
func NewMetrics(r prometheus.Registerer) *Metrics {
	m := &Metrics{
		lifecycle: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "vk_cocoon_pod_lifecycle_total", Help: "Pod lifecycle operations."}, []string{"op", "result"}),
		boot: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "vk_cocoon_vm_boot_duration_seconds", Help: "VM creation time (run or clone).",
			Buckets: []float64{.05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120},
		}, []string{"mode", "backend"}),
		probe: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "vk_cocoon_probe_duration_seconds", Help: "Per-probe health check time (ICMP or TCP).",
			Buckets: []float64{.0005, .001, .005, .01, .05, .1, .5, 1, 3},
		}),
		tableSize: prometheus.NewGauge(prometheus.GaugeOpts{Name: "vk_cocoon_vm_table_size", Help: "Tracked VM count."}),
		orphans:   prometheus.NewGauge(prometheus.GaugeOpts{Name: "vk_cocoon_orphan_vm_total", Help: "Orphan VMs at startup."}),
	}
	r.MustRegister(m.lifecycle, m.boot, m.probe, m.tableSize, m.orphans)
	return m
}

func (m *Metrics) done(op string, err error) {
	result := "success"
	if err != nil {
		result = "error"
	}
	m.lifecycle.WithLabelValues(op, result).Inc()
}

func (m *Metrics) booted(backend string, d time.Duration) {
	m.boot.WithLabelValues("run", backend).Observe(d.Seconds())
}

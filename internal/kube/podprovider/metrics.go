package podprovider

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/kube/probe"
	"cocoonstack.io/cocoon/internal/probing"
)

// Metrics are the metrics of the provider. They have the names that existing dashboards use.
type Metrics struct {
	lifecycle *prometheus.CounterVec
	boot      *prometheus.HistogramVec
	probe     prometheus.Histogram
	probes    *prometheus.CounterVec
	icmp      *prometheus.GaugeVec
	tableSize prometheus.Gauge
	orphans   prometheus.Counter

	save         prometheus.Histogram
	push         prometheus.Histogram
	pull         prometheus.Histogram
	pushTotal    *prometheus.CounterVec
	pullTotal    *prometheus.CounterVec
	cloneFromDir *prometheus.CounterVec
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
		probes:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "vk_cocoon_container_probe_total", Help: "Probes of pod specs."}, []string{"probe", "result"}),
		icmp:      prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "vk_cocoon_icmp_socket", Help: "1 for the kind of socket guests are pinged by; none: an address alone counts as ready."}, []string{"kind"}),
		tableSize: prometheus.NewGauge(prometheus.GaugeOpts{Name: "vk_cocoon_vm_table_size", Help: "Tracked VM count."}),
		orphans:   prometheus.NewCounter(prometheus.CounterOpts{Name: "vk_cocoon_orphan_vm_total", Help: "Orphan VMs at startup."}),
	}
	seconds := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: []float64{.01, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1200}})
	}
	count := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"result"})
	}
	m.save = seconds("vk_cocoon_snapshot_save_duration_seconds", "Snapshot save time.")
	m.push = seconds("vk_cocoon_snapshot_push_duration_seconds", "Epoch push time.")
	m.pull = seconds("vk_cocoon_snapshot_pull_duration_seconds", "Epoch pull time.")
	m.pushTotal = count("vk_cocoon_snapshot_push_total", "Snapshot pushes.")
	m.pullTotal = count("vk_cocoon_snapshot_pull_total", "Snapshot pulls.")
	m.cloneFromDir = count("vk_cocoon_clone_from_dir_total", "Annotation-driven --from-dir clone attempts.")
	r.MustRegister(m.lifecycle, m.boot, m.probe, m.probes, m.icmp, m.tableSize, m.orphans, m.save, m.push, m.pull, m.pushTotal, m.pullTotal, m.cloneFromDir)
	for _, r := range []string{"success", "error"} { // present from the start, because a rate needs a zero before the first increment
		m.pushTotal.WithLabelValues(r)
		m.pullTotal.WithLabelValues(r)
		m.cloneFromDir.WithLabelValues(r)
		for _, op := range []string{"create", "delete", "restart"} {
			m.lifecycle.WithLabelValues(op, r)
		}
	}
	return m
}

func result(err error) string {
	if err != nil {
		return "error"
	}
	return "success"
}

// probed counts the result of a probe from a pod's spec.
func (m *Metrics) probed(kind string, r probing.Result) {
	words := map[probing.Result]string{probing.Success: "successful", probing.Warning: "successful", probing.Failure: "failed", probing.Unknown: "unknown"}
	m.probes.WithLabelValues(kind, words[r]).Inc()
}

// PingedBy records which kind of socket pings the guests.
func (m *Metrics) PingedBy(kind probe.Socket) {
	for _, k := range []probe.Socket{probe.SocketRaw, probe.SocketPing, probe.SocketNone} {
		value := 0.0
		if k == kind {
			value = 1
		}
		m.icmp.WithLabelValues(string(k)).Set(value)
	}
}

func (m *Metrics) done(op string, err error) {
	m.lifecycle.WithLabelValues(op, result(err)).Inc()
}

func (m *Metrics) booted(mode, backend string, d time.Duration) {
	m.boot.WithLabelValues(mode, backend).Observe(d.Seconds())
}

func (m *Metrics) saved(d time.Duration) { m.save.Observe(d.Seconds()) }

func (m *Metrics) pushed(d time.Duration, err error) { transferred(m.pushTotal, m.push, d, err) }
func (m *Metrics) pulled(d time.Duration, err error) { transferred(m.pullTotal, m.pull, d, err) }

// transferred counts a transfer in total and, if it succeeded, adds its time to took.
func transferred(total *prometheus.CounterVec, took prometheus.Histogram, d time.Duration, err error) {
	total.WithLabelValues(result(err)).Inc()
	if err == nil {
		took.Observe(d.Seconds())
	}
}

package netpolicy

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/network"
)

type metrics struct {
	guests, policies, last prometheus.Gauge
	sets                   *prometheus.CounterVec
	compile, took          prometheus.Histogram
	enforced, closed       prometheus.Gauge
}

func newMetrics(r prometheus.Registerer) *metrics {
	buckets := []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10}
	m := &metrics{
		enforced: prometheus.NewGauge(prometheus.GaugeOpts{Name: "vk_cocoon_network_policies_enforced", Help: "1 while this node enforces network policies; 0 if they are off, unknown, or its network does not."}),
		closed:   prometheus.NewGauge(prometheus.GaugeOpts{Name: "vk_cocoon_network_policies_over_budget", Help: "Network policies that are too large, or whose namespace has too many; they are closed: they allow nothing to the pods that they select."}),
		guests:   prometheus.NewGauge(prometheus.GaugeOpts{Name: "vk_cocoon_network_policy_guests", Help: "Guests whose policies are set."}),
		policies: prometheus.NewGauge(prometheus.GaugeOpts{Name: "vk_cocoon_network_policies", Help: "Directions of network policies that select a guest of this node."}),
		last:     prometheus.NewGauge(prometheus.GaugeOpts{Name: "vk_cocoon_network_policy_set_timestamp_seconds", Help: "When the network last took policies; it gets them only after a change."}),
		sets:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "vk_cocoon_network_policy_sets_total", Help: "Attempts to set network policies, by result; after an error the earlier ones stay in force."}, []string{"result"}),
		compile:  prometheus.NewHistogram(prometheus.HistogramOpts{Name: "vk_cocoon_network_policy_compile_duration_seconds", Help: "Time to compile the network policies of all guests.", Buckets: buckets}),
		took:     prometheus.NewHistogram(prometheus.HistogramOpts{Name: "vk_cocoon_network_policy_set_duration_seconds", Help: "Time the network took to set policies.", Buckets: buckets}),
	}
	r.MustRegister(m.enforced, m.closed, m.guests, m.policies, m.last, m.sets, m.compile, m.took)
	for _, result := range []string{"success", "error"} {
		m.sets.WithLabelValues(result)
	}
	return m
}

func (m *metrics) enforce(on bool) {
	m.enforced.Set(0)
	if on {
		m.enforced.Set(1)
	}
}

func (m *metrics) pushed(p network.Policies, took time.Duration, err error) {
	if err != nil {
		m.sets.WithLabelValues("error").Inc()
		return
	}
	m.sets.WithLabelValues("success").Inc()
	m.took.Observe(took.Seconds())
	m.guests.Set(float64(len(p.Guests)))
	m.policies.Set(float64(len(p.Ingress) + len(p.Egress)))
	m.last.SetToCurrentTime()
}

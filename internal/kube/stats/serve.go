package stats

import (
	"encoding/json"
	"net/http"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"
)

// Routes are the kubelet's routes for statistics, by http.ServeMux pattern.
func (c *Collector) Routes() map[string]http.Handler {
	resource := prometheus.NewRegistry()
	resource.MustRegister(Resource{c})
	return map[string]http.Handler{
		"GET /stats/summary":    http.HandlerFunc(c.serveSummary),
		"GET /metrics/resource": promhttp.HandlerFor(podSecond{resource}, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}),
	}
}

func (c *Collector) serveSummary(w http.ResponseWriter, r *http.Request) {
	s := c.Summary(r.Context())
	if r.URL.Query().Get("only_cpu_and_memory") == "true" {
		s.Node.Fs, s.Node.Rlimit = nil, nil
		for i := range s.Pods {
			p := &s.Pods[i]
			p.Network, p.EphemeralStorage, p.VolumeStats = nil, nil, nil
			for j := range p.Containers {
				p.Containers[j].Rootfs = nil
			}
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s)
}

// podSecond moves the label "pod" of every sample to the second place. The order of labels is irrelevant for Prometheus and
// metrics-server, but virtual-kubelet's end-to-end suite relies on it.
type podSecond struct{ prometheus.Gatherer }

// Gather implements prometheus.Gatherer.
func (g podSecond) Gather() ([]*dto.MetricFamily, error) {
	all, err := g.Gatherer.Gather()
	for _, family := range all {
		for _, m := range family.Metric {
			if l := m.Label; len(l) > 2 && l[2].GetName() == "pod" {
				l = slices.Clone(l) // do not change the slice of the registry
				l[1], l[2] = l[2], l[1]
				m.Label = l
			}
		}
	}
	return all, err
}

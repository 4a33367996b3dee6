package stats

import (
	"encoding/json"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Routes are the kubelet's routes for statistics, by http.ServeMux pattern.
func (c *Collector) Routes() map[string]http.Handler {
	resource := prometheus.NewRegistry()
	resource.MustRegister(Resource{c})
	return map[string]http.Handler{
		"GET /stats/summary":    http.HandlerFunc(c.serveSummary),
		"GET /metrics/resource": promhttp.HandlerFor(resource, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}),
	}
}

func (c *Collector) serveSummary(w http.ResponseWriter, r *http.Request) {
	s := c.Summary(r.Context())
	if r.URL.Query().Get("only_cpu_and_memory") == "true" {
		s.Node.Fs, s.Node.Rlimit = nil, nil
		for i := range s.Pods {
			p := &s.Pods[i]
			p.Network, p.EphemeralStorage, p.Containers[0].Rootfs = nil, nil, nil
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s)
}

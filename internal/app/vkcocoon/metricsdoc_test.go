package vkcocoon

import (
	"log/slog"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/kube/stats"
	"cocoonstack.io/cocoon/internal/testkit/metricsdoc"
)

func TestMetricsAreDocumented(t *testing.T) {
	n, err := New(Config{Kubeconfig: kubeconfig(t, "http://127.0.0.1:1"), RootDir: t.TempDir()}, idle{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	clients, err := connect(n.cfg)
	if err != nil {
		t.Fatal(err)
	}
	p, err := n.build(t.Context(), clients)
	if err != nil {
		t.Fatal(err)
	}
	defer p.events.Shutdown()
	metricsdoc.Check(t, "virtual node", p.registry)

	resource := prometheus.NewRegistry()
	resource.MustRegister(stats.Resource{Collector: p.stats})
	metricsdoc.Check(t, "resource metrics", resource)
}

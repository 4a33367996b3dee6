package registry_test

import (
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/registry"
	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/objects/folder"
	"cocoonstack.io/cocoon/internal/testkit/metricsdoc"
)

func TestMetricsAreDocumented(t *testing.T) {
	store, err := folder.New(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	c, err := content.New(t.Context(), store, content.Config{Log: log, UploadTTL: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	r := prometheus.NewRegistry()
	registry.New(registry.Config{}, c, tokens(t), r, log)
	metricsdoc.Check(t, "epoch", r)
}

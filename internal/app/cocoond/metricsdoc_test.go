package cocoond

import (
	"context"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/snapshot"
	"cocoonstack.io/cocoon/internal/testkit/metricsdoc"
	"cocoonstack.io/cocoon/internal/vm"
)

// empty is a node without any objects.
type empty struct{}

func (empty) List(context.Context) ([]vm.Record, error)                { return nil, nil }
func (empty) Usage(context.Context) (int64, error)                     { return 0, nil }
func (empty) Problems(context.Context) ([]image.MappingProblem, error) { return nil, nil }
func (empty) Pool() engine.PoolStats                                   { return engine.PoolStats{} }

func (empty) StrayCount() int { return 0 }

type emptyCatalog struct{}

func (emptyCatalog) List(context.Context) ([]snapshot.Snapshot, error) { return nil, nil }

// described is a collector that is only used for its descriptions.
type described struct{ prometheus.Collector }

func (described) Collect(chan<- prometheus.Metric) {}

func TestMetricsAreDocumented(t *testing.T) {
	m := newMetrics()
	m.watch(empty{})
	m.registry.MustRegister(imageCollector{empty{}, empty{}}, snapshotCollector{emptyCatalog{}}, described{volumeCollector{}}, described{thinPoolCollector{}}, poolCollector{empty{}}, strayCollector{empty{}}, described{networkCollector{}})
	metricsdoc.Check(t, "cocoond", m.registry)
}

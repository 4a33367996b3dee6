package cocoond

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/snapshot"
)

// snapshotMetrics are the Prometheus metrics of snapshots, in addition to the operations on VMs.
type snapshotMetrics struct {
	pause     prometheus.Histogram
	transfers *prometheus.CounterVec
	moved     *prometheus.CounterVec
	took      *prometheus.HistogramVec
}

func newSnapshotMetrics(r prometheus.Registerer) snapshotMetrics {
	m := snapshotMetrics{
		pause: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "cocoon_snapshot_pause_seconds", Help: "Time guests stood still while they were saved.",
			Buckets: []float64{.005, .01, .02, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}),
		transfers: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cocoon_snapshot_transfers_total", Help: "Snapshots sent to and fetched from registries and other nodes, by op (push, pull) and outcome.",
		}, []string{"op", "outcome"}),
		moved: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cocoon_snapshot_transfer_bytes_total", Help: "Bytes of snapshots that went over the network, by op.",
		}, []string{"op"}),
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "cocoon_snapshot_transfer_seconds", Help: "Time transfers of snapshots took, by op.", Buckets: []float64{.1, .5, 1, 5, 10, 30, 60, 120, 300, 600, 1800},
		}, []string{"op"}),
	}
	r.MustRegister(m.pause, m.transfers, m.moved, m.took)
	return m
}

// transfer counts one transfer: watched wraps progress, done is deferred with the transfer's error.
func (m snapshotMetrics) transfer(op string, progress func(snapshot.Progress)) (watched func(snapshot.Progress), done func(*error)) {
	began := time.Now()
	bytes := m.moved.WithLabelValues(op)
	var mu sync.Mutex
	var counted int64
	watched = func(p snapshot.Progress) {
		mu.Lock()
		if p.Moved > counted { // reports may arrive out of order
			bytes.Add(float64(p.Moved - counted))
			counted = p.Moved
		}
		mu.Unlock()
		if progress != nil {
			progress(p)
		}
	}
	return watched, func(err *error) {
		m.transfers.WithLabelValues(op, outcome(*err)).Inc()
		m.took.WithLabelValues(op).Observe(time.Since(began).Seconds())
	}
}

type snapshotLister interface {
	List(ctx context.Context) ([]snapshot.Snapshot, error)
}

// snapshotCollector counts at every scrape.
type snapshotCollector struct{ store snapshotLister }

var (
	snapshotCount = prometheus.NewDesc("cocoon_snapshots", "Snapshots of this node.", nil, nil)
	snapshotBytes = prometheus.NewDesc("cocoon_snapshot_store_bytes", "Bytes on disk of all snapshots.", nil, nil)
)

func (snapshotCollector) Describe(out chan<- *prometheus.Desc) {
	describe(out, snapshotCount, snapshotBytes)
}

func (c snapshotCollector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout)
	defer cancel()
	all, err := c.store.List(ctx)
	if err != nil {
		out <- prometheus.NewInvalidMetric(snapshotCount, err)
		return
	}
	var size int64
	for _, s := range all {
		size += s.Size
	}
	out <- prometheus.MustNewConstMetric(snapshotCount, prometheus.GaugeValue, float64(len(all)))
	out <- prometheus.MustNewConstMetric(snapshotBytes, prometheus.GaugeValue, float64(size))
}

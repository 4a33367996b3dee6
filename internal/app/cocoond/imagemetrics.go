package cocoond

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/image"
)

// imageMetrics are the Prometheus metrics of images. It is a pull.Observer.
type imageMetrics struct {
	pulls    *prometheus.CounterVec
	took     prometheus.Histogram
	bytes    prometheus.Counter
	underway prometheus.Gauge
	freed    prometheus.Counter
}

func newImageMetrics(r prometheus.Registerer) imageMetrics {
	m := imageMetrics{
		pulls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "cocoon_image_pulls_total", Help: "Pulls that used the network, by result and by what the name was: mapped, url, registry.",
		}, []string{"result", "kind"}),
		took: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "cocoon_image_pull_seconds", Help: "Time pulls took, from when it was their turn.", Buckets: []float64{.1, .5, 1, 5, 10, 30, 60, 120, 300, 600, 1800},
		}),
		bytes:    prometheus.NewCounter(prometheus.CounterOpts{Name: "cocoon_image_pull_bytes_total", Help: "Bytes of images that were received."}),
		underway: prometheus.NewGauge(prometheus.GaugeOpts{Name: "cocoon_image_pulls_in_progress", Help: "Pulls that are under way."}),
		freed:    prometheus.NewCounter(prometheus.CounterOpts{Name: "cocoon_image_gc_freed_bytes_total", Help: "Bytes that the collection of images has freed."}),
	}
	r.MustRegister(m.pulls, m.took, m.bytes, m.underway, m.freed)
	return m
}

// Began implements pull.Observer.
func (m imageMetrics) Began() { m.underway.Inc() }

// Received implements pull.Observer.
func (m imageMetrics) Received(bytes int64) { m.bytes.Add(float64(bytes)) }

// Ended implements pull.Observer.
func (m imageMetrics) Ended(kind string, took time.Duration, err error) {
	m.underway.Dec()
	m.took.Observe(took.Seconds())
	m.pulls.WithLabelValues(outcome(err), kind).Inc()
}

// sizer and problemer supply the values that are read at every scrape.
type sizer interface {
	Usage(ctx context.Context) (int64, error)
}

type problemer interface {
	Problems(ctx context.Context) ([]image.MappingProblem, error)
}

type imageCollector struct {
	store sizer
	names problemer
}

var (
	storeBytes      = prometheus.NewDesc("cocoon_image_store_bytes", "Bytes on disk of all images.", nil, nil)
	mappingProblems = prometheus.NewDesc("cocoon_image_mapping_problems", "What is wrong with the mappings of image names, by their source.", []string{"source"}, nil)
)

func (imageCollector) Describe(out chan<- *prometheus.Desc) {
	describe(out, storeBytes, mappingProblems)
}

func (c imageCollector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout)
	defer cancel()
	if n, err := c.store.Usage(ctx); err != nil {
		out <- prometheus.NewInvalidMetric(storeBytes, err)
	} else {
		out <- prometheus.MustNewConstMetric(storeBytes, prometheus.GaugeValue, float64(n))
	}
	problems, err := c.names.Problems(ctx)
	if err != nil {
		out <- prometheus.NewInvalidMetric(mappingProblems, err)
		return
	}
	n := map[string]int{"files": 0, "kubernetes": 0} // report zero for a kind without problems
	for _, p := range problems {
		n[p.Source]++
	}
	for source, count := range n {
		out <- prometheus.MustNewConstMetric(mappingProblems, prometheus.GaugeValue, float64(count), source)
	}
}

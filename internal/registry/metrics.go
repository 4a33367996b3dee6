package registry

import (
	"cmp"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"cocoonstack.io/cocoon/internal/registry/content"
	"cocoonstack.io/cocoon/internal/registry/reference"
)

// stall is how long a client may neither send nor receive a byte.
const (
	stall = time.Minute
	piece = 8 << 20 // sent with one deadline
)

type metrics struct {
	handler         http.Handler
	requests        *prometheus.HistogramVec
	received, sent  prometheus.Counter
	inFlight        prometheus.Gauge
	refused         prometheus.Counter
	gcBytes, gcRuns *prometheus.CounterVec
	gcTime          prometheus.Gauge
}

func newMetrics(reg *prometheus.Registry, c *content.Content) *metrics {
	m := &metrics{
		handler: promhttp.HandlerFor(reg, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}),
		requests: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "epoch_request_duration_seconds", Help: "Time of requests, by resource, method and status.",
			Buckets: []float64{.001, .005, .025, .1, .5, 2.5, 10, 60, 300},
		}, []string{"resource", "method", "status"}),
		received: prometheus.NewCounter(prometheus.CounterOpts{Name: "epoch_received_bytes_total", Help: "Bytes of request bodies."}),
		sent:     prometheus.NewCounter(prometheus.CounterOpts{Name: "epoch_sent_bytes_total", Help: "Bytes of response bodies."}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{Name: "epoch_requests_in_flight", Help: "Requests being served."}),
		refused:  prometheus.NewCounter(prometheus.CounterOpts{Name: "epoch_token_failures_total", Help: "Requests with an unknown or expired token."}),
		gcRuns:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "epoch_gc_runs_total", Help: "Collections of garbage, by outcome."}, []string{"outcome"}),
		gcBytes:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "epoch_gc_removed_total", Help: "What collections removed: bytes, blobs, manifests, uploads."}, []string{"what"}),
		gcTime:   prometheus.NewGauge(prometheus.GaugeOpts{Name: "epoch_gc_duration_seconds", Help: "Time of the last collection of garbage."}),
	}
	reg.MustRegister(m.requests, m.received, m.sent, m.inFlight, m.refused, m.gcRuns, m.gcBytes, m.gcTime)
	refused := func(limit string, value func(content.Refused) int64) {
		reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "epoch_uploads_refused_total", Help: "Uploads that a limit did not let begin, by limit: token or total.",
			ConstLabels: prometheus.Labels{"limit": limit},
		}, func() float64 { return float64(value(c.Refused())) }))
	}
	refused("token", func(r content.Refused) int64 { return r.PerOwner })
	refused("total", func(r content.Refused) int64 { return r.Total })
	for _, v := range []struct {
		name, help string
		value      func(content.Usage) int64
	}{
		{"epoch_blobs", "Blobs stored.", func(u content.Usage) int64 { return u.Blobs }},
		{"epoch_blob_bytes", "Bytes of blobs stored.", func(u content.Usage) int64 { return u.Bytes }},
		{"epoch_uploads_in_progress", "Uploads begun and neither finished nor cancelled.", func(u content.Usage) int64 { return int64(u.Uploads) }},
		{"epoch_upload_bytes", "Bytes of uploads in progress.", func(u content.Usage) int64 { return u.Staged }},
		{"epoch_quota_bytes", "Most bytes of blobs and uploads; 0: no limit.", func(u content.Usage) int64 { return u.Quota }},
		{"epoch_corrupt_objects", "Objects found damaged and moved to quarantine since the start.", func(u content.Usage) int64 { return u.Corrupt }},
	} {
		reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: v.name, Help: v.help}, func() float64 { return float64(v.value(c.Usage())) }))
	}
	return m
}

func (m *metrics) request(kind reference.Kind, method string, status int, took time.Duration) {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPut, http.MethodPost, http.MethodPatch, http.MethodDelete:
	default:
		method = "other" // a client must not create new series
	}
	m.requests.WithLabelValues(kind.String(), method, strconv.Itoa(status)).Observe(took.Seconds())
}

func (m *metrics) collected(done content.Collected, took time.Duration, err error) {
	outcome := "ok"
	if err != nil {
		outcome = "failed"
	}
	m.gcRuns.WithLabelValues(outcome).Inc()
	m.gcTime.Set(took.Seconds())
	for what, n := range map[string]int64{"bytes": done.Bytes, "blobs": int64(done.Blobs), "manifests": int64(done.Manifests), "uploads": int64(done.Uploads)} {
		m.gcBytes.WithLabelValues(what).Add(float64(n))
	}
}

// recorder counts a response and aborts for clients that stop reading.
type recorder struct {
	http.ResponseWriter
	control *http.ResponseController
	metrics *metrics
	status  int
	err     error // the error that truncated the body
}

// Unwrap is for http.ResponseController.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *recorder) WriteHeader(status int) {
	if w.status == 0 && status >= http.StatusOK {
		w.status = status
	}
	w.begin()
	w.ResponseWriter.WriteHeader(status)
}

func (w *recorder) begin() {
	w.status = cmp.Or(w.status, http.StatusOK)
	_ = w.control.SetWriteDeadline(time.Now().Add(stall)) // some writers in tests do not support it
}

func (w *recorder) Write(p []byte) (int, error) {
	w.begin()
	n, err := w.ResponseWriter.Write(p)
	w.metrics.sent.Add(float64(n))
	return n, err
}

// ReadFrom uses the kernel's direct path from file to socket, one piece at a time.
func (w *recorder) ReadFrom(r io.Reader) (total int64, err error) {
	to, ok := w.ResponseWriter.(io.ReaderFrom)
	if !ok {
		total, w.err = io.Copy(struct{ io.Writer }{w}, r)
		return total, w.err
	}
	limited, ok := r.(*io.LimitedReader)
	if !ok {
		limited = &io.LimitedReader{R: r, N: 1<<63 - 1}
	}
	for limited.N > 0 {
		w.begin()
		part := &io.LimitedReader{R: limited.R, N: min(limited.N, piece)}
		want := part.N
		n, err := to.ReadFrom(part)
		total += n
		limited.N -= n
		w.metrics.sent.Add(float64(n))
		if err == nil && n < want && ok {
			w.err = io.ErrUnexpectedEOF // r is a limited reader: its limit is the expected size
		}
		if err != nil {
			w.err = err
		}
		if err != nil || n < want {
			return total, err
		}
	}
	return total, nil
}

// body counts a request's body and aborts for clients that stop sending.
type body struct {
	io.ReadCloser
	control *http.ResponseController
	metrics *metrics
}

func (b *body) Read(p []byte) (int, error) {
	_ = b.control.SetReadDeadline(time.Now().Add(stall)) // some writers in tests do not support it
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		_ = b.control.SetReadDeadline(time.Time{}) // later work may take long, and the connection is reused
	}
	b.metrics.received.Add(float64(n))
	return n, err
}

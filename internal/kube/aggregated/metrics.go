package aggregated

import (
	"bufio"
	"cmp"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"cocoonstack.io/cocoon/internal/kube/upload"
)

// Metrics are the metrics of the API.
type Metrics struct {
	requests *prometheus.CounterVec
	streams  *prometheus.GaugeVec
}

// NewMetrics registers the metrics with r.
func NewMetrics(r prometheus.Registerer) *Metrics {
	m := &Metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "cocoon_operator_kubevirt_requests_total", Help: "Requests to the APIs of virtctl, and uploads, by what they ask for and the HTTP status of the answer; a stream is counted when it ends."}, []string{"subresource", "verb", "code"}),
		streams:  prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "cocoon_operator_kubevirt_streams", Help: "Consoles, screens and forwarded connections of VirtualMachineInstances that are open."}, []string{"subresource"}),
	}
	r.MustRegister(m.requests, m.streams)
	return m
}

// observe counts and logs requests.
func (s *Server) observe(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		rec := &recorder{ResponseWriter: w, code: http.StatusOK}
		op, vm := "other", ""
		t, found := targetOf(r)
		switch {
		case strings.HasPrefix(r.URL.Path, upload.Prefix):
			op = "upload"
		case found && t.APIGroup == UploadGroup:
			op = t.Resource
		case found:
			if _, served := served[t.of()]; served { // other names are the client's choice
				op, vm = cmp.Or(t.Subresource, t.Resource), t.Namespace+"/"+t.Name
			}
		case open(r.URL.Path):
			op = "discovery"
		}
		next.ServeHTTP(rec, r)
		verb := "other" // as for names
		if r.Method == http.MethodGet || r.Method == http.MethodPut || r.Method == http.MethodPost {
			verb = r.Method
		}
		s.opts.Metrics.requests.WithLabelValues(op, verb, strconv.Itoa(rec.code)).Inc()
		if vm != "" {
			s.opts.Log.Info("request for a virtual machine", "op", op, "vm", vm, "code", rec.code, "dur", time.Since(began))
		}
	})
}

// recorder keeps the status of the answer.
type recorder struct {
	http.ResponseWriter
	code int
}

// WriteHeader implements http.ResponseWriter.
func (r *recorder) WriteHeader(code int) {
	r.code = code
	r.ResponseWriter.WriteHeader(code)
}

// Hijack implements http.Hijacker.
func (r *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	r.code = http.StatusSwitchingProtocols
	return http.NewResponseController(r.ResponseWriter).Hijack()
}

// Unwrap lets an http.ResponseController reach the writer below.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

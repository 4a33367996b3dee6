package cocoond

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"cocoonstack.io/cocoon/internal/engine"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/bridge"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	collectTimeout = 5 * time.Second
	headerTimeout  = 5 * time.Second
)

// metrics are the Prometheus metrics of the daemon.
type metrics struct {
	registry   *prometheus.Registry
	operations *prometheus.HistogramVec

	journalSyncs prometheus.Counter
	imageMetrics
	snapshotMetrics
}

func newMetrics() *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		operations: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "cocoon_operation_duration_seconds", Help: "Time operations on VMs took, by outcome.",
			Buckets: []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
		}, []string{"op", "outcome"}),
		journalSyncs: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "cocoon_journal_syncs_total", Help: "Syncs of the journal; each serves all requests that wait when it begins.",
		}),
	}
	m.imageMetrics = newImageMetrics(m.registry)
	m.snapshotMetrics = newSnapshotMetrics(m.registry)
	m.registry.MustRegister(m.operations, m.journalSyncs, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// operation is deferred with the start time of an operation and its error.
func (m *metrics) operation(op string, began time.Time, err *error) {
	m.operations.WithLabelValues(op, outcome(*err)).Observe(time.Since(began).Seconds())
}

// outcome is the label value of an operation that ended with err.
func outcome(err error) string {
	if err != nil {
		return errdefs.ClassOf(err).String()
	}
	return "ok"
}

func describe(out chan<- *prometheus.Desc, all ...*prometheus.Desc) {
	for _, d := range all {
		out <- d
	}
}

type lister interface {
	List(ctx context.Context) ([]vm.Record, error)
}

// watch adds the number of VMs in each state, counted at every scrape.
func (m *metrics) watch(l lister) { m.registry.MustRegister(vmCount{l}) }

type vmCount struct{ lister }

var (
	vmStates   = prometheus.NewDesc("cocoon_vms", "VMs in each state.", []string{"state"}, nil)
	vmTroubles = prometheus.NewDesc("cocoon_vm_troubles", "VMs that somebody has to see to: DiskFull, DiskError, ClockWrong, DataLoss.", []string{"reason"}, nil)
)

func (vmCount) Describe(out chan<- *prometheus.Desc) { describe(out, vmStates, vmTroubles) }

func (c vmCount) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout)
	defer cancel()
	all, err := c.List(ctx)
	if err != nil {
		out <- prometheus.NewInvalidMetric(vmStates, err)
		return
	}
	for state, n := range countByState(all) {
		out <- prometheus.MustNewConstMetric(vmStates, prometheus.GaugeValue, float64(n), state)
	}
	for reason, n := range countTroubles(all) {
		out <- prometheus.MustNewConstMetric(vmTroubles, prometheus.GaugeValue, float64(n), reason)
	}
}

// countTroubles counts VMs by problem; a problem that no VM has counts zero.
func countTroubles(all []vm.Record) map[string]int64 {
	n := map[string]int64{vm.ReasonDiskFull: 0, vm.ReasonDiskError: 0, vm.ReasonClockWrong: 0, vm.ReasonDataLoss: 0}
	for _, r := range all {
		if _, ok := n[r.Reason]; ok {
			n[r.Reason]++
		}
	}
	return n
}

// countByState counts VMs by state; a state without VMs counts zero.
func countByState(all []vm.Record) map[string]int64 {
	n := map[string]int64{}
	for _, s := range []vm.State{vm.StateCreating, vm.StateCreated, vm.StateRunning, vm.StateStopped, vm.StateHibernated, vm.StateError} {
		n[string(s)] = 0
	}
	for _, r := range all {
		n[string(r.State)]++
	}
	return n
}

func (m *metrics) serve(ctx context.Context, addr string) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "serve metrics on %s: %w", addr, err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}))
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: headerTimeout}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return errdefs.New(errdefs.Internal, "serve metrics: %w", err)
	}
	return nil
}

// networkCollector reports on the bridge network, at every scrape.
type networkCollector struct{ net *bridge.Network }

var (
	dhcpMessages = prometheus.NewDesc("cocoon_dhcp_messages_total",
		"DHCP messages of guests by what was done about them, and by family (ipv4, ipv6); declined means that another machine has a guest's address.", []string{"result", "family"}, nil)
	dnsQuestions = prometheus.NewDesc("cocoon_dns_questions_total",
		"DNS questions of guests to this host, by what became of them: own (about names of workloads), forwarded, failed, refused.", []string{"result"}, nil)
	networkAddresses = prometheus.NewDesc("cocoon_network_addresses", "Addresses of the bridge network that VMs can have, and how many are leased.", []string{"state"}, nil)
	damagedLeases    = prometheus.NewDesc("cocoon_network_lease_files_damaged_total", "Lease files of the bridge network that were damaged and set aside; the leases were made anew.", nil, nil)
)

func (networkCollector) Describe(out chan<- *prometheus.Desc) {
	describe(out, dhcpMessages, dnsQuestions, networkAddresses, damagedLeases)
}

func (c networkCollector) Collect(out chan<- prometheus.Metric) {
	for family, messages := range map[string]map[string]uint64{"ipv4": c.net.DHCPMessages(), "ipv6": c.net.DHCPv6Messages()} {
		for result, n := range messages {
			out <- prometheus.MustNewConstMetric(dhcpMessages, prometheus.CounterValue, float64(n), result, family)
		}
	}
	for result, n := range c.net.Questions() {
		out <- prometheus.MustNewConstMetric(dnsQuestions, prometheus.CounterValue, float64(n), result)
	}
	out <- prometheus.MustNewConstMetric(damagedLeases, prometheus.CounterValue, float64(c.net.DamagedLeases()))
	leased, total := c.net.Addresses()
	out <- prometheus.MustNewConstMetric(networkAddresses, prometheus.GaugeValue, float64(leased), "leased")
	out <- prometheus.MustNewConstMetric(networkAddresses, prometheus.GaugeValue, float64(total-leased), "free")
}

// poolCollector reads the state of the clone pool at every scrape.
type poolCollector struct{ pooler }

type pooler interface{ Pool() engine.PoolStats }

var (
	poolEntries = prometheus.NewDesc("cocoon_pool_entries", "Clones that wait in the pool.", nil, nil)
	poolMemory  = prometheus.NewDesc("cocoon_pool_guest_memory_bytes", "Memory of the guests that wait in the pool.", nil, nil)
	poolClones  = prometheus.NewDesc("cocoon_pool_clones_total", "VMs cloned that can come from the pool, by whether one was ready (hit, miss).", []string{"result"}, nil)
)

func (poolCollector) Describe(out chan<- *prometheus.Desc) {
	describe(out, poolEntries, poolMemory, poolClones)
}

func (c poolCollector) Collect(out chan<- prometheus.Metric) {
	s := c.Pool()
	out <- prometheus.MustNewConstMetric(poolEntries, prometheus.GaugeValue, float64(s.Entries))
	out <- prometheus.MustNewConstMetric(poolMemory, prometheus.GaugeValue, float64(s.Memory))
	out <- prometheus.MustNewConstMetric(poolClones, prometheus.CounterValue, float64(s.Hits), "hit")
	out <- prometheus.MustNewConstMetric(poolClones, prometheus.CounterValue, float64(s.Misses), "miss")
}

// strayCollector counts stray VMs at every scrape.
type strayCollector struct{ strayKeeper }

type strayKeeper interface{ StrayCount() int }

var strayVMs = prometheus.NewDesc("cocoon_stray_vms", "VMs that are on this host and not in its journal; they are kept aside.", nil, nil)

func (strayCollector) Describe(out chan<- *prometheus.Desc) { out <- strayVMs }

func (c strayCollector) Collect(out chan<- prometheus.Metric) {
	out <- prometheus.MustNewConstMetric(strayVMs, prometheus.GaugeValue, float64(c.StrayCount()))
}

package podprovider

import (
	"context"
	"math"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/probe"
	"cocoonstack.io/cocoon/internal/reach"
	"cocoonstack.io/cocoon/internal/vm"
)

// Prober checks whether a guest can be reached.
type Prober interface {
	// Probe returns nil when ip answers: to a TCP connection on port, or, when port is 0, to an ICMP echo.
	Probe(ctx context.Context, ip string, port int) error
}

// The pace of probes: quick until the guest is ready, then steady. ready becomes false after a few failures in a row.
const (
	probeTimeout  = 3 * time.Second
	probeGuess    = 500 * time.Millisecond // for a guest that is not ready: packets sent before it listens are lost
	probeFirst    = 100 * time.Millisecond
	probeCold     = 2 * time.Second // longest pause while not ready
	probeSteady   = 5 * time.Second
	probeFailures = 3
	probeHead     = 250 * time.Millisecond // how long the first status of a new guest waits for its first probes
)

// guestMonitor monitors one run of one guest: whether it can be reached, and the health of its containers.
type guestMonitor struct {
	backgroundTasks
	run     time.Time                    // start of the run
	watches map[string]*containerMonitor // monitors of the current container runs, by name; under the worker's mu
	first   chan struct{}                // closed after the first verdicts

	mu     sync.Mutex
	unseen int // verdicts that first still waits for
}

func newGuestMonitor(run time.Time) *guestMonitor {
	return &guestMonitor{run: run, watches: map[string]*containerMonitor{}, first: make(chan struct{})}
}

// expect makes first wait for one more verdict, unless first is already closed. seen reports one verdict.
func (v *guestMonitor) expect() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	select {
	case <-v.first:
		return false
	default:
		v.unseen++
		return true
	}
}

func (v *guestMonitor) seen() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.unseen--; v.unseen == 0 {
		close(v.first)
	}
}

// startMonitor starts to monitor the current run of the guest. A trusted guest counts as ready until it fails.
func (w *worker) startMonitor(pod *corev1.Pod, rec *vm.Record, trusted bool) *guestMonitor {
	v := newGuestMonitor(rec.StartedAt)
	w.mu.Lock()
	w.guestMonitor, w.ready = v, trusted
	w.mu.Unlock()
	v.expect()
	w.monitorContainers(v, pod, rec, trusted)
	v.add(w.p.probes.Start(0, w.reach(v, trusted)))
	return v
}

// reach returns the check whether the guest can be reached.
func (w *worker) reach(v *guestMonitor, ready bool) probe.Check {
	cold := wait.Backoff{Duration: probeFirst, Factor: 1.5, Steps: math.MaxInt, Cap: probeCold}
	failures, pause, first := 0, cold, true
	return func(ctx context.Context) (time.Duration, bool) {
		limit := probeGuess
		if ready {
			limit = probeTimeout
		}
		err := w.probeOnce(ctx, limit)
		if ctx.Err() != nil {
			return 0, false
		}
		switch {
		case err == nil:
			ready, failures = true, 0
		case ready:
			failures++
			ready = failures < probeFailures
		}
		if ready {
			err = nil
		}
		w.setReady(v, ready, err)
		if first {
			first = false
			v.seen()
		}
		if ready {
			pause = cold
			return probeSteady, true
		}
		return pause.Step(), true
	}
}

func (w *worker) probeOnce(ctx context.Context, limit time.Duration) error {
	ip, port := w.target()
	if ip == "" {
		return errdefs.Unavailablef("its address is not known yet")
	}
	if w.static { // the creator of the pod chose the address
		addr, err := netip.ParseAddr(ip)
		if err != nil {
			return errdefs.Invalidf("its address %q is none", ip)
		}
		if err := reach.Forbidden(addr); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	err := w.p.Prober.Probe(ctx, ip, port)
	w.p.Metrics.probe.Observe(time.Since(began).Seconds())
	return err
}

// stopMonitor ends the monitor, and with it the readiness, which only a monitor can determine.
func (w *worker) stopMonitor() {
	w.mu.Lock()
	v := w.guestMonitor
	w.guestMonitor, w.ready, w.unready = nil, false, ""
	w.mu.Unlock()
	if v == nil {
		return
	}
	v.stop()
	for _, x := range v.watches { // nobody else uses them any more
		x.stop()
	}
}

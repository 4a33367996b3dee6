package podhealth

import (
	"context"
	"math"
	"net/netip"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/kube/podstatus"
	"cocoonstack.io/cocoon/internal/probing"
	"cocoonstack.io/cocoon/internal/reach"
)

// The guest's address is probed often until the guest is ready, then every probeSteady. A ready guest becomes not ready after
// probeFailures failures in a row.
const (
	probeTimeout  = 3 * time.Second
	probeGuess    = 500 * time.Millisecond // timeout while not ready, because packets sent before the guest listens are lost
	probeFirst    = 100 * time.Millisecond
	probeCold     = 2 * time.Second // longest pause between probes while not ready
	probeSteady   = 5 * time.Second
	probeFailures = 3
	probeHead     = 250 * time.Millisecond // how long Watch waits for the first verdicts
)

// guestMonitor monitors one run of one guest: whether it can be reached, and the health of its containers.
type guestMonitor struct {
	backgroundTasks
	run     time.Time                    // start of the run
	watches map[string]*containerMonitor // by name: the monitors of the current container runs; guarded by the Health's mu
	first   chan struct{}                // closed after the first verdicts

	mu     sync.Mutex
	unseen int // number of verdicts that are still missing before first is closed
}

func newGuestMonitor(run time.Time) *guestMonitor {
	return &guestMonitor{run: run, watches: map[string]*containerMonitor{}, first: make(chan struct{})}
}

// expect adds one verdict to those that must arrive before first is closed. It returns false if first is already closed. seen
// records the arrival of one verdict.
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

// await waits for the first verdicts, at most probeHead.
func (v *guestMonitor) await(ctx context.Context) {
	t := time.NewTimer(probeHead)
	defer t.Stop()
	select {
	case <-v.first:
	case <-t.C:
	case <-ctx.Done():
	}
}

// check returns the periodic check whether the guest can be reached. ready is the state at the beginning.
func (h *Health) check(v *guestMonitor, ready bool) probing.Check {
	cold := wait.Backoff{Duration: probeFirst, Factor: 1.5, Steps: math.MaxInt, Cap: probeCold}
	failures, pause, first := 0, cold, true
	return func(ctx context.Context) (time.Duration, bool) {
		limit := probeGuess
		if ready {
			limit = probeTimeout
		}
		err := h.probeOnce(ctx, limit)
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
		h.setReady(v, ready, err)
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

func (h *Health) probeOnce(ctx context.Context, limit time.Duration) error {
	pod, _, ip := h.owner.Look()
	if ip == "" {
		return errdefs.Unavailablef("the address of the guest is not known yet")
	}
	if h.cfg.Static {
		addr, err := netip.ParseAddr(ip)
		if err != nil {
			return errdefs.Invalidf("%q is not an IP address", ip)
		}
		if err := reach.Forbidden(addr); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	err := h.cfg.Prober.Probe(ctx, ip, convert.ProbePort(pod))
	h.cfg.Measured(time.Since(began))
	return err
}

func (h *Health) setReady(v *guestMonitor, ready bool, why error) {
	text := ""
	if why != nil {
		text = why.Error()
	}
	h.mu.Lock()
	fell := h.reach.Ready && !ready
	// Skip results of an earlier run. Skip other reasons for the same state, because they are not worth a write.
	idle := h.monitor != v || h.reach.Ready == ready && (h.reach.Why == "") == (text == "")
	if !idle {
		h.reach = podstatus.Reach{Ready: ready, Why: text}
	}
	h.mu.Unlock()
	if idle {
		return
	}
	h.owner.Poke()
	if fell {
		h.owner.Event(corev1.EventTypeWarning, eventUnhealthy, "VM does not answer: %s", text)
	}
}

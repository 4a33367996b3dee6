package podprovider

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	probing "github.com/prometheus-community/pro-bing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/vm"
)

// Prober finds out whether a guest can be reached.
type Prober interface {
	// Probe returns nil when ip answers: to a TCP connection on port, or, when port is 0, to an ICMP echo.
	Probe(ctx context.Context, ip string, port int) error
}

// The pace of probing: quick until the guest is ready, then steady; ready turns false after a few failures in a row.
const (
	probeTimeout  = 3 * time.Second
	probeGuess    = 500 * time.Millisecond // of a guest that is not ready: packets sent before it listened are lost
	probeFirst    = 100 * time.Millisecond
	probeCold     = 2 * time.Second // longest pause while not ready
	probeSteady   = 5 * time.Second
	probeFailures = 3
	probeHead     = 250 * time.Millisecond // how long a fresh guest's first status waits for its first probe
)

// NetProber probes over the network of this host.
type NetProber struct{ raw bool }

// NewNetProber returns a prober and whether it can send ICMP echoes. Without the right to open raw sockets
// (CAP_NET_RAW) it takes an address alone for readiness, which is weaker but better than none.
func NewNetProber() (NetProber, bool) {
	c, err := net.ListenPacket("ip4:icmp", "0.0.0.0")
	if err != nil {
		return NetProber{}, false
	}
	_ = c.Close()
	return NetProber{raw: true}, true
}

// Probe implements Prober.
func (n NetProber) Probe(ctx context.Context, ip string, port int) error {
	if port != 0 {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(ip, strconv.Itoa(port)))
		if err != nil {
			return fmt.Errorf("probe tcp port: %w", err)
		}
		return c.Close()
	}
	if !n.raw {
		return nil
	}
	p := probing.New(ip)
	p.SetPrivileged(true)
	p.Count, p.Timeout = 1, probeTimeout
	if err := p.RunWithContext(ctx); err != nil {
		return fmt.Errorf("ping %s: %w", ip, err)
	}
	if p.Statistics().PacketsRecv == 0 {
		return errdefs.Unavailablef("%s does not answer pings", ip)
	}
	return nil
}

// probe watches one run of one guest. first is closed after its first verdict.
type probe struct {
	cancel context.CancelFunc
	first  chan struct{}
}

// startProbe begins probing the present run of the guest. One that is trusted counts as ready until it fails.
func (w *worker) startProbe(rec *vm.Record, trusted bool) *probe {
	pr := &probe{first: make(chan struct{})}
	w.mu.Lock()
	w.probe, w.probed, w.ready = pr, rec.StartedAt, trusted
	w.mu.Unlock()
	pr.cancel = w.background(func(ctx context.Context) { w.probeLoop(ctx, pr, trusted) })
	return pr
}

func (w *worker) probeLoop(ctx context.Context, pr *probe, ready bool) {
	failures, pause := 0, probeFirst
	for n := 0; ; n++ {
		limit := probeGuess
		if ready {
			limit = probeTimeout
		}
		err := w.probeOnce(ctx, limit)
		if ctx.Err() != nil {
			return
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
		w.setReady(pr, ready, err)
		if n == 0 {
			close(pr.first)
		}
		next := probeSteady
		if !ready {
			next, pause = pause, min(pause*3/2, probeCold)
		} else {
			pause = probeFirst
		}
		if !sleep(ctx, nil, next, false) {
			return
		}
	}
}

func (w *worker) probeOnce(ctx context.Context, limit time.Duration) error {
	ip, port := w.target()
	if ip == "" {
		return errdefs.Unavailablef("its address is not known yet")
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	err := w.p.Prober.Probe(ctx, ip, port)
	w.p.Metrics.probe.Observe(time.Since(began).Seconds())
	return err
}

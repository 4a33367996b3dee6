//go:build bench

package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/kube/probe"
	"cocoonstack.io/cocoon/internal/probing"
)

const (
	probedGuests = 1000
	probedFor    = 20 * time.Second
	probePeriod  = 5 * time.Second // the period for a guest that is ready
	probeGoal    = 3.0             // per cent of a core
)

// probes measures the cost of pinging a thousand guests as the virtual node does. The guests are addresses of the
// loopback link, so that the kernel's work for their answers counts too.
func probes(t *testing.T, results *table) {
	pinger := must(probe.OpenPinger())(t)
	prober, scheduler := probe.NewNet(pinger), probing.NewScheduler()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { ended <- pinger.Run(ctx) }()
	go func() { ended <- scheduler.Run(ctx) }()
	var answers, misses atomic.Int64
	for i := range probedGuests {
		ip := netip.AddrFrom4([4]byte{127, 1, byte(i >> 8), byte(i)}).String()
		scheduler.Start(probePeriod*time.Duration(i)/probedGuests, func(ctx context.Context) (time.Duration, bool) {
			once, cancel := context.WithTimeout(ctx, 3*time.Second)
			defer cancel()
			if err := prober.Probe(once, ip, 0); err != nil {
				misses.Add(1)
			} else {
				answers.Add(1)
			}
			return probePeriod, true
		})
	}
	began, busy := time.Now(), cpuTime(t)
	<-time.After(probedFor)
	took := time.Since(began)
	busy = cpuTime(t) - busy
	got, lost := answers.Load(), misses.Load() // read before the pings in flight are cancelled
	cancel()
	for range 2 {
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
	if lost > 0 || got < probedGuests {
		t.Errorf("%d answers, %d pings without one", got, lost)
	}
	share := 100 * float64(busy) / float64(took)
	results.add(row{
		what: fmt.Sprintf("pings of %d guests, each every %s", probedGuests, probePeriod), a: ms(busy), b: ms(took),
		figure: fmt.Sprintf("%.2f %% of a core", share), goal: fmt.Sprintf("< %.0f %%", probeGoal), n: int(got), missed: share >= probeGoal,
	})
}

// cpuTime is the CPU time of this process, including the kernel's work for it.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

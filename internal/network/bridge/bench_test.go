package bridge

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

// BenchmarkTap attaches, detaches and releases while there are 100 other guests, alone and 16 at once, and reports each part.
func BenchmarkTap(b *testing.B) {
	netns.Require(b)
	need.Tun(b)
	for name, cfg := range map[string]Config{"guarded": {NAT: true}, "policed": {NAT: true}, "bare": {Unguarded: true}} {
		for _, atOnce := range []int{1, 16} {
			b.Run(fmt.Sprintf("%s/%d", name, atOnce), func(b *testing.B) {
				cfg := cfg
				cfg.StateDir, cfg.Subnet = b.TempDir(), "10.77.0.0/16"
				benchTaps(b, cfg, vm.NICSpec{Policed: name == "policed"}, atOnce)
			})
		}
	}
}

func benchTaps(b *testing.B, cfg Config, spec vm.NICSpec, atOnce int) {
	b.Helper()
	n := build(b, cfg)
	if err := n.Setup(b.Context()); err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := n.Teardown(context.WithoutCancel(b.Context())); err != nil {
			b.Error(err)
		}
	}()
	attach := func(i int) vm.NIC {
		nic, err := n.Attach(b.Context(), vm.ID(fmt.Sprint(i)), fmt.Sprint("vm", i), 0, spec)
		if err != nil {
			b.Error(err)
		}
		return nic
	}
	for i := range 100 {
		attach(-1 - i)
	}
	var spent [3]time.Duration
	nics := make([]vm.NIC, atOnce)
	all := func(part int, fn func(i int) error) {
		start := time.Now()
		var wg sync.WaitGroup
		for i := range atOnce {
			wg.Go(func() {
				if err := fn(i); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
		spent[part] += time.Since(start)
	}
	rounds := 0
	for b.Loop() {
		all(0, func(i int) error { nics[i] = attach(rounds*atOnce + i); return nil })
		all(1, func(i int) error { return n.Detach(b.Context(), nics[i]) })
		all(2, func(i int) error { return n.Release(b.Context(), nics[i]) })
		rounds++
	}
	for i, unit := range []string{"attach-ms/vm", "detach-ms/vm", "release-ms/vm"} {
		b.ReportMetric(float64(spent[i].Microseconds())/1000/float64(rounds*atOnce), unit)
	}
}

//go:build bench

package bench

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/vm"
)

// records creates and deletes a thousand VMs that are only records with a disk, a tap and an address, without a cluster. This
// measures the time of cocoond alone.
func records(t *testing.T, results *table) {
	d := recordEngine(t, "metricsAddr: "+engineMetrics)
	var conns []*nodeclient.Client
	for range clients {
		conns = append(conns, d.connect(t))
	}
	name := func(n int) string { return fmt.Sprintf("record-%d", n) }
	launch := func(c *nodeclient.Client, n int) error {
		_, err := c.Launch(t.Context(), vm.Spec{Name: name(n), Image: recordDisk, NICs: []vm.NICSpec{{}}}.Default())
		return err
	}
	remove := func(c *nodeclient.Client, n int) error { return c.Remove(t.Context(), name(n), true) }
	syncs := func() float64 { return engineMetric(t, "cocoon_journal_syncs_total") }

	const alone = 20
	before := syncs()
	for n := range alone {
		if err := errors.Join(launch(conns[0], n), remove(conns[0], n)); err != nil {
			t.Fatal(err)
		}
	}
	aloneSyncs := (syncs() - before) / alone

	phase := func(do func(*nodeclient.Client, int) error) (rate float64, cpu time.Duration) {
		before := cpuOf(t, d.pid)
		took := spreadOver(t, conns, manyPods, do)
		return manyPods / took.Seconds(), cpuOf(t, d.pid) - before
	}
	before = syncs()
	up, upCPU := phase(launch)
	down, downCPU := phase(remove)
	results.add(row{
		what: fmt.Sprintf("syncs of the journal for a VM that is launched and removed: one after the other (A), %d at a time (B)", clients),
		a:    fmt.Sprintf("%.2f", aloneSyncs), b: fmt.Sprintf("%.2f", (syncs()-before)/manyPods), n: manyPods,
	})
	results.add(row{
		what: "VMs that are records with a disk and a tap: launched (A), removed (B)", a: fmt.Sprintf("%.0f /s", up), b: fmt.Sprintf("%.0f /s", down), n: manyPods,
	})
	results.add(row{
		what: "CPU time of cocoond for each of them: launched (A), removed (B)", a: millis(upCPU / manyPods), b: millis(downCPU / manyPods), n: manyPods,
	})
}

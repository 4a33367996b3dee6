//go:build bench

package bench

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"cocoonstack.io/cocoon/internal/nodeclient"
)

const (
	clients   = 16
	alive     = 5000
	fakeCycle = 2000
)

// fakes drives a cocoond whose VMs are only records, to measure the cost of the engine, the journal and the node API alone:
// first VMs that are created and deleted, then many at once.
func fakes(t *testing.T, results *table) {
	d := start(t, "driver: fake\nnetwork: {enabled: false}\nlog: {level: warn}\n")
	var conns []*nodeclient.Client
	for range clients {
		conns = append(conns, d.connect(t))
	}
	launch := func(c *nodeclient.Client, n int) error {
		s := spec(fmt.Sprintf("fake-%d", n))
		s.NICs = nil
		_, err := c.Launch(t.Context(), s)
		return err
	}
	remove := func(c *nodeclient.Client, n int) error { return c.Remove(t.Context(), fmt.Sprintf("fake-%d", n), true) }

	before := rss(t, d.pid)
	cycles := spreadOver(t, conns, fakeCycle, func(c *nodeclient.Client, n int) error {
		if err := launch(c, n); err != nil {
			return err
		}
		return remove(c, n)
	})
	made := spreadOver(t, conns, alive, launch)
	perVM := float64(rss(t, d.pid)-before) / alive
	gone := spreadOver(t, conns, alive, remove)
	rate := fakeCycle / cycles.Seconds()
	results.add(row{
		what: "fake VMs created and deleted per second", figure: fmt.Sprintf("%.0f /s", rate), goal: ">= 500 /s", n: fakeCycle, missed: rate < 500,
	})
	results.add(row{
		what: "fake VMs: created (A), deleted (B) per second", a: fmt.Sprintf("%.0f /s", alive/made.Seconds()), b: fmt.Sprintf("%.0f /s", alive/gone.Seconds()), n: alive,
	})
	results.add(row{
		what: "RSS of cocoond: idle (A), with fake VMs alive (B)", a: fmt.Sprintf("%d MiB", before>>10), b: fmt.Sprintf("%.0f MiB", (float64(before)+perVM*alive)/1024),
		figure: fmt.Sprintf("%.1f KiB/VM", perVM), n: alive,
	})
}

// spreadOver calls do for 0 to n-1 with all clients at once and returns how long that took.
func spreadOver(t *testing.T, conns []*nodeclient.Client, n int, do func(*nodeclient.Client, int) error) time.Duration {
	t.Helper()
	var next atomic.Int64
	var all sync.WaitGroup
	began := time.Now()
	for _, c := range conns {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && !t.Failed(); i = int(next.Add(1)) - 1 {
				if err := do(c, i); err != nil {
					t.Errorf("number %d: %v", i, err)
				}
			}
		})
	}
	all.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return time.Since(began)
}

var vmRSS = regexp.MustCompile(`(?m)^VmRSS:\s+(\d+) kB`)

// rss is the resident memory of a process in KiB.
func rss(t *testing.T, pid int) int {
	t.Helper()
	text := must(os.ReadFile(fmt.Sprintf("/proc/%d/status", pid)))(t)
	m := vmRSS.FindSubmatch(text)
	if m == nil {
		t.Fatalf("no VmRSS of process %d", pid)
	}
	return must(strconv.Atoi(string(m[1])))(t)
}

//go:build bench

package bench

import (
	"fmt"
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"

	"cocoonstack.io/cocoon/internal/testkit/fakenode"
)

// The test of density is that of KubeVirt: so many machines, so far apart, of 128 MiB. What KubeVirt publishes of it, as the median of its last 120
// runs, includes the boot of a launcher and of a hypervisor, and no boot of a guest either. Here a VM is a record.
const (
	densityCount = 100
	densityPause = 100 * time.Millisecond
	publishedP50 = "15.9 s"
	publishedP99 = "29.4 s"

	crowdCount = 1000 // on one node, beside those
)

// density starts machines one after the other, and then many at once.
func density(t *testing.T, results *table) {
	c, api, manager := recordCluster(t)
	batch(t, api, "warm-up", 5, 0)
	took := batch(t, api, "density", densityCount, densityPause)
	results.add(row{
		what: "100 VirtualMachines 100 ms apart, create to Running, VMs in memory: p50 (A), p99 (B)", a: ms(took.median()), b: ms(took.quantile(0.99)),
		figure: "published of KubeVirt: " + publishedP50 + ", " + publishedP99, n: densityCount,
	})
	before, idle, began := c.requests(t), rss(t, manager.pid), time.Now()
	took = batch(t, api, "crowd", crowdCount, 0)
	all := time.Since(began)
	writes := 0
	for r, n := range c.requests(t) {
		if !strings.HasPrefix(r.resource, "leases") && !strings.HasPrefix(r.resource, "nodes") && r.resource != "serviceaccounts/token" {
			writes += n - before[r]
		}
	}
	busy := rss(t, manager.pid)
	results.add(row{
		what: "1,000 more at once: create to Running p50 (A), p99 (B), all", a: ms(took.median()), b: ms(took.quantile(0.99)),
		figure: all.Round(time.Millisecond).String(), n: crowdCount,
	})
	results.add(row{
		what: "the same: RSS of cocoon-manager before (A), after (B), per machine", a: fmt.Sprintf("%d MiB", idle>>10), b: fmt.Sprintf("%d MiB", busy>>10),
		figure: fmt.Sprintf("%.0f KiB", float64(busy-idle)/crowdCount), goal: "<= 1 MiB", n: crowdCount, missed: float64(busy-idle)/crowdCount > 1024,
	})
	results.add(row{what: "the same: API writes of everybody per machine, Events included", a: fmt.Sprintf("%.1f", float64(writes)/crowdCount), figure: "published of KubeVirt: 29.3", n: crowdCount})
	for _, name := range []string{"virtualmachine", "virtualmachineinstance"} {
		p50, p99 := reconciles(t, manager.metrics, name)
		results.add(row{what: "one reconcile of the controller " + name + ", of all machines: p50 (A), p99 (B), at most", a: p50, b: p99, n: crowdCount + densityCount})
	}
}

// batch creates n machines, pause apart, and returns the times from their creation until they run.
func batch(t *testing.T, api dynamic.Interface, prefix string, n int, pause time.Duration) samples {
	t.Helper()
	seen := must(api.Resource(instancesOf).Namespace(namespace).Watch(t.Context(), metav1.ListOptions{}))(t)
	defer seen.Stop()
	runs := make(chan map[string]time.Time, 1)
	go func() {
		at := map[string]time.Time{}
		for e := range seen.ResultChan() {
			o, ok := e.Object.(*unstructured.Unstructured)
			if !ok {
				break
			}
			if phase, _, _ := unstructured.NestedString(o.Object, "status", "phase"); phase == "Running" && strings.HasPrefix(o.GetName(), prefix) && at[o.GetName()].IsZero() {
				if at[o.GetName()] = time.Now(); len(at) == n {
					break
				}
			}
		}
		runs <- at
	}()
	tick := time.NewTicker(max(pause, time.Nanosecond))
	defer tick.Stop()
	created := map[string]time.Time{}
	for i := range n {
		if pause > 0 {
			<-tick.C
		}
		name := fmt.Sprintf("%s-%d", prefix, i)
		created[name] = time.Now()
		must(api.Resource(virtualMachines).Namespace(namespace).Create(t.Context(), virtualMachine(name, fakenode.Image), metav1.CreateOptions{}))(t)
	}
	var took samples
	select {
	case at := <-runs:
		for name, began := range created {
			if at[name].IsZero() {
				t.Fatalf("machine %s does not run: the watch of instances ended", name)
			}
			took = append(took, at[name].Sub(began))
		}
	case <-time.After(5 * time.Minute):
		t.Fatalf("not all of the %d machines %s run", n, prefix)
	}
	return took
}

// reconciles returns the bounds below which half, and 99 per cent, of the reconciles of a controller are.
func reconciles(t *testing.T, url, controller string) (p50, p99 string) {
	t.Helper()
	req := must(http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil))(t)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families := must(parser.TextToMetricFamilies(resp.Body))(t)
	for _, m := range families["controller_runtime_reconcile_time_seconds"].GetMetric() {
		for _, l := range m.GetLabel() {
			if l.GetName() == "controller" && l.GetValue() == controller {
				return bound(m.GetHistogram(), 0.5), bound(m.GetHistogram(), 0.99)
			}
		}
	}
	t.Fatalf("%s has no reconciles of %s", url, controller)
	return "", ""
}

func bound(h *dto.Histogram, q float64) string {
	for _, b := range h.GetBucket() {
		if float64(b.GetCumulativeCount()) >= q*float64(h.GetSampleCount()) && !math.IsInf(b.GetUpperBound(), 1) {
			return ms(time.Duration(b.GetUpperBound() * float64(time.Second)))
		}
	}
	return "more"
}

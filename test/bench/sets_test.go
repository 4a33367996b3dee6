//go:build bench

package bench

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

const (
	setCount  = 100
	setAgents = 2 // per set: the main VM and one forked from it
)

// sets makes the manager create many sets at once on a node whose VMs are only records, and counts the write requests to the API
// server for it.
func sets(t *testing.T, results *table) {
	k := kubetest.Up(t, "--with", "manager,epoch")
	k.Install(t)
	config := *k.Config
	config.QPS = -1
	c := &cluster{dir: k.Dir, kube: must(kubernetes.NewForConfig(&config))(t)}
	fakenode.Start(t, fakenode.Options{
		Name: "records", Identity: k.Identity(t, "records"),
		EpochURL: epochURL(t, k.Dir), EpochTokenFile: filepath.Join(k.Dir, "etc", "epoch-tokens"),
	})
	c.await(t, "records")
	c.awaitAccount(t)
	api := must(dynamic.NewForConfig(&config))(t).Resource(v1.GroupVersion.WithResource("cocoonsets")).Namespace(namespace)
	began := map[string]time.Time{}
	seen := must(api.Watch(t.Context(), metav1.ListOptions{}))(t)
	defer seen.Stop()

	run := func(prefix string, n int) (took samples, whole time.Duration) {
		first := time.Now()
		for i := range n {
			set := &v1.CocoonSet{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", prefix, i)}, Spec: v1.CocoonSetSpec{Agent: v1.AgentSpec{Image: fakenode.Image, Mode: "run", Replicas: setAgents - 1}}}
			o := &unstructured.Unstructured{Object: map[string]any{}}
			if err := json.Unmarshal(must(json.Marshal(set))(t), &o.Object); err != nil {
				t.Fatal(err)
			}
			o.SetGroupVersionKind(v1.GroupVersion.WithKind("CocoonSet"))
			began[set.Name] = time.Now()
			must(api.Create(t.Context(), o, metav1.CreateOptions{}))(t)
		}
		for left := n; left > 0; {
			select {
			case e := <-seen.ResultChan():
				o, ok := e.Object.(*unstructured.Unstructured)
				if !ok {
					t.Fatalf("the watch of sets ended: %v", e.Object)
				}
				phase, _, _ := unstructured.NestedString(o.Object, "status", "phase")
				if at, waits := began[o.GetName()]; waits && e.Type != watch.Deleted && phase == string(v1.SetRunning) {
					took = append(took, time.Since(at))
					delete(began, o.GetName())
					left--
				}
			case <-time.After(time.Minute):
				t.Fatalf("%d of %d sets are not Running\n%s", left, n, k.Kubectl(t, "", "get", "cocoonsets,pods,events", "-o", "wide"))
			}
		}
		return took, time.Since(first)
	}
	run("warm-up", 1)
	alone, _ := run("alone", 1)
	results.note("one set of %d alone, to all agents Ready: %s", setAgents, ms(alone.median()))
	before := c.requests(t)
	took, whole := run("set", setCount)
	results.add(row{what: "CocoonSet to all agents Ready, 100 sets of 2 on the fake driver: each (A), all (B)", a: ms(took.median()), b: ms(whole), figure: fmt.Sprintf("%.0f agents/s", setCount*setAgents/whole.Seconds()), n: setCount})

	after := c.requests(t)
	objects, events := 0, 0
	results.note("\nAPI writes while %d agents of %d sets were started:", setCount*setAgents, setCount)
	for _, r := range slices.SortedFunc(maps.Keys(after), func(a, b request) int { return strings.Compare(a.resource+a.verb, b.resource+b.verb) }) {
		n := after[r] - before[r]
		switch {
		case n == 0 || strings.HasPrefix(r.resource, "leases") || strings.HasPrefix(r.resource, "nodes"), r.resource == "serviceaccounts/token", r.resource == "cocoonsets" && r.verb == "POST":
			continue
		case r.resource == "events":
			events += n
		default:
			objects += n
		}
		results.note("  %4d  %5.2f per agent  %-7s %s", n, float64(n)/(setCount*setAgents), r.verb, r.resource)
	}
	perAgent := float64(objects) / (setCount * setAgents)
	results.add(row{
		what: "API writes per agent started, of all (without Events)", a: fmt.Sprintf("%.1f Events", float64(events)/(setCount*setAgents)),
		figure: fmt.Sprintf("%.1f", perAgent), goal: "<= 8", n: setCount * setAgents, missed: perAgent > 8,
	})
}

func nodeReady(n *corev1.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// epochURL is the address of the registry of an instance.
func epochURL(t *testing.T, dir string) string {
	t.Helper()
	var s struct {
		EpochPort int `json:"epochPort"`
	}
	if err := json.Unmarshal(must(os.ReadFile(filepath.Join(dir, "up.json")))(t), &s); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("http://127.0.0.1:%d", s.EpochPort)
}

//go:build bench

package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"
)

const (
	sandboxRounds = 7
	sandboxes     = "../../examples/sandbox"
)

// claims compares the time from a claim of a sandbox of a warm pool, whose pods are clones, with that of a pod that boots. The
// controller of the sandboxes is the one of agent-sandbox.
func claims(t *testing.T, results *table) {
	c := up(t, &table{})
	kubeconfig := filepath.Join(c.dir, "kubeconfig")
	kubectl := func(args ...string) { run(t, bin("kubectl"), append([]string{"--kubeconfig", kubeconfig}, args...)...) }
	kubectl("apply", "--server-side", "-f", bin("agent-sandbox.yaml"))
	kubectl("wait", "crd", "--all", "--for=condition=Established")
	background(t, "agent-sandbox-controller", os.Environ(), bin("agent-sandbox-controller"), "--kubeconfig", kubeconfig, "--extensions",
		"--leader-elect=false", "--metrics-bind-address=0", "--health-probe-bind-address=0")

	w, _, gone := c.create(t, "source")
	w.await(t, "source is Ready", podReady)
	run(t, bin("cocoon"), "--dir", c.dir, "snapshot", "save", "--name", "agent:v1", "vk-"+namespace+"-source")
	gone()
	kubectl("apply", "-f", filepath.Join(sandboxes, "pool.yaml"))
	api := must(dynamic.NewForConfig(must(clientcmd.BuildConfigFromFlags("", kubeconfig))(t)))(t)
	of := func(resource, name string) *objectWatch {
		r := api.Resource(schema.GroupVersionResource{Group: "extensions.agents.x-k8s.io", Version: "v1alpha1", Resource: resource}).Namespace(namespace)
		seen := must(r.Watch(t.Context(), metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", name).String()}))(t)
		return &objectWatch{r, seen}
	}
	claim := &unstructured.Unstructured{}
	if err := yaml.UnmarshalStrict(must(os.ReadFile(filepath.Join(sandboxes, "claim.yaml")))(t), &claim.Object); err != nil {
		t.Fatal(err)
	}
	var warm, cold samples
	for n := range sandboxRounds + 1 {
		pool := of("sandboxwarmpools", "workers")
		pool.await(t, "a sandbox waits in the pool", func(o *unstructured.Unstructured) bool {
			ready, _, _ := unstructured.NestedInt64(o.Object, "status", "readyReplicas")
			return ready == 1
		})
		pool.seen.Stop()
		mine := of("sandboxclaims", claim.GetName())
		began := time.Now()
		must(mine.api.Create(t.Context(), claim, metav1.CreateOptions{}))(t)
		a := mine.await(t, "the claim is Ready", conditionReady).Sub(began)
		if err := mine.api.Delete(t.Context(), claim.GetName(), metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		mine.await(t, "the claim is gone", nil)
		mine.seen.Stop()

		w, began, gone := c.create(t, fmt.Sprintf("cold-%d", n))
		b := w.await(t, "the pod is Ready", podReady).Sub(began)
		gone()
		if n > 0 { // the first round only warms up
			warm, cold = append(warm, a), append(cold, b)
		}
	}
	kubectl("delete", "-f", filepath.Join(sandboxes, "pool.yaml"))
	ratio(results, "sandbox claimed out of a warm pool to Ready (A), pod that boots to Ready (B)", warm.median(), cold.median(), 0.1, sandboxRounds)
}

// objectWatch follows one object.
type objectWatch struct {
	api  dynamic.ResourceInterface
	seen watch.Interface
}

// await reads events until ok accepts the object (nil: until it is deleted), and returns the time of that.
func (w *objectWatch) await(t *testing.T, what string, ok func(*unstructured.Unstructured) bool) time.Time {
	t.Helper()
	limit := time.NewTimer(2 * time.Minute)
	defer limit.Stop()
	for {
		select {
		case e, open := <-w.seen.ResultChan():
			o, is := e.Object.(*unstructured.Unstructured)
			switch {
			case !open || !is:
				t.Fatalf("%s: the watch ended with %v", what, e)
			case ok == nil && e.Type == watch.Deleted, ok != nil && e.Type != watch.Deleted && ok(o):
				return time.Now()
			}
		case <-limit.C:
			t.Fatalf("%s: not within two minutes", what)
		}
	}
}

// conditionReady reports whether the condition Ready of an object is True.
func conditionReady(o *unstructured.Unstructured) bool {
	all, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	return slices.ContainsFunc(all, func(c any) bool {
		m, _ := c.(map[string]any)
		return m["type"] == "Ready" && m["status"] == "True"
	})
}

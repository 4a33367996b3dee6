//go:build e2e

package cocoonmanager_test

import (
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// TestManager lets real managers, with the shipped rights, reconcile sets on nodes whose VMs exist only as records,
// while their dependencies fail: the managers themselves, the registry, nodes.
func TestManager(t *testing.T) {
	r := newRig(t)
	before := r.denied(t)
	t.Run("upgrade", func(t *testing.T) { upgrade(t, r) })
	t.Run("killed", func(t *testing.T) { killed(t, r) })
	t.Run("machines", func(t *testing.T) { machines(t, r) })
	t.Run("snapshots of machines", func(t *testing.T) { machineSnapshots(t, r) })
	t.Run("with two", func(t *testing.T) { withTwo(t, r) })
	for what, n := range r.denied(t) {
		if n != before[what] {
			t.Errorf("the shipped rights do not do: %d requests were refused: %s", n-before[what], what)
		}
	}
}

// births records the pods created in a namespace: the UIDs of each name, in the order of creation.
type births struct {
	mu   sync.Mutex
	seen map[string][]types.UID
}

func (r *rig) births(t *testing.T, ns string) *births {
	t.Helper()
	b := &births{seen: map[string][]types.UID{}}
	w, err := r.kube.CoreV1().Pods(ns).Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for e := range w.ResultChan() {
			pod, ok := e.Object.(*corev1.Pod)
			if !ok {
				return
			}
			b.mu.Lock()
			if !slices.Contains(b.seen[pod.Name], pod.UID) {
				b.seen[pod.Name] = append(b.seen[pod.Name], pod.UID)
			}
			b.mu.Unlock()
		}
	}()
	t.Cleanup(func() { w.Stop(); <-done })
	return b
}

func (b *births) count(pod string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.seen[pod])
}

// upgrade stores sets under the schema of the seed, replaces it with ours and lets the manager reconcile them.
func upgrade(t *testing.T, r *rig) {
	ns := "upgrade"
	r.namespace(t, ns)
	r.Kubectl(t, "", "delete", "crd", "cocoonsets.cocoonset.cocoonstack.io", "--timeout=240s")
	crd, err := os.ReadFile("testdata/seed-crd.yaml")
	if err != nil {
		t.Fatal(err)
	}
	r.Kubectl(t, string(crd), "create", "-f", "-")
	kubetest.Eventually(t, "the schema is established", func() string { // kubectl wait fails as long as there are no conditions
		out, _ := r.TryKubectl(t, "", "get", "crd", "cocoonsets.cocoonset.cocoonstack.io", "-o", `jsonpath={.status.conditions[?(@.type=="Established")].status}`)
		return out
	}, "True")
	r.Kubectl(t, `
apiVersion: cocoonset.cocoonstack.io/v1
kind: CocoonSet
metadata: {name: old, namespace: upgrade}
spec: {agent: {image: demo, mode: run, replicas: 1}, toolboxes: [{name: db, image: demo}]}
---
# Ours would refuse it: a toolbox has the name of an agent.
apiVersion: cocoonset.cocoonstack.io/v1
kind: CocoonSet
metadata: {name: odd, namespace: upgrade}
spec: {agent: {image: demo, mode: run}, toolboxes: [{name: "0", image: demo}]}
`, "create", "-f", "-")
	r.Kubectl(t, "", "patch", "cocoonsets", "old", "-n", ns, "--subresource=status", "--type=merge", "-p",
		`{"status":{"observedGeneration":1,"phase":"Pending","readyAgents":0,"agents":[{"slot":0,"role":"main","podName":"old-0","vmName":"vk-upgrade-old-0","phase":"Pending"}],"conditions":[{"type":"Ready","status":"False","reason":"AgentsNotReady","lastTransitionTime":"2026-05-01T00:00:00Z","message":""}]}}`)
	r.Install(t)
	kubetest.Eventually(t, "the schema is ours", func() string {
		out, _ := r.TryKubectl(t, "", "get", "cocoonsets", "old", "-n", ns, "-o", "jsonpath={.spec.hibernatePolicy} {.spec.agent.backend} {.status.phase} {.status.agents[0].podName}")
		return out
	}, "retain cloud-hypervisor Pending old-0")

	m := r.manager(t, nil, "--leader-elect=false")
	m.start(t)
	defer m.kill()
	// The old schema wrote a backend into every set that this node does not have. The manager reports that and does
	// nothing else.
	r.state(t, ns, "old", "Failed 0/2 0/1")
	c := meta.FindStatusCondition(r.set(t, ns, "old").Status.Conditions, v1.ConditionReady)
	if c == nil || !strings.Contains(c.Message, "cloud-hypervisor") {
		t.Errorf("the set does not say what is wrong: %+v", c)
	}
	r.patch(t, ns, "old", `{"spec":{"agent":{"backend":null},"toolboxes":[{"name":"db","image":"demo"}]}}`)
	r.state(t, ns, "old", "Running 2/2 1/1")
	// An object that violates a new rule can be changed to a valid one, and deleted.
	if err := r.api.Delete(t.Context(), r.set(t, ns, "odd")); err != nil {
		t.Fatal(err)
	}
	if err := r.api.Delete(t.Context(), r.set(t, ns, "old")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"odd", "old"} {
		kubetest.Eventually(t, name, func() string { return string(r.set(t, ns, name).UID) }, "")
	}
}

// killed runs a set through its life with a manager that is killed after each of its writes.
func killed(t *testing.T, r *rig) {
	ns := "killed"
	r.namespace(t, ns)
	seen := r.births(t, ns)
	k := newKiller(t, r.Config)
	k.manager = r.manager(t, k.server, "--leader-elect=false")
	k.manager.start(t)
	defer k.manager.kill()
	defer k.stop()

	r.create(t, ns, "team", v1.CocoonSetSpec{Agent: v1.AgentSpec{Replicas: 1}, Toolboxes: []v1.ToolboxSpec{{Name: "db", Image: "demo"}}})
	r.state(t, ns, "team", "Running 2/2 1/1")
	boots := map[string]string{}
	for _, pod := range []string{"team-0", "team-1", "team-db"} {
		boots[pod] = boot(t, r.node, ns, pod)
	}
	same := func(pods ...string) {
		t.Helper()
		for _, pod := range pods {
			if b := boot(t, r.node, ns, pod); b != boots[pod] {
				t.Errorf("the guest of %s has booted: what was in its memory is lost", pod)
			}
		}
	}
	if boots["team-0"] != boots["team-1"] {
		t.Error("the sub-agent is no fork of the main VM")
	}
	r.patch(t, ns, "team", `{"spec":{"suspend":true}}`)
	r.state(t, ns, "team", "Suspended 0/2 0/1")
	for pod := range boots {
		if code := r.tag(t, contract.Repository(ns, contract.VMName(ns, pod)), contract.HibernateSnapshotTag); code != http.StatusOK {
			t.Errorf("the set is Suspended and the registry answers %d for %s", code, pod)
		}
	}
	r.patch(t, ns, "team", `{"spec":{"suspend":false}}`)
	r.state(t, ns, "team", "Running 2/2 1/1")
	same("team-0", "team-1", "team-db")

	h := &v1.CocoonHibernation{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "team-1"}, Spec: v1.CocoonHibernationSpec{PodRef: v1.PodReference{Name: "team-1"}, Desire: v1.DesireHibernate}}
	if err := r.api.Create(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	phase := func() string {
		if err := r.api.Get(t.Context(), client.ObjectKeyFromObject(h), h); err != nil {
			return err.Error()
		}
		return string(h.Status.Phase)
	}
	kubetest.Eventually(t, "the hibernation", phase, "Hibernated")
	h.Spec.Desire = v1.DesireWake
	if err := r.api.Patch(t.Context(), h, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"desire":"Wake"}}`))); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "the hibernation", phase, "Active")
	if err := r.api.Delete(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "the hibernation is gone", func() string {
		return fmt.Sprint(apierrors.IsNotFound(r.api.Get(t.Context(), client.ObjectKeyFromObject(h), h)))
	}, "true")
	same("team-1")

	r.patch(t, ns, "team", `{"spec":{"agent":{"replicas":0},"toolboxes":null,"hibernatePolicy":"release","suspend":true}}`)
	r.state(t, ns, "team", "Suspended 0/1 0/0")
	kubetest.Eventually(t, "the pods", func() string { return fmt.Sprint(len(r.pods(t, ns))) }, "0")
	r.patch(t, ns, "team", `{"spec":{"suspend":false}}`)
	r.state(t, ns, "team", "Running 1/1 0/0")
	same("team-0")
	if err := r.api.Delete(t.Context(), r.set(t, ns, "team")); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "the set", func() string { return string(r.set(t, ns, "team").UID) }, "")
	if code := r.tag(t, contract.Repository(ns, contract.VMName(ns, "team-0")), contract.HibernateSnapshotTag); code != http.StatusNotFound {
		t.Errorf("the set is gone and the registry answers %d for its hibernated state", code)
	}
	for pod, want := range map[string]int{"team-0": 2, "team-1": 1, "team-db": 1} { // the main VM's slot was given up once
		if n := seen.count(pod); n != want {
			t.Errorf("pod %s was created %d times, not %d", pod, n, want)
		}
	}
	kills := k.stop()
	for _, what := range []string{"POST pods", "PATCH pods", "DELETE pods", "PATCH cocoonsets", "PUT cocoonsets/status", "PATCH cocoonhibernations", "PUT cocoonhibernations/status"} {
		if kills[what] == 0 {
			t.Errorf("no manager was killed after %s", what)
		}
	}
	t.Logf("managers were killed after: %v", kills)
}

//go:build e2e

package cocoonmanager_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	quantity "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	v1 "cocoonstack.io/cocoon/api/cocoonset/v1"
	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// withTwo runs two managers, as shipped, while one of them, the registry and a node go away.
func withTwo(t *testing.T, r *rig) {
	g := newGate(t, r)
	managers := []*process{r.manager(t, g.server), r.manager(t, g.server)}
	for _, m := range managers {
		m.start(t)
		defer m.kill()
	}
	t.Run("while", func(t *testing.T) { // its sub-tests have ended when it returns
		t.Run("the leader is killed", func(t *testing.T) { t.Parallel(); leader(t, r, managers, g) })
		t.Run("the registry is away", func(t *testing.T) { t.Parallel(); registryAway(t, r) })
		t.Run("forks", func(t *testing.T) { t.Parallel(); forkElsewhere(t, r) })
		t.Run("a node is away", func(t *testing.T) { t.Parallel(); nodeAway(t, r) })
	})
}

// gate is a proxy between managers and the API server. It lets a number of pods of one namespace be created, and holds back the others until it opens.
type gate struct {
	server *httptest.Server
	passed atomic.Int32
	open   chan struct{}
}

// The namespace whose pods a gate holds back, and how many pass.
const (
	heldBack = "leader"
	passes   = 25
)

func newGate(t *testing.T, r *rig) *gate {
	t.Helper()
	g, proxy := &gate{open: make(chan struct{})}, proxyTo(t, r.Config)
	g.server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodPost && req.URL.Path == "/api/v1/namespaces/"+heldBack+"/pods" && g.passed.Add(1) > passes {
			select {
			case <-g.open:
			case <-req.Context().Done(): // its manager was killed
				return
			}
		}
		proxy.ServeHTTP(w, req)
	}))
	t.Cleanup(g.server.Close)
	return g
}

// leader kills the leading manager while it makes many sets. The other one takes over, and nothing is made twice.
func leader(t *testing.T, r *rig, managers []*process, g *gate) {
	ns, count := heldBack, 20
	r.namespace(t, ns)
	limits := corev1.LimitRangeItem{Type: corev1.LimitTypeContainer, Default: corev1.ResourceList{corev1.ResourceMemory: quantity.MustParse("128Mi")}}
	if err := r.api.Create(t.Context(), &corev1.LimitRange{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "sizes"}, Spec: corev1.LimitRangeSpec{Limits: []corev1.LimitRangeItem{limits}}}); err != nil {
		t.Fatal(err) // fields that it adds to pods are no reason to recreate them
	}
	seen := r.births(t, ns)
	first, second := managers[0], managers[1]
	kubetest.Eventually(t, "the managers that lead", func() string {
		if second.led() > 0 {
			first, second = second, first
		}
		return fmt.Sprint(first.led(), second.led())
	}, "1 0")
	for i := range count {
		r.create(t, ns, fmt.Sprintf("s%d", i), v1.CocoonSetSpec{Agent: v1.AgentSpec{Replicas: 1}})
	}
	kubetest.Eventually(t, "some pods are made", func() string { return fmt.Sprint(len(r.pods(t, ns)) > count/2) }, "true")
	first.kill()
	if n := len(r.pods(t, ns)); n > passes {
		t.Errorf("%d pods were made, and the gate lets %d pass", n, passes)
	}
	close(g.open)
	for i := range count {
		r.state(t, ns, fmt.Sprintf("s%d", i), "Running 2/2 0/0")
	}
	for i := range count {
		for slot := range 2 {
			pod := fmt.Sprintf("s%d-%d", i, slot)
			if n := seen.count(pod); n != 1 {
				t.Errorf("pod %s was created %d times", pod, n)
			}
		}
	}
	if n := second.led(); n != 1 {
		t.Errorf("the other manager became the leader %d times", n)
	}
	first.start(t) // and waits now
}

// registryAway stops the registry: no set is called Suspended, and no set that has snapshots there is deleted.
func registryAway(t *testing.T, r *rig) {
	ns := "registry"
	r.namespace(t, ns)
	r.create(t, ns, "team", v1.CocoonSetSpec{})
	r.state(t, ns, "team", "Running 1/1 0/0")
	was := boot(t, r.node, ns, "team-0")
	r.epoch.kill()
	r.patch(t, ns, "team", `{"spec":{"suspend":true}}`)
	r.state(t, ns, "team", "Suspending 0/1 0/0")
	message := func() string {
		return r.pods(t, ns)["team-0"].Annotations[contract.KeyLifecycleMessage]
	}
	kubetest.Eventually(t, "the pod says why", func() string { return fmt.Sprint(message() != "") }, "true")
	if boot(t, r.node, ns, "team-0") != was {
		t.Error("the VM was put to sleep although its state cannot be kept")
	}
	r.epoch.start(t)
	r.state(t, ns, "team", "Suspended 0/1 0/0")
	r.patch(t, ns, "team", `{"spec":{"suspend":false}}`)
	r.state(t, ns, "team", "Running 1/1 0/0")
	if boot(t, r.node, ns, "team-0") != was {
		t.Error("the guest has booted: what was in its memory is lost")
	}

	r.patch(t, ns, "team", `{"spec":{"snapshotPolicy":"never"}}`) // the pod is recreated: the node must know the policy
	r.state(t, ns, "team", "Running 1/1 0/0")
	r.epoch.kill()
	set := r.set(t, ns, "team")
	if err := r.api.Delete(t.Context(), set); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "an Event says that the registry cannot be cleared", func() string {
		events, err := r.kube.EventsV1().Events(ns).List(t.Context(), metav1.ListOptions{})
		for _, e := range events.Items {
			if e.Reason == "RegistryCleanupFailed" {
				return "said"
			}
		}
		return fmt.Sprint(err)
	}, "said")
	if r.set(t, ns, "team").UID != set.UID {
		t.Error("the set is gone although its state could not be cleared away")
	}
	r.epoch.start(t)
	kubetest.Eventually(t, "the set", func() string { return string(r.set(t, ns, "team").UID) }, "")
	if code := r.tag(t, contract.Repository(ns, contract.VMName(ns, "team-0")), contract.HibernateSnapshotTag); code != http.StatusNotFound {
		t.Errorf("the set is gone and the registry answers %d for its hibernated state", code)
	}
}

// forkElsewhere leaves no room for a fork on the main VM's node. The fork resumes from the main VM's memory on another
// node, and its snapshot in the registry is removed with the set.
func forkElsewhere(t *testing.T, r *rig) {
	ns := "forks"
	r.namespace(t, ns)
	nodes := map[string]*fakenode.Node{"fork-a": r.startNode(t, "fork-a", ns), "fork-b": r.startNode(t, "fork-b", ns)}
	r.create(t, ns, "team", v1.CocoonSetSpec{NodePool: ns, SnapshotPolicy: contract.SnapshotNever, Agent: v1.AgentSpec{ForkPolicy: v1.ForkPreferMainNode}})
	r.state(t, ns, "team", "Running 1/1 0/0")
	main := r.pods(t, ns)["team-0"].Spec.NodeName
	full := `{"spec":{"unschedulable":true}}`
	if _, err := r.kube.CoreV1().Nodes().Patch(t.Context(), main, types.MergePatchType, []byte(full), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	r.patch(t, ns, "team", `{"spec":{"agent":{"replicas":2}}}`)
	r.state(t, ns, "team", "Running 3/3 0/0")
	want := boot(t, nodes[main], ns, "team-0")
	for _, name := range []string{"team-1", "team-2"} {
		on := r.pods(t, ns)[name].Spec.NodeName
		if on == main {
			t.Errorf("%s is on %s, which is full", name, on)
			continue
		}
		if boot(t, nodes[on], ns, name) != want {
			t.Errorf("%s has booted: it has nothing of the main VM's memory", name)
		}
	}
	repo := contract.Repository(ns, contract.VMName(ns, "team-0"))
	if code := r.tag(t, repo, contract.ForkSnapshotTag); code != http.StatusOK {
		t.Errorf("the registry answers %d for the main VM's state", code)
	}
	if err := r.api.Delete(t.Context(), r.set(t, ns, "team")); err != nil {
		t.Fatal(err)
	}
	kubetest.Eventually(t, "the set", func() string { return string(r.set(t, ns, "team").UID) }, "")
	if code := r.tag(t, repo, contract.ForkSnapshotTag); code != http.StatusNotFound {
		t.Errorf("the set is gone and the registry answers %d for the main VM's state", code)
	}
}

// nodeAway stops a node until the cluster evicts its pods, and for some time after. The set's pods and VMs stay
// unchanged.
func nodeAway(t *testing.T, r *rig) {
	ns := "away"
	r.namespace(t, ns)
	node := r.startNode(t, "two", "away")
	r.create(t, ns, "team", v1.CocoonSetSpec{NodePool: "away", Agent: v1.AgentSpec{Replicas: 1}})
	r.state(t, ns, "team", "Running 2/2 0/0")
	was := r.pods(t, ns)
	boots := map[string]string{"team-0": boot(t, node, ns, "team-0"), "team-1": boot(t, node, ns, "team-1")}
	second := int64(1)
	witness := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "witness"}, Spec: corev1.PodSpec{
		NodeName: "two", Containers: []corev1.Container{{Name: "a", Image: "demo"}},
		Tolerations: []corev1.Toleration{
			{Key: contract.TaintKey, Operator: corev1.TolerationOpExists},
			{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: &second},
		},
	}}
	if err := r.api.Create(t.Context(), witness); err != nil {
		t.Fatal(err)
	}
	node.Stop(t)
	kubetest.Eventually(t, "the node", func() string { return r.nodeReady(t, "two") }, "Unknown")
	kubetest.Eventually(t, "a pod that tolerates it for a second", func() string {
		p, there := r.pods(t, ns)["witness"]
		return fmt.Sprint(!there || p.DeletionTimestamp != nil)
	}, "true")
	r.state(t, ns, "team", "Pending 0/2 0/0")
	for name, pod := range r.pods(t, ns) {
		if name != "witness" && (pod.UID != was[name].UID || pod.DeletionTimestamp != nil) {
			t.Errorf("pod %s of the set was deleted because its node is away", name)
		}
	}
	node.Start(t)
	r.state(t, ns, "team", "Running 2/2 0/0")
	for pod, b := range boots {
		if r.pods(t, ns)[pod].UID != was[pod].UID || boot(t, node, ns, pod) != b {
			t.Errorf("pod %s or its guest is another now", pod)
		}
	}
	kubetest.Eventually(t, "the pod that was evicted", func() string { return string(r.pods(t, ns)["witness"].UID) }, "")
}

//go:build bench

package bench

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/cert"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/deploy/kubevirt"
	kubepod "cocoonstack.io/cocoon/internal/kube/kubevirt"
	"cocoonstack.io/cocoon/internal/testkit/fakenode"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
	"cocoonstack.io/cocoon/internal/testkit/port"
)

const (
	machineRounds = 7
	machineCount  = 100
	machineWrites = 8 // API writes of Cocoon for a VirtualMachine that is started, Events included
)

var (
	virtualMachines = schema.GroupVersionResource{Group: "kubevirt.io", Version: "v1", Resource: "virtualmachines"}
	instancesOf     = schema.GroupVersionResource{Group: "kubevirt.io", Version: "v1", Resource: "virtualmachineinstances"}
)

// virtualMachine is a machine of the size of the bench's pods.
func virtualMachine(name, image string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": map[string]any{"name": name},
		"spec": map[string]any{"runStrategy": "Always", "template": map[string]any{"spec": map[string]any{
			"terminationGracePeriodSeconds": int64(5),
			"domain":                        map[string]any{"devices": map[string]any{}, "cpu": map[string]any{"cores": int64(guestCPUs)}, "memory": map[string]any{"guest": fmt.Sprint(guestMemory)}},
			"volumes":                       []any{map[string]any{"name": "root", "containerDisk": map[string]any{"image": image}}},
		}}},
	}}
}

// starts compares the start of a VirtualMachine with that of a pod that is the same guest, in turns.
func starts(t *testing.T, results *table) {
	c := up(t, results)
	config := must(clientcmd.BuildConfigFromFlags("", filepath.Join(c.dir, "kubeconfig")))(t)
	config.QPS = -1
	api := must(dynamic.NewForConfig(config))(t)
	machine := func(name string) time.Duration {
		seen := must(api.Resource(instancesOf).Namespace(namespace).Watch(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + name}))(t)
		defer seen.Stop()
		began := time.Now()
		must(api.Resource(virtualMachines).Namespace(namespace).Create(t.Context(), virtualMachine(name, podImage), metav1.CreateOptions{}))(t)
		awaitPhase(t, seen, map[string]bool{name: true})
		took := time.Since(began)
		if err := api.Resource(virtualMachines).Namespace(namespace).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		until(t, time.Minute, name+" is gone", func() bool {
			_, err := api.Resource(virtualMachines).Namespace(namespace).Get(t.Context(), name, metav1.GetOptions{})
			return err != nil
		})
		return took
	}
	// The pod is what the machine's instance becomes, without the instance.
	plain := func(name string) time.Duration {
		vmi := &v1.VirtualMachineInstance{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(name)}}
		template, _, _ := unstructured.NestedMap(virtualMachine(name, podImage).Object, "spec", "template", "spec")
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(template, &vmi.Spec); err != nil {
			t.Fatal(err)
		}
		w, began, gone := c.create(t, name, func(pod *corev1.Pod) {
			of := kubepod.Pod(vmi)
			pod.Spec, pod.Annotations, pod.Labels = of.Spec, of.Annotations, of.Labels
		})
		at := w.await(t, name+" runs", runs)
		gone()
		return at.Sub(began)
	}
	machine("warm-up")
	plain("warm-up-pod")
	var ofMachines, ofPods samples
	for n := range machineRounds {
		ofPods = append(ofPods, plain(fmt.Sprintf("plain-%d", n)))
		ofMachines = append(ofMachines, machine(fmt.Sprintf("machine-%d", n)))
	}
	results.add(row{
		what: "VirtualMachine create to its instance Running (A), pod of the same guest (B)", a: ms(ofMachines.median()), b: ms(ofPods.median()),
		figure: fmt.Sprintf("%+.0f ms", float64(ofMachines.median()-ofPods.median())/1e6), n: machineRounds,
	})
}

// awaitPhase reads the events of a watch until all instances named in waits run.
func awaitPhase(t *testing.T, seen watch.Interface, waits map[string]bool) {
	t.Helper()
	limit := time.NewTimer(2 * time.Minute)
	defer limit.Stop()
	for len(waits) > 0 {
		select {
		case e := <-seen.ResultChan():
			o, ok := e.Object.(*unstructured.Unstructured)
			if !ok {
				t.Fatalf("the watch of instances ended: %v", e.Object)
			}
			if phase, _, _ := unstructured.NestedString(o.Object, "status", "phase"); phase == "Running" && waits[o.GetName()] {
				delete(waits, o.GetName())
			}
		case <-limit.C:
			t.Fatalf("%d instances do not run", len(waits))
		}
	}
}

// machines starts many VirtualMachines on a node whose VMs are only records. It counts the write requests to the API server, and what the
// manager's memory grows by.
func machines(t *testing.T, results *table) {
	c, api, manager := recordCluster(t)
	pid := manager.pid
	run := func(prefix string, n int) {
		seen := must(api.Resource(instancesOf).Namespace(namespace).Watch(t.Context(), metav1.ListOptions{}))(t)
		defer seen.Stop()
		waits := map[string]bool{}
		for i := range n {
			name := fmt.Sprintf("%s-%d", prefix, i)
			waits[name] = true
			must(api.Resource(virtualMachines).Namespace(namespace).Create(t.Context(), virtualMachine(name, fakenode.Image), metav1.CreateOptions{}))(t)
		}
		awaitPhase(t, seen, waits)
		until(t, 2*time.Minute, "the machines are ready", func() bool {
			list := must(api.Resource(virtualMachines).Namespace(namespace).List(t.Context(), metav1.ListOptions{}))(t)
			return !slices.ContainsFunc(list.Items, func(o unstructured.Unstructured) bool {
				ready, _, _ := unstructured.NestedBool(o.Object, "status", "ready")
				return !ready
			})
		})
	}
	run("warm-up", 5)
	idle, before := rss(t, pid), c.requests(t)
	began := time.Now()
	run("machine", machineCount)
	took := time.Since(began)
	after, busy := c.requests(t), rss(t, pid)
	objects, events := 0, 0
	results.note("\nAPI writes while %d VirtualMachines were started in %s:", machineCount, took.Round(time.Millisecond))
	for _, r := range slices.SortedFunc(maps.Keys(after), func(a, b request) int { return strings.Compare(a.resource+a.verb, b.resource+b.verb) }) {
		n := after[r] - before[r]
		switch {
		case n == 0 || strings.HasPrefix(r.resource, "leases") || strings.HasPrefix(r.resource, "nodes"), r.resource == "serviceaccounts/token":
			continue
		case r.resource == "events":
			events += n
		default:
			objects += n
		}
		results.note("  %4d  %5.2f per machine  %-7s %s", n, float64(n)/machineCount, r.verb, r.resource)
	}
	of := c.eventsOf(t, "machine-")
	for _, what := range slices.Sorted(maps.Keys(of)) {
		results.note("  Event %s: %.2f per machine", what, float64(of[what])/machineCount)
	}
	// The scheduler binds a pod and says so, and this test creates the machine. A node with a certificate of its own would say nothing of that.
	all := float64(objects+events-of["Pod NotServed"]) / machineCount
	ours := all - 3
	results.add(row{
		what: "API writes per VirtualMachine started: without Events (A), of all (B), of Cocoon with Events", a: fmt.Sprintf("%.1f", float64(objects)/machineCount), b: fmt.Sprintf("%.1f", all),
		figure: fmt.Sprintf("%.1f", ours), goal: fmt.Sprintf("<= %d", machineWrites), n: machineCount, missed: ours > machineWrites,
	})
	perVM := float64(busy-idle) / machineCount
	results.add(row{
		what: "RSS of cocoon-manager: with 5 machines (A), with 100 more (B)", a: fmt.Sprintf("%d MiB", idle>>10), b: fmt.Sprintf("%d MiB", busy>>10),
		figure: fmt.Sprintf("%.0f KiB each", perVM), goal: "<= 1 MiB", n: machineCount, missed: perVM > 1024,
	})
}

// recordCluster is a cluster with the controllers of KubeVirt's objects, and with one node whose VMs are only records.
func recordCluster(t *testing.T) (*cluster, dynamic.Interface, kubeVirtProcess) {
	t.Helper()
	k := kubetest.Up(t, "--with", "epoch")
	k.Install(t)
	for _, text := range append(kubevirt.Kinds(), kubevirt.ManagerRights, kubevirt.Namespace) {
		k.Kubectl(t, string(text), "apply", "--server-side", "-f", "-")
	}
	k.Kubectl(t, "", "create", "clusterrolebinding", "cocoon-manager-kubevirt", "--clusterrole=cocoon-manager-kubevirt", "--serviceaccount="+kubetest.Namespace+":cocoon-manager")
	k.Kubectl(t, "", "wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
	config := *k.Config
	config.QPS = -1
	c := &cluster{dir: k.Dir, kube: must(kubernetes.NewForConfig(&config))(t)}
	manager := kubeVirtManager(t, k)
	fakenode.Start(t, fakenode.Options{Name: "records", Identity: k.Identity(t, "records")})
	c.await(t, "records")
	c.awaitAccount(t)
	return c, must(dynamic.NewForConfig(&config))(t), manager
}

// kubeVirtProcess is a manager that runs.
type kubeVirtProcess struct {
	pid     int
	metrics string // URL
}

// eventsOf counts the Events about objects whose names begin with prefix, by author and reason.
func (c *cluster) eventsOf(t *testing.T, prefix string) map[string]int {
	t.Helper()
	by := map[string]int{}
	for _, e := range must(c.kube.EventsV1().Events(namespace).List(t.Context(), metav1.ListOptions{}))(t).Items {
		if strings.Contains(e.Regarding.Name, prefix) {
			by[e.Regarding.Kind+" "+e.Reason]++
		}
	}
	return by
}

// kubeVirtManager runs a manager with the controllers of KubeVirt's objects until the test ends.
func kubeVirtManager(t *testing.T, k *kubetest.Cluster) kubeVirtProcess {
	t.Helper()
	crt, key, err := cert.GenerateSelfSignedCertKey("localhost", nil, nil)
	dir := t.TempDir()
	crtFile, keyFile, log := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key"), filepath.Join(dir, "log")
	if err := errors.Join(err, os.WriteFile(crtFile, crt, 0o600), os.WriteFile(keyFile, key, 0o600)); err != nil {
		t.Fatal(err)
	}
	out := must(os.Create(log))(t)
	addr := func() string { return must(port.Free())(t) }
	metrics := addr()
	cmd := exec.Command(bin("cocoon-manager"), "--kubeconfig", k.ServiceAccount(t, "cocoon-manager", nil), "--namespace", kubetest.Namespace, "--metrics-addr", metrics,
		"--epoch-url", epochURL(t, k.Dir), "--epoch-token-file", filepath.Join(k.Dir, "etc", "epoch-tokens"), "--probe-addr", addr(),
		"--kubevirt-addr", addr(), "--kubevirt-cert", crtFile, "--kubevirt-key", keyFile, "--leader-elect=false")
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(log)
			t.Logf("cocoon-manager:\n%s", text[max(0, len(text)-4000):])
		}
		out.Close()
	})
	return kubeVirtProcess{pid: cmd.Process.Pid, metrics: "http://" + metrics + "/metrics"}
}

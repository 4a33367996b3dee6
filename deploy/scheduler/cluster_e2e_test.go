//go:build e2e

package scheduler_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	applycoordination "k8s.io/client-go/applyconfigurations/coordination/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/kube/placement"
	"cocoonstack.io/cocoon/internal/testkit/kubetest"
)

// cluster is a real control plane with the manager and cocoon-scheduler. Its nodes are only objects: no process serves them.
type cluster struct {
	dir    string
	rest   *rest.Config
	client kubernetes.Interface
	custom dynamic.Interface
}

func start(t *testing.T) *cluster {
	t.Helper()
	k := kubetest.Up(t, "--with", "manager,scheduler")
	c := &cluster{dir: k.Dir, rest: k.Config}
	var err error
	if c.client, err = kubernetes.NewForConfig(c.rest); err != nil {
		t.Fatal(err)
	}
	if c.custom, err = dynamic.NewForConfig(c.rest); err != nil {
		t.Fatal(err)
	}
	c.heartbeats(t)
	return c
}

// heartbeats renews the leases of all nodes until the test ends. Otherwise the cluster would mark them unreachable.
func (c *cluster) heartbeats(t *testing.T) {
	leases := c.client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	beat := func(ctx context.Context) {
		nodes, err := c.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return // the next one may succeed
		}
		for _, n := range nodes.Items {
			apply := applycoordination.Lease(n.Name, corev1.NamespaceNodeLease).WithSpec(applycoordination.LeaseSpec().WithHolderIdentity(n.Name).WithRenewTime(metav1.NowMicro()))
			_, _ = leases.Apply(ctx, apply, metav1.ApplyOptions{FieldManager: "test", Force: true})
		}
	}
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() {
		for tick := time.NewTicker(10 * time.Second); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
				beat(ctx)
			}
		}
	})
}

// requests counts the scheduler's reads from the API server. Opened watches count too.
func (c *cluster) requests(t *testing.T) (reads int) {
	t.Helper()
	var settings struct{ SchedulerPort int }
	if err := json.Unmarshal(must[[]byte](t)(os.ReadFile(filepath.Join(c.dir, "up.json"))), &settings); err != nil {
		t.Fatal(err)
	}
	client := must[*http.Client](t)(rest.HTTPClientFor(c.rest))
	resp, err := client.Get(fmt.Sprintf("https://127.0.0.1:%d/metrics", settings.SchedulerPort))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text := must[[]byte](t)(io.ReadAll(resp.Body))
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "rest_client_requests_total{") && strings.Contains(line, `method="GET"`) {
			n := must[float64](t)(strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(line, ' '):]), 64))
			reads += int(n)
		}
	}
	if reads == 0 {
		t.Fatalf("the scheduler tells nothing of what it reads: %s: %.300s", resp.Status, text)
	}
	return reads
}

// room is a namespace, with nodes that only its pods go to.
type room struct {
	*cluster
	t    *testing.T
	name string
}

func (c *cluster) room(t *testing.T) *room {
	t.Helper()
	name := "r-" + strings.ToLower(strings.NewReplacer("/", "-", "_", "-").Replace(strings.TrimPrefix(t.Name(), "Test")))
	if _, err := c.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	r := &room{c, t, name}
	r.until("the namespace can have pods", func() bool {
		_, err := c.client.CoreV1().ServiceAccounts(name).Get(t.Context(), "default", metav1.GetOptions{})
		return err == nil
	})
	return r
}

// until waits for a condition. The time that it takes is not tested.
func (r *room) until(what string, ok func() bool) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 4*time.Minute)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-ctx.Done():
			events, _ := r.client.CoreV1().Events(r.name).List(r.t.Context(), metav1.ListOptions{})
			for _, e := range events.Items {
				r.t.Logf("%s %s: %s", e.InvolvedObject.Name, e.Reason, e.Message)
			}
			r.t.Fatalf("not so in time: %s", what)
		case <-tick.C:
		}
	}
}

func must[T any](t *testing.T) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// node creates a node of the room. machine is the id of its machine.
func (r *room) node(short, machine string, pods int64) {
	r.t.Helper()
	room := corev1.ResourceList{corev1.ResourcePods: *resource.NewQuantity(pods, resource.DecimalSI), corev1.ResourceCPU: resource.MustParse("64"), corev1.ResourceMemory: resource.MustParse("64Gi")}
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: r.on(short), Labels: map[string]string{"room": r.name, corev1.LabelHostname: r.on(short)}},
		Status: corev1.NodeStatus{
			Capacity: room, Allocatable: room, NodeInfo: corev1.NodeSystemInfo{MachineID: machine},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now()}},
		},
	}
	must[*corev1.Node](r.t)(r.client.CoreV1().Nodes().Create(r.t.Context(), n, metav1.CreateOptions{}))
	status := must[[]byte](r.t)(json.Marshal(map[string]any{"status": n.Status}))
	must[*corev1.Node](r.t)(r.client.CoreV1().Nodes().Patch(r.t.Context(), n.Name, types.MergePatchType, status, metav1.PatchOptions{}, "status"))
}

func (r *room) on(short string) string { return r.name + "-" + short }

// close taints a node, so that only pods which tolerate the taint go there.
func (r *room) close(short string) {
	r.t.Helper()
	r.change(short, `{"spec":{"taints":[{"key":"closed","effect":"NoSchedule"}]}}`)
}

// change changes a node and its status.
func (r *room) change(short, patch string) {
	r.t.Helper()
	for _, part := range [][]string{nil, {"status"}} {
		must[*corev1.Node](r.t)(r.client.CoreV1().Nodes().Patch(r.t.Context(), r.on(short), types.MergePatchType, []byte(patch), metav1.PatchOptions{}, part...))
	}
}

func (r *room) drop(short string) {
	r.t.Helper()
	if err := r.client.CoreV1().Nodes().Delete(r.t.Context(), r.on(short), metav1.DeleteOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

type podOption func(*corev1.Pod)

// sticky makes the VM of the pod sticky. profile is the scheduler profile that places it.
func sticky(profile string) podOption {
	return func(p *corev1.Pod) {
		p.Spec.SchedulerName = profile
		metav1.SetMetaDataAnnotation(&p.ObjectMeta, contract.KeySticky, contract.StickyWait)
	}
}

func plain(p *corev1.Pod) { p.Spec.SchedulerName = contract.StickyScheduler }

func ownedBy(apiVersion, kind, name string, uid types.UID) podOption {
	return func(p *corev1.Pod) {
		p.Spec.SchedulerName = contract.StickyScheduler
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: apiVersion, Kind: kind, Name: name, UID: uid, Controller: new(true)}}
	}
}

func (r *room) spec(name string, options ...podOption) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: r.name},
		Spec: corev1.PodSpec{
			NodeSelector: map[string]string{"room": r.name}, Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			Containers: []corev1.Container{{Name: "c", Image: "none"}},
		},
	}
	for _, o := range options {
		o(p)
	}
	return p
}

func (r *room) pod(name string, options ...podOption) *corev1.Pod {
	r.t.Helper()
	return must[*corev1.Pod](r.t)(r.client.CoreV1().Pods(r.name).Create(r.t.Context(), r.spec(name, options...), metav1.CreateOptions{}))
}

func (r *room) get(name string) *corev1.Pod {
	r.t.Helper()
	return must[*corev1.Pod](r.t)(r.client.CoreV1().Pods(r.name).Get(r.t.Context(), name, metav1.GetOptions{}))
}

// placed waits until the pod is bound and returns its node.
func (r *room) placed(name string) string {
	r.t.Helper()
	r.until("pod "+name+" is placed", func() bool { // a controller may not have created it yet
		pod, err := r.client.CoreV1().Pods(r.name).Get(r.t.Context(), name, metav1.GetOptions{})
		return err == nil && pod.Spec.NodeName != "" || err != nil && !apierrors.IsNotFound(err)
	})
	return strings.TrimPrefix(r.get(name).Spec.NodeName, r.name+"-")
}

// waits waits until the scheduler reports that the pod waits, and why.
func (r *room) waits(name, why string) {
	r.t.Helper()
	r.until("pod "+name+" waits because "+why, func() bool {
		for _, c := range r.get(name).Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && strings.Contains(c.Message, why) {
				return true
			}
		}
		return false
	})
}

// remove deletes a pod at once, as its node would do.
func (r *room) remove(name string) {
	r.t.Helper()
	if err := r.client.CoreV1().Pods(r.name).Delete(r.t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
		r.t.Fatal(err)
	}
	r.until("pod "+name+" is gone", func() bool {
		_, err := r.client.CoreV1().Pods(r.name).Get(r.t.Context(), name, metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
}

// boot does what a virtual node does before it creates the pod's VM.
func (r *room) boot(name string) error {
	p := r.get(name)
	return placement.Claims{Custom: r.custom, Nodes: r.client, Node: p.Spec.NodeName}.Hold(r.t.Context(), p)
}

// run waits until the pod is placed, makes its VM, and returns the node.
func (r *room) run(name string, options ...podOption) string {
	r.t.Helper()
	r.pod(name, options...)
	on := r.placed(name)
	if err := r.boot(name); err != nil {
		r.t.Fatal(err)
	}
	return on
}

func (r *room) claims() dynamic.ResourceInterface {
	return r.custom.Resource(placement.Resource).Namespace(r.name)
}

func (r *room) vm(pod string) string { return contract.VMName(r.name, pod) }

// events returns the reasons and texts of the Events about an object.
func (r *room) events(about string) string {
	r.t.Helper()
	list := must[*corev1.EventList](r.t)(r.client.CoreV1().Events(r.name).List(r.t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + about}))
	var all strings.Builder
	for _, e := range list.Items {
		fmt.Fprintln(&all, e.Reason, e.Message)
	}
	return all.String()
}

var (
	machines  = schema.GroupVersionResource{Group: "kubevirt.io", Version: "v1", Resource: "virtualmachines"}
	instances = schema.GroupVersionResource{Group: "kubevirt.io", Version: "v1", Resource: "virtualmachineinstances"}
)

const stickyNode = "vm.cocoonstack.io/sticky-node"

// kubevirt installs KubeVirt's kinds in the cluster, as its operator does.
func (c *cluster) kubevirt(t *testing.T) {
	t.Helper()
	for plural, kind := range map[string]string{"virtualmachines": "VirtualMachine", "virtualmachineinstances": "VirtualMachineInstance"} {
		crd := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": plural + ".kubevirt.io"},
			"spec": map[string]any{
				"group": "kubevirt.io", "scope": "Namespaced", "names": map[string]any{"plural": plural, "singular": strings.ToLower(kind), "kind": kind},
				"versions": []any{map[string]any{
					"name": "v1", "served": true, "storage": true, "subresources": map[string]any{"status": map[string]any{}},
					"schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
				}},
			},
		}}
		must[*unstructured.Unstructured](t)(c.custom.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}).Create(t.Context(), crd, metav1.CreateOptions{}))
	}
}

// machine creates a VirtualMachine and its instance, and returns the option that makes a pod belong to the instance.
func (r *room) machine(name string, annotations map[string]string) podOption {
	r.t.Helper()
	vm := r.create(machines, "VirtualMachine", name, annotations)
	return r.instance(name, vm)
}

// instance creates an instance, owned by vm unless vm is nil.
func (r *room) instance(name string, vm *unstructured.Unstructured) podOption {
	r.t.Helper()
	o := object("VirtualMachineInstance", name, nil)
	if vm != nil {
		o.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: "kubevirt.io/v1", Kind: "VirtualMachine", Name: name, UID: vm.GetUID(), Controller: new(true)}})
	}
	o = must[*unstructured.Unstructured](r.t)(r.custom.Resource(instances).Namespace(r.name).Create(r.t.Context(), o, metav1.CreateOptions{}))
	return ownedBy("kubevirt.io/v1", "VirtualMachineInstance", name, o.GetUID())
}

func object(kind, name string, annotations map[string]string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{}}
	o.SetAPIVersion("kubevirt.io/v1")
	o.SetKind(kind)
	o.SetName(name)
	o.SetAnnotations(annotations)
	return o
}

func (r *room) create(resource schema.GroupVersionResource, kind, name string, annotations map[string]string) *unstructured.Unstructured {
	r.t.Helper()
	var got *unstructured.Unstructured
	r.until(kind+" can be made", func() (ok bool) { // the API may have been defined a moment ago
		var err error
		got, err = r.custom.Resource(resource).Namespace(r.name).Create(r.t.Context(), object(kind, name, annotations), metav1.CreateOptions{})
		return err == nil
	})
	return got
}

func (r *room) recorded(name string) string {
	r.t.Helper()
	vm := must[*unstructured.Unstructured](r.t)(r.custom.Resource(machines).Namespace(r.name).Get(r.t.Context(), name, metav1.GetOptions{}))
	return strings.TrimPrefix(vm.GetAnnotations()[stickyNode], r.name+"-")
}

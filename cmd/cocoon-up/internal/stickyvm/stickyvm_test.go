package stickyvm

import (
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/informers"
	kubefake "k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
)

// handle is the part of the scheduler that the plugin uses.
type handle struct {
	fwk.Handle
	factory informers.SharedInformerFactory

	mu    sync.Mutex
	woken []string
}

func (h *handle) SharedInformerFactory() informers.SharedInformerFactory { return h.factory }

func (h *handle) Activate(_ klog.Logger, pods map[string]*v1.Pod) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for name := range pods {
		h.woken = append(h.woken, name)
	}
}

func nodeOf(name, uid, machine string) *v1.Node {
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(uid)}, Status: v1.NodeStatus{NodeInfo: v1.NodeSystemInfo{MachineID: machine}}}
}

func custom(apiVersion, kind, name, uid string, owner *metav1.OwnerReference, rest map[string]any) *unstructured.Unstructured {
	u := &unstructured.Unstructured{Object: rest}
	if u.Object == nil {
		u.Object = map[string]any{}
	}
	annotations, _, _ := unstructured.NestedStringMap(u.Object, "annotations")
	delete(u.Object, "annotations")
	u.SetAPIVersion(apiVersion)
	u.SetKind(kind)
	u.SetNamespace("ns")
	u.SetName(name)
	u.SetUID(types.UID(uid))
	u.SetAnnotations(annotations)
	if owner != nil {
		u.SetOwnerReferences([]metav1.OwnerReference{*owner})
	}
	return u
}

func owner(apiVersion, kind, name, uid string) *metav1.OwnerReference {
	return &metav1.OwnerReference{APIVersion: apiVersion, Kind: kind, Name: name, UID: types.UID(uid), Controller: new(true)}
}

func claim(name, node, uid, machine string) *unstructured.Unstructured {
	return custom("cocoonset.cocoonstack.io/v1", "VMPlacement", name, "c-"+name, nil, map[string]any{
		"spec": map[string]any{"release": "Wait"}, "status": map[string]any{"nodeName": node, "nodeUID": uid, "machineID": machine, "podUID": "x"},
	})
}

func instance(name string, vm *metav1.OwnerReference) *unstructured.Unstructured {
	return custom("kubevirt.io/v1", "VirtualMachineInstance", name, "i-"+name, vm, nil)
}

func machine(name string, annotations map[string]any) *unstructured.Unstructured {
	return custom("kubevirt.io/v1", "VirtualMachine", name, "m-"+name, nil, map[string]any{"annotations": annotations})
}

func asking(name string) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name), Annotations: map[string]string{askAnnotation: "wait"}}}
}

func launcher(name, instance string) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: name, UID: types.UID(name), OwnerReferences: []metav1.OwnerReference{*owner("kubevirt.io/v1", "VirtualMachineInstance", instance, "i-"+instance)},
	}}
}

// plugin is a plugin that knows nodes a and b, pods and objects.
func plugin(t *testing.T, pods []*v1.Pod, objects ...runtime.Object) (*Plugin, *handle) {
	t.Helper()
	core := []runtime.Object{nodeOf("a", "u-a", "m-a"), nodeOf("b", "u-b", "m-b")}
	for _, p := range pods {
		core = append(core, p)
	}
	h := &handle{factory: informers.NewSharedInformerFactory(kubefake.NewClientset(core...), 0)}
	client := fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), map[schema.GroupVersionResource]string{
		claims: "VMPlacementList", instances: "VirtualMachineInstanceList", machines: "VirtualMachineList",
	}, objects...)
	pl, err := build(t.Context(), h, client)
	if err != nil {
		t.Fatal(err)
	}
	h.factory.Start(t.Context().Done())
	h.factory.WaitForCacheSync(t.Context().Done())
	if !cache.WaitForCacheSync(t.Context().Done(), pl.objects.claims.informer.HasSynced, pl.objects.instances.informer.HasSynced, pl.objects.machines.informer.HasSynced) {
		t.Fatal("no objects")
	}
	return pl, h
}

func TestPreFilter(t *testing.T) {
	vmOf := func(name string) *metav1.OwnerReference {
		return owner("kubevirt.io/v1", "VirtualMachine", name, "m-"+name)
	}
	elsewhere := asking("other")
	elsewhere.Annotations[nameAnnotation], elsewhere.Spec.NodeName = "shared", "b"
	over := asking("over")
	over.Annotations[nameAnnotation], over.Spec.NodeName, over.Status.Phase = "shared-2", "b", v1.PodSucceeded
	pl, _ := plugin(t, []*v1.Pod{elsewhere, over},
		claim("vk-ns-held", "a", "u-a", "m-a"), claim("named", "b", "u-b", ""), claim("vk-ns-fresh", "", "", ""),
		claim("vk-ns-gone", "z", "u-z", ""), claim("vk-ns-replaced", "a", "u-old", ""), claim("vk-ns-anew", "a", "u-old", "m-a"),
		instance("lone", nil), instance("first", vmOf("first")), machine("first", nil),
		instance("known", vmOf("known")), machine("known", map[string]any{nodeAnnotation: "b", claimAnnotation: "m-known/u-b"}),
		instance("copy", vmOf("copy")), machine("copy", map[string]any{nodeAnnotation: "b", claimAnnotation: "m-known/u-b"}),
		instance("hand", vmOf("hand")), machine("hand", map[string]any{nodeAnnotation: "a"}),
		instance("late", vmOf("late")), instance("reborn", owner("kubevirt.io/v1", "VirtualMachine", "known", "m-former")),
		instance("reinstalled", vmOf("reinstalled")), machine("reinstalled", map[string]any{nodeAnnotation: "b", claimAnnotation: "m-reinstalled/u-former"}),
	)
	with := func(p *v1.Pod, change func(*v1.Pod)) *v1.Pod { change(p); return p }
	for name, c := range map[string]struct {
		pod  *v1.Pod
		node string   // that it may go to
		code fwk.Code // Skip: anywhere
		why  string
	}{
		"nobody's": {&v1.Pod{}, "", fwk.Skip, ""},
		"a controller's": {with(&v1.Pod{}, func(p *v1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{*owner("apps/v1", "ReplicaSet", "x", "x")}
		}), "", fwk.Skip, ""},
		"another group's": {with(&v1.Pod{}, func(p *v1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{*owner("example.com/v1", "VirtualMachineInstance", "known", "i-known")}
		}), "", fwk.Skip, ""},
		"not its controller":      {with(launcher("p", "known"), func(p *v1.Pod) { p.OwnerReferences[0].Controller = nil }), "", fwk.Skip, ""},
		"without a claim":         {asking("new"), "", fwk.Skip, ""},
		"claimed":                 {asking("held"), "a", fwk.Success, ""},
		"claimed by name":         {with(asking("p"), func(p *v1.Pod) { p.Annotations[nameAnnotation] = "named" }), "b", fwk.Success, ""},
		"about to be claimed":     {asking("fresh"), "", fwk.Skip, ""},
		"does not ask":            {with(asking("held"), func(p *v1.Pod) { p.Annotations = nil }), "", fwk.Skip, ""},
		"node removed":            {asking("gone"), "", fwk.UnschedulableAndUnresolvable, "node z, which holds the state of VM ns/vk-ns-gone, was removed; to give that state up, delete the VMPlacement vk-ns-gone"},
		"node replaced":           {asking("replaced"), "", fwk.UnschedulableAndUnresolvable, "another machine"},
		"node registered anew":    {asking("anew"), "a", fwk.Success, ""},
		"beside another pod":      {with(asking("p"), func(p *v1.Pod) { p.Annotations[nameAnnotation] = "shared" }), "b", fwk.Success, ""},
		"beside one that is over": {with(asking("p"), func(p *v1.Pod) { p.Annotations[nameAnnotation] = "shared-2" }), "", fwk.Skip, ""},
		"instance without a VM":   {launcher("p", "lone"), "", fwk.Skip, ""},
		"first start":             {launcher("p", "first"), "", fwk.Skip, ""},
		"recorded":                {launcher("p", "known"), "b", fwk.Success, ""},
		"a copy":                  {launcher("p", "copy"), "", fwk.Skip, ""},
		"named by hand":           {launcher("p", "hand"), "a", fwk.Success, ""},
		"migrates":                {with(launcher("p", "known"), func(p *v1.Pod) { p.Labels = map[string]string{migrationLabel: "j"} }), "", fwk.Skip, ""},
		"instance not known yet":  {launcher("p", "unheard"), "", fwk.UnschedulableAndUnresolvable, "VirtualMachineInstance unheard of the pod is not loaded yet"},
		"another instance":        {with(launcher("p", "known"), func(p *v1.Pod) { p.OwnerReferences[0].UID = "former" }), "", fwk.UnschedulableAndUnresolvable, "not loaded yet"},
		"VM not known yet":        {launcher("p", "late"), "", fwk.UnschedulableAndUnresolvable, "VirtualMachine late of the pod is not loaded yet"},
		"another VM":              {launcher("p", "reborn"), "", fwk.UnschedulableAndUnresolvable, "not loaded yet"},
		"VM's node replaced":      {launcher("p", "reinstalled"), "", fwk.UnschedulableAndUnresolvable, "remove the annotation"},
	} {
		t.Run(name, func(t *testing.T) {
			state := framework.NewCycleState()
			result, status := pl.PreFilter(t.Context(), state, c.pod, nil)
			if status.Code() != c.code || !strings.Contains(status.Message(), c.why) {
				t.Fatalf("%v: %s", status.Code(), status.Message())
			}
			if (c.node != "") != (result != nil) || result != nil && (len(result.NodeNames) != 1 || !result.NodeNames.Has(c.node)) {
				t.Fatalf("nodes %v", result)
			}
			fragments, signed := pl.SignPod(t.Context(), c.pod)
			if signed.Code() == fwk.Error || len(fragments) > 0 && c.node != "" && fragments[0].Value != c.node+" " {
				t.Errorf("signed %v, %v", fragments, signed)
			}
			for _, node := range []string{"a", "b"} {
				info := framework.NewNodeInfo()
				info.SetNode(nodeOf(node, "", ""))
				if got := pl.Filter(t.Context(), state, c.pod, info); c.code != fwk.UnschedulableAndUnresolvable && got.IsSuccess() != (c.node == "" || c.node == node) || !got.IsSuccess() && got.Code() != fwk.UnschedulableAndUnresolvable {
					t.Errorf("node %s: %v", node, got.Code())
				}
			}
		})
	}
}

// After Reserve, the next pod of the VM goes to the same node, even before the informer reports the first.
func TestReserve(t *testing.T) {
	pl, _ := plugin(t, nil)
	named := func(name string) *v1.Pod {
		p := asking(name)
		p.Annotations[nameAnnotation] = "vm"
		return p
	}
	one, two := named("one"), named("two")
	begin := func(p *v1.Pod) fwk.CycleState {
		state := framework.NewCycleState()
		if _, status := pl.PreFilter(t.Context(), state, p, nil); !status.IsSuccess() && !status.IsSkip() {
			t.Fatal(status)
		}
		return state
	}
	first, second := begin(one), begin(two)
	if status := pl.Reserve(t.Context(), first, one, "a"); !status.IsSuccess() {
		t.Fatal(status)
	}
	if status := pl.Reserve(t.Context(), second, two, "b"); status.IsSuccess() {
		t.Error("two nodes are reserved for one VM")
	}
	if got := read(begin(two)).node; got != "a" {
		t.Errorf("the second pod is sent to %q", got)
	}
	pl.Unreserve(t.Context(), second, two, "b") // it had not reserved
	if got := read(begin(two)).node; got != "a" {
		t.Errorf("the second pod is sent to %q", got)
	}
	pl.Unreserve(t.Context(), first, one, "a")
	if got := read(begin(two)).node; got != "" {
		t.Errorf("the second pod is sent to %q, where nobody is", got)
	}
}

func TestPreBind(t *testing.T) {
	vm := machine("vm", nil)
	vm.SetResourceVersion("7")
	pl, _ := plugin(t, nil, vm, instance("vm", owner("kubevirt.io/v1", "VirtualMachine", "vm", "m-vm")))
	pod, state := launcher("p", "vm"), framework.NewCycleState()
	pl.PreFilter(t.Context(), state, pod, nil)
	if _, status := pl.PreBindPreFlight(t.Context(), state, pod, "a"); !status.IsSuccess() {
		t.Fatal(status)
	}
	if status := pl.PreBind(t.Context(), state, pod, "nowhere"); status.IsSuccess() {
		t.Error("a node that is not there is recorded")
	}
	if status := pl.PreBind(t.Context(), state, pod, "a"); !status.IsSuccess() {
		t.Fatal(status)
	}
	got, err := pl.client.Resource(machines).Namespace("ns").Get(t.Context(), "vm", metav1.GetOptions{})
	if err != nil || got.GetAnnotations()[nodeAnnotation] != "a" || got.GetAnnotations()[claimAnnotation] != "m-vm/u-a" {
		t.Errorf("%v, %v", got.GetAnnotations(), err)
	}
	for _, nothing := range []*v1.Pod{asking("p"), {}} {
		state := framework.NewCycleState()
		pl.PreFilter(t.Context(), state, nothing, nil)
		if _, status := pl.PreBindPreFlight(t.Context(), state, nothing, "a"); !status.IsSkip() {
			t.Errorf("there is something to record of %v", nothing.Name)
		}
	}
}

func TestNodeEvents(t *testing.T) {
	pl, _ := plugin(t, nil, claim("vk-ns-p", "a", "u-a", ""))
	for name, want := range map[string]fwk.QueueingHint{"a": fwk.Queue, "b": fwk.QueueSkip} {
		if got, err := pl.onNode(klog.Background(), asking("p"), nil, nodeOf(name, "", "")); got != want || err != nil {
			t.Errorf("node %s: %v, %v", name, got, err)
		}
		if got, err := pl.onNode(klog.Background(), asking("p"), nodeOf(name, "", ""), nil); got != want || err != nil {
			t.Errorf("node %s is gone: %v, %v", name, got, err)
		}
	}
	if events, err := pl.EventsToRegister(t.Context()); err != nil || len(events) == 0 {
		t.Errorf("%v, %v", events, err)
	}
}

// A change of a VM's objects wakes its pods, and no others.
func TestWake(t *testing.T) {
	placed := asking("placed")
	placed.Annotations[nameAnnotation], placed.Spec.NodeName = "vm", "a"
	waits := asking("waits")
	waits.Annotations[nameAnnotation] = "vm"
	pl, h := plugin(t, []*v1.Pod{placed, waits, asking("other"), launcher("launcher", "i")})
	pl.wake(cocoonKey("ns", "vm"))
	pl.wake(kubevirtKey("ns", "i"))
	if got := strings.Join(h.woken, " "); got != "ns/waits ns/launcher" {
		t.Errorf("woken: %s", got)
	}
}

func TestSlim(t *testing.T) {
	o, err := slim(claim("c", "a", "u", "m"))
	u, _ := o.(*unstructured.Unstructured)
	if err != nil || u.Object["spec"] != nil {
		t.Fatalf("%v, %v", o, err)
	}
	status, _, _ := unstructured.NestedMap(u.Object, "status")
	if len(status) != 3 || status["nodeName"] != "a" {
		t.Errorf("%v", status)
	}
	if o, err := slim(cache.DeletedFinalStateUnknown{Key: "k"}); o == nil || err != nil {
		t.Errorf("%v, %v", o, err)
	}
}

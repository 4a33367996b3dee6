package unplaced

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"cocoonstack.io/cocoon/api/contract"
)

// cluster has one node for VMs, another one, a pod that the scheduler refused, and others.
type cluster struct {
	pod   *corev1.Pod
	nodes []corev1.Node
	pods  []corev1.Pod
}

func (c cluster) Get(_ context.Context, key client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	if key.Name != c.pod.Name {
		return apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, key.Name)
	}
	c.pod.DeepCopyInto(obj.(*corev1.Pod))
	return nil
}

func (c cluster) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	switch list := list.(type) {
	case *corev1.NodeList:
		list.Items = c.nodes
	case *corev1.PodList:
		list.Items = append(c.pods, *c.pod)
	}
	return nil
}

func list(cpu string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu)}
}

func container(cpu string) corev1.Container {
	return corev1.Container{Resources: corev1.ResourceRequirements{Requests: list(cpu)}}
}

func newCluster() cluster {
	taint := corev1.Taint{Key: contract.TaintKey, Value: contract.TaintValue, Effect: corev1.TaintEffectNoSchedule}
	return cluster{
		pod: &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "ns"},
			Spec: corev1.PodSpec{
				Containers:  []corev1.Container{container("1500m"), container("500m")},
				Tolerations: []corev1.Toleration{{Key: contract.TaintKey, Operator: corev1.TolerationOpExists}},
			},
			Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/2 nodes are available"}}},
		},
		nodes: []corev1.Node{
			{ObjectMeta: metav1.ObjectMeta{Name: "vms", Labels: map[string]string{"pool": "a"}}, Spec: corev1.NodeSpec{Taints: []corev1.Taint{taint}}, Status: corev1.NodeStatus{Allocatable: list("3")}},
			{ObjectMeta: metav1.ObjectMeta{Name: "other"}, Status: corev1.NodeStatus{Allocatable: list("100")}},
		},
		pods: []corev1.Pod{
			{Spec: corev1.PodSpec{NodeName: "vms", Containers: []corev1.Container{container("1500m")}}},
			{Spec: corev1.PodSpec{NodeName: "vms", Containers: []corev1.Container{container("2")}}, Status: corev1.PodStatus{Phase: corev1.PodSucceeded}},
		},
	}
}

func TestThePodLearnsOfTheSetting(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*cluster)
		told   bool
	}{
		"too few CPUs are left": {func(*cluster) {}, true},
		"enough are left":       {func(c *cluster) { c.pods = c.pods[1:] }, false},
		"it has a node":         {func(c *cluster) { c.pod.Spec.NodeName = "vms" }, false},
		"it was not refused":    {func(c *cluster) { c.pod.Status.Conditions = nil }, false},
		"it waits for a gate":   {func(c *cluster) { c.pod.Status.Conditions[0].Reason = corev1.PodReasonSchedulingGated }, false},
		"it wants no VM":        {func(c *cluster) { c.pod.Spec.Tolerations[0].Key = "" }, false},
		"no node may run it":    {func(c *cluster) { c.pod.Spec.NodeSelector = map[string]string{"pool": "b"} }, false},
		"its node may run it":   {func(c *cluster) { c.pod.Spec.NodeSelector = map[string]string{"pool": "a"} }, true},
		"the node is emptied":   {func(c *cluster) { c.nodes[0].Spec.Unschedulable = true }, false},
		"there is no node":      {func(c *cluster) { c.nodes = nil }, false},
		"it is gone":            {func(c *cluster) { c.pod.Name = "other" }, false},
	} {
		c := newCluster()
		tc.change(&c)
		said := events.NewFakeRecorder(1)
		r := Reconciler{Reader: c, Events: said}
		if _, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns", Name: "web"}}); err != nil {
			t.Fatal(err)
		}
		select {
		case text := <-said.Events:
			if !tc.told || !strings.Contains(text, "requests 2 CPUs") || !strings.Contains(text, "vms, 1.5 of 3.") || !strings.Contains(text, "VK_CPU_OVERCOMMIT") {
				t.Errorf("%s: %s", name, text)
			}
		default:
			if tc.told {
				t.Errorf("%s: nothing is said", name)
			}
		}
	}
}

func TestCPUsOfAPod(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	sidecar := container("250m")
	sidecar.RestartPolicy = &always
	spec := corev1.PodSpec{InitContainers: []corev1.Container{container("1"), sidecar, container("2")}, Containers: []corev1.Container{container("1"), container("500m")}}
	if got := milliCPUs(&corev1.Pod{Spec: spec}); got != 2250 {
		t.Errorf("its last init container beside the sidecar: %d", got)
	}
	spec.Containers = append(spec.Containers, container("1"))
	spec.Overhead = list("100m")
	if got := milliCPUs(&corev1.Pod{Spec: spec}); got != 2850 {
		t.Errorf("its containers beside the sidecar, and the overhead: %d", got)
	}
	spec.Resources = &corev1.ResourceRequirements{Requests: list("4")}
	if got := milliCPUs(&corev1.Pod{Spec: spec}); got != 4100 {
		t.Errorf("the pod's own, and the overhead: %d", got)
	}
}

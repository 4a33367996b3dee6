package convert

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"cocoonstack.io/cocoon/internal/vm"
)

// list returns a list of resources; "" leaves one out.
func list(cpu, memory string) corev1.ResourceList {
	l := corev1.ResourceList{}
	if cpu != "" {
		l[corev1.ResourceCPU] = resource.MustParse(cpu)
	}
	if memory != "" {
		l[corev1.ResourceMemory] = resource.MustParse(memory)
	}
	return l
}

func requires(asked, limits corev1.ResourceList) corev1.ResourceRequirements {
	return corev1.ResourceRequirements{Requests: asked, Limits: limits}
}

// TestResources compares with what a kubelet and runc calculate on a node with 4 GiB.
func TestResources(t *testing.T) {
	node := Node{Name: "n", Memory: 4 << 30}
	none := list("", "")
	app := func(r corev1.ResourceRequirements) *corev1.Pod {
		return &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Resources: r}}}}
	}
	with := func(pod *corev1.Pod, change func(*corev1.PodSpec)) *corev1.Pod { change(&pod.Spec); return pod }
	always := corev1.ContainerRestartPolicyAlways
	for name, tt := range map[string]struct {
		pod  *corev1.Pod
		want vm.Resources
	}{
		"best effort":       {app(requires(none, none)), vm.Resources{CPUWeight: 1, OOMScoreAdj: 1000}},
		"guaranteed":        {app(requires(list("1", "1Gi"), list("1", "1Gi"))), vm.Resources{CPULimit: 1000, CPUWeight: 100, MemoryLimit: 1 << 30, OOMScoreAdj: -997}},
		"burstable":         {app(requires(list("500m", "1Gi"), list("1500m", "2Gi"))), vm.Resources{CPULimit: 1500, CPUWeight: 59, MemoryLimit: 2 << 30, OOMScoreAdj: 750}},
		"limits only":       {app(requires(none, list("100m", ""))), vm.Resources{CPULimit: 100, CPUWeight: 17, OOMScoreAdj: 999}},
		"requests only":     {app(requires(list("20m", "35Mi"), none)), vm.Resources{CPUWeight: 6, OOMScoreAdj: 992}},
		"a request of zero": {app(requires(list("0", ""), list("1", ""))), vm.Resources{CPULimit: 1000, CPUWeight: 1, OOMScoreAdj: 999}},
		"very small":        {app(requires(list("1m", ""), list("5m", ""))), vm.Resources{CPULimit: 5, CPUWeight: 1, OOMScoreAdj: 999}},
		"all of the node":   {app(requires(list("300", "8Gi"), none)), vm.Resources{CPUWeight: 10000, OOMScoreAdj: 3}},
		"one of two guaranteed": {with(app(requires(list("1", "1Gi"), list("1", "1Gi"))), func(s *corev1.PodSpec) {
			s.Containers = append(s.Containers, corev1.Container{Name: "d"})
		}), vm.Resources{CPULimit: 1000, CPUWeight: 100, MemoryLimit: 1 << 30, OOMScoreAdj: 750}},
		"a pod that the node needs": {with(app(requires(none, none)), func(s *corev1.PodSpec) {
			s.PriorityClassName = "system-node-critical"
		}), vm.Resources{CPUWeight: 1, OOMScoreAdj: -997}},
		"limits of the pod": {with(app(requires(none, none)), func(s *corev1.PodSpec) {
			s.Resources = &corev1.ResourceRequirements{Requests: list("500m", "1Gi"), Limits: list("1", "2Gi")}
		}), vm.Resources{CPULimit: 1000, CPUWeight: 100, MemoryLimit: 2 << 30, OOMScoreAdj: 750}},
		"a sidecar outlives the apps": {with(app(requires(list("20m", "1Gi"), none)), func(s *corev1.PodSpec) {
			s.InitContainers = []corev1.Container{s.Containers[0]}
			s.InitContainers[0].RestartPolicy = &always
			s.InitContainers[0].Resources = requires(list("20m", ""), none)
			s.Containers[0].Name = "d"
		}), vm.Resources{CPUWeight: 6, OOMScoreAdj: 750}},
	} {
		got := Resized(tt.pod, node)["c"]
		if got != tt.want {
			t.Errorf("%s: %+v, want %+v", name, got, tt.want)
		}
		if err := got.Validate(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		whole := Spec(tt.pod, node, nil)
		if of := vm.ResourcesOf(whole.Containers)["c"]; of != tt.want {
			t.Errorf("%s: the VM has %+v", name, of)
		}
	}
}

func TestOutgrown(t *testing.T) {
	pod := func(cpu, memory string) *corev1.Pod {
		return &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Resources: requires(list("", ""), list(cpu, memory))}}}}
	}
	rec := vm.Record{Spec: Spec(pod("1500m", "200Mi"), Node{}, nil)}
	for _, tt := range []struct {
		cpu, memory string
		fits        bool
	}{{"1500m", "200Mi", true}, {"2", "", true}, {"2001m", "", false}, {"100m", "201Mi", false}, {"", "", true}, {"", "10Mi", true}} {
		if why := Outgrown(pod(tt.cpu, tt.memory), rec); (why == "") != tt.fits {
			t.Errorf("%s and %s in 2 CPUs and 200Mi: %q", tt.cpu, tt.memory, why)
		}
	}
}

// TestSizeOfUnbounded: one of several containers that does not say what it needs does not make the VM smaller than one without any.
func TestSizeOfUnbounded(t *testing.T) {
	some := func(memory ...string) *corev1.Pod {
		pod := &corev1.Pod{}
		for _, m := range memory {
			pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: "c" + m, Resources: requires(list("", m), nil)})
		}
		return pod
	}
	for want, pod := range map[int64]*corev1.Pod{
		DefaultMemory:     some("35Mi", "35Mi", ""),
		100 << 20:         some("50Mi", "50Mi"),
		DefaultMemory * 2: some("512Mi", ""),
	} {
		if got := Spec(pod, Node{}, nil).Memory; got != want {
			t.Errorf("%d bytes, want %d", got, want)
		}
	}
}

package podprovider

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// withContainers returns an engine whose VMs have containers.
func withContainers() *engine {
	e := newEngine()
	e.inside = true
	return e
}

// amounts returns equal requests and limits.
func amounts(cpu, memory string) corev1.ResourceRequirements {
	list := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
	return corev1.ResourceRequirements{Requests: list, Limits: list.DeepCopy()}
}

// resize changes the resources of the pod's first container, as the API server does.
func (w *world) resize(cpu, memory string) {
	w.t.Helper()
	now := w.after(0).DeepCopy()
	now.Spec.Containers[0].Resources = amounts(cpu, memory)
	now.Generation++
	if _, err := w.client.CoreV1().Pods("default").Update(w.t.Context(), now, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
	if err := w.p.UpdatePod(w.t.Context(), now.DeepCopy()); err != nil {
		w.t.Fatal(err)
	}
}

// sizes describes what the status says about resources.
func sizes(p *corev1.Pod) string {
	c := p.Status.ContainerStatuses[0]
	if c.Resources == nil {
		return "none"
	}
	s := fmt.Sprintf("%s %s", c.Resources.Limits.Cpu(), c.Resources.Limits.Memory())
	if !apiequality.Semantic.DeepEqual(c.Resources.Requests, c.AllocatedResources) {
		s += " allocated otherwise"
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodResizePending || c.Type == corev1.PodResizeInProgress {
			s += fmt.Sprintf(" %s/%s", c.Type, c.Reason)
			if c.ObservedGeneration != p.Generation {
				s += " of another generation"
			}
		}
	}
	if p.Status.ObservedGeneration != p.Generation {
		s += " not observed"
	}
	return s
}

func expectSizes(t *testing.T, p *corev1.Pod, want string) {
	t.Helper()
	if got := sizes(p); got != want {
		t.Errorf("the status says %q, want %q", got, want)
	}
}

// TestResize: what fits in the VM is given to its containers, what does not is infeasible and changes nothing.
func TestResize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := withContainers()
		w := start(t, e)
		defer func() { w.stop() }()
		w.create(pod(with(func(c *corev1.Container) { c.Resources = amounts("1", "128Mi") })))
		expectSizes(t, w.after(time.Second), "1 128Mi")
		has := func(cpu, memory int64) {
			t.Helper()
			if r := e.web().Spec.Containers[0].Resources; r == nil || r.CPULimit != cpu || r.MemoryLimit != memory<<20 {
				t.Errorf("the container has %+v", r)
			}
		}
		has(1000, 128)
		w.resize("2", "128Mi")
		expectSizes(t, w.after(time.Minute), "1 128Mi PodResizePending/Infeasible")
		if !strings.Contains(w.told(), "ResizeInfeasible") {
			t.Error("no event says that the resize is infeasible")
		}
		has(1000, 128)
		w.resize("500m", "200Mi")
		expectSizes(t, w.after(time.Minute), "1 128Mi PodResizePending/Infeasible")
		w.resize("1", "128Mi")
		expectSizes(t, w.after(time.Minute), "1 128Mi")
		w.resize("500m", "64Mi")
		expectSizes(t, w.after(time.Second), "500m 64Mi")
		has(500, 64)
		if p := w.after(0); p.Status.ContainerStatuses[0].RestartCount != 0 || !ready(p) {
			t.Errorf("after the resize: %s", sketch(p))
		}
		w.resize("1", "128Mi")
		expectSizes(t, w.after(time.Second), "1 128Mi")
		has(1000, 128)

		// Another process goes on where this one ended.
		w.stop()
		now := w.after(0).DeepCopy()
		now.Spec.Containers[0].Resources = amounts("250m", "96Mi")
		now.Generation++
		if _, err := w.client.CoreV1().Pods("default").Update(t.Context(), now, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.run(Config{})
		expectSizes(t, w.after(time.Second), "250m 96Mi")
		has(250, 96)
	})
}

// TestResizeBelowUsage: a memory limit below what a container uses is tried again until it is possible.
func TestResizeBelowUsage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := withContainers()
		e.used = 100 << 20
		w := start(t, e)
		defer func() { w.stop() }()
		w.create(pod(with(func(c *corev1.Container) { c.Resources = amounts("1", "128Mi") })))
		w.after(time.Second)
		w.resize("1", "64Mi")
		p := w.after(time.Second)
		expectSizes(t, p, "1 128Mi PodResizeInProgress/Error")
		if text := p.Status.Conditions[len(p.Status.Conditions)-1].Message; !strings.Contains(text, "memory limit (67108864) below current usage (104857600)") {
			t.Errorf("the message is %q", text)
		}
		expectSizes(t, w.after(10*time.Minute), "1 128Mi PodResizeInProgress/Error")
		e.mu.Lock()
		e.used = 0
		e.mu.Unlock()
		expectSizes(t, w.after(2*time.Minute), "1 64Mi")
		e.mu.Lock()
		e.used = 60 << 20
		e.mu.Unlock()
		w.resize("1", "32Mi")
		expectSizes(t, w.after(5*time.Minute), "1 64Mi PodResizeInProgress/Error")
		w.resize("1", "128Mi") // another wish does not wait for the next attempt
		expectSizes(t, w.after(time.Second), "1 128Mi")
	})
}

// TestResizeRestarts: a container whose policy demands it is started again to be resized, once, and the resize is done after that.
func TestResizeRestarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := withContainers()
		w := start(t, e)
		defer w.stop()
		w.create(pod(with(func(c *corev1.Container) {
			c.Resources = amounts("1", "128Mi")
			c.ResizePolicy = []corev1.ContainerResizePolicy{
				{ResourceName: corev1.ResourceCPU, RestartPolicy: corev1.NotRequired},
				{ResourceName: corev1.ResourceMemory, RestartPolicy: corev1.RestartContainer},
			}
		})))
		w.after(time.Second)
		w.resize("500m", "128Mi")
		p := w.after(time.Minute)
		if expectSizes(t, p, "500m 128Mi"); p.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("a resize of the CPU: %s", sketch(p))
		}
		w.resize("500m", "64Mi")
		p = w.after(time.Minute)
		if expectSizes(t, p, "500m 64Mi"); p.Status.ContainerStatuses[0].RestartCount != 1 || !ready(p) {
			t.Errorf("a resize of the memory: %s", sketch(p))
		}
		if told := w.told(); !strings.Contains(told, "Container c resize requires restart") || strings.Count(told, "ResizeCompleted") != 2 {
			t.Errorf("events:\n%s", told)
		}
	})
}

// TestResizeElsewhere: what has no containers of ours, or an older agent, is not resized.
func TestResizeElsewhere(t *testing.T) {
	for name, prepare := range map[string]func(*engine){
		"a VM of an earlier release": func(*engine) {},
		"an older agent":             func(e *engine) { e.inside, e.older = true, true },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := newEngine()
				prepare(e)
				w := start(t, e)
				defer w.stop()
				w.create(pod(with(func(c *corev1.Container) { c.Resources = amounts("1", "128Mi") })))
				w.after(time.Second)
				w.resize("500m", "128Mi")
				expectSizes(t, w.after(time.Minute), "1 128Mi PodResizePending/Infeasible")
				w.resize("1", "128Mi")
				expectSizes(t, w.after(time.Minute), "1 128Mi")
			})
		})
	}
}

// TestResizeWhileCreated: a pod that is resized while its VM boots gets the new resources, because the VM was created with the old ones.
func TestResizeWhileCreated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := withContainers()
		e.boot = time.Minute
		w := start(t, e)
		defer w.stop()
		w.create(pod(with(func(c *corev1.Container) { c.Resources = amounts("1", "128Mi") })))
		w.after(time.Second)
		w.resize("500m", "128Mi")
		expectSizes(t, w.after(2*time.Minute), "500m 128Mi")
		if r := e.web().Spec.Containers[0].Resources; r.CPULimit != 500 {
			t.Errorf("the container has %+v", r)
		}
	})
}

func TestAPodOfAnotherSystem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		w.create(pod(func(p *corev1.Pod) { p.Spec.OS = &corev1.PodOS{Name: corev1.Windows} }))
		p := w.after(time.Second)
		expect(t, p, "Pending/PodOSNotSupported waiting:CreateContainerConfigError")
		if p.Status.Message != "Failed to admit pod as the OS field doesn't match node OS" {
			t.Errorf("message %q", p.Status.Message)
		}
	})
}

// TestResizeGrows: a VM that can grow gets the size of its pod, if the node has room for it.
func TestResizeGrows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngine()
		w := start(t, e)
		defer func() { w.stop() }()
		p := pod(with(func(c *corev1.Container) { c.Resources = amounts("1", "256Mi") }))
		p.Annotations = map[string]string{"vm.cocoonstack.io/hardware": `{"topology":{"sockets":1,"cores":1,"threads":1},"maxSockets":4,"maxMemory":1073741824}`}
		w.create(p)
		w.after(time.Second)
		w.engine.change(e.web().ID, func(r *vm.Record) { r.ImageType = vm.ImageDisk })
		expectSizes(t, w.after(time.Second), "1 256Mi")
		w.resize("2", "512Mi")
		expectSizes(t, w.after(time.Minute), "2 512Mi")
		if s := e.web().Spec.Size(); s.CPUs != 2 || s.Memory != 512<<20 {
			t.Errorf("the VM has %+v", s)
		}
		w.resize("8", "512Mi")
		expectSizes(t, w.after(time.Minute), "2 512Mi PodResizePending/Infeasible")
		w.resize("2", "512Mi")
		expectSizes(t, w.after(time.Minute), "2 512Mi")
		w.stop()
		w.run(Config{Node: convert.Node{Memory: 600 << 20}})
		w.resize("2", "768Mi")
		expectSizes(t, w.after(time.Minute), "2 512Mi PodResizePending/Deferred")
		w.resize("2", "514Mi")
		expectSizes(t, w.after(time.Minute), "2 514Mi")
	})
}

package convert

import (
	"math"
	"path"
	"reflect"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/podgen"
	"cocoonstack.io/cocoon/internal/vm"
)

// FuzzCheck checks any pod. Check and the functions after it never change the pod and always return the same result. If Check
// finds no errors, the engine accepts the VM. The VM runs only the pod's containers, has the size that the pod asks for, has
// the labels of the pod, and has no access to the host.
func FuzzCheck(f *testing.F) {
	for _, s := range podgen.Seeds() {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		pod := podgen.Pod(data)
		before := pod.DeepCopy()
		errs := Check(pod)
		for range 3 {
			if again := Check(before.DeepCopy()); !reflect.DeepEqual(errs, again) {
				t.Fatalf("the same pod is answered %v and %v", errs, again)
			}
		}
		if g := Grace(pod); g < 0 || pod.Spec.TerminationGracePeriodSeconds != nil && g < time.Duration(min(max(*pod.Spec.TerminationGracePeriodSeconds, 0), 1000))*time.Second {
			t.Errorf("a grace of %v is %v", *pod.Spec.TerminationGracePeriodSeconds, g)
		}
		Ignored(pod)
		Inherited(pod)
		Pulls(pod)
		Live(pod)
		if len(errs) == 0 && !Static(pod) {
			passes(t, pod)
		}
		if d := diff.Of(before, pod); d != "" {
			t.Errorf("the pod was changed: %s", d)
		}
	})
}

// TestSeedsPass ensures that the seeds of FuzzCheck contain accepted pods, not only refused ones.
func TestSeedsPass(t *testing.T) {
	passed, several := 0, 0
	for _, s := range podgen.Seeds() {
		if pod := podgen.Pod(s); len(Check(pod)) == 0 && !Static(pod) {
			passed++
			if Several(pod) {
				several++
			}
		}
	}
	if passed < 20 || several < 5 {
		t.Errorf("%d seeds pass, %d with several containers", passed, several)
	}
	t.Logf("%d seeds pass, %d with several containers", passed, several)
}

// TestGraceHolds checks that the largest grace periods that the API server accepts do not overflow.
func TestGraceHolds(t *testing.T) {
	for n, want := range map[int64]time.Duration{
		0: 0, 30: 30 * time.Second, -1: vm.DefaultStopGrace, math.MaxInt64: maxGrace, math.MaxInt64/int64(time.Second) + 1: maxGrace,
	} {
		pod := plain(func(p *corev1.Pod) { p.Spec.TerminationGracePeriodSeconds = &n })
		if got := Grace(pod); got != want {
			t.Errorf("%d seconds are %v, want %v", n, got, want)
		}
	}
}

// passes checks the VM of a pod in which Check found no errors.
func passes(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	spec := Spec(pod, Node{Name: "n"}, nil)
	if err := spec.Validate(); err != nil {
		t.Fatalf("the engine refuses it: %v", err)
	}
	if d := diff.Of(spec, Spec(pod.DeepCopy(), Node{Name: "n"}, nil)); d != "" {
		t.Errorf("the same pod has two VMs: %s", d)
	}
	for key, want := range map[string]string{
		contract.VMLabelPodNamespace: pod.Namespace, contract.VMLabelPodName: pod.Name, contract.VMLabelPodUID: string(pod.UID), contract.VMLabelNode: "n",
	} {
		if spec.Labels[key] != want {
			t.Errorf("label %s is %q", key, spec.Labels[key])
		}
	}
	if s := pod.Spec; s.HostNetwork || s.HostPID || s.HostIPC {
		t.Error("it shares a namespace of the host")
	}
	runs := 1
	if Several(pod) {
		runs = len(pod.Spec.Containers) + len(pod.Spec.InitContainers)
	}
	if have := max(len(spec.Containers), 1); have != runs {
		t.Errorf("it runs %d containers of %d", have, runs)
	}
	for _, v := range spec.Volumes {
		i := slices.IndexFunc(pod.Spec.Volumes, func(p corev1.Volume) bool { return p.Name == v.Name })
		if i < 0 || v.Kind != vm.VolumeFiles && v.Kind != vm.VolumeEmpty && v.Kind != vm.VolumeDir {
			t.Fatalf("volume %q of kind %q", v.Name, v.Kind)
		}
		if from := pod.Spec.Volumes[i].HostPath; (from != nil) != (v.Kind == vm.VolumeDir) || from != nil && v.Dir.Path != path.Clean(from.Path) {
			t.Errorf("volume %+v is of the folder %+v", v, from)
		}
	}
	if clone := Clone(pod, Node{}); clone.Name != spec.Name || clone.Hostname != "" && clone.Hostname != spec.Hostname {
		t.Errorf("its clone is %+v", clone)
	}
	if len(containers(pod)) == 1 && pod.Spec.Resources == nil {
		if q, ok := pod.Spec.Containers[0].Resources.Limits[corev1.ResourceMemory]; ok && q.Sign() > 0 {
			holds := resource.NewQuantity(spec.Memory, resource.BinarySI)
			if holds.Cmp(q) < 0 || spec.Memory > vm.MinMemory && q.CmpInt64(math.MaxInt64) < 0 && holds.Value() != q.Value() {
				t.Errorf("%s of memory became %d", q.String(), spec.Memory)
			}
		}
	}
}

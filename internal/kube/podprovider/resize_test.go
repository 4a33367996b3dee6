package podprovider

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestAResizeIsInfeasible: a VM keeps its size. The status goes on showing it, and says that the resize is not possible.
func TestAResizeIsInfeasible(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := start(t, newEngine())
		defer w.stop()
		sized := func(cpu string) corev1.ResourceRequirements {
			list := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu)}
			return corev1.ResourceRequirements{Requests: list, Limits: list.DeepCopy()}
		}
		p := pod(with(func(c *corev1.Container) { c.Resources = sized("1") }))
		w.create(p)
		infeasible := func(p *corev1.Pod) bool {
			return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodResizePending && c.Status == corev1.ConditionTrue && c.Reason == corev1.PodReasonInfeasible
			})
		}
		check := func(p *corev1.Pod, want bool) {
			t.Helper()
			c := p.Status.ContainerStatuses[0]
			if c.Resources == nil || !c.Resources.Limits.Cpu().Equal(resource.MustParse("1")) || !c.AllocatedResources.Cpu().Equal(resource.MustParse("1")) || infeasible(p) != want {
				t.Errorf("status %+v, conditions %+v", c, p.Status.Conditions)
			}
		}
		now := w.after(time.Second)
		check(now, false)
		for _, step := range []struct {
			cpu  string
			want bool
		}{{"2", true}, {"1", false}} {
			now = now.DeepCopy()
			now.Spec.Containers[0].Resources = sized(step.cpu)
			now.Generation++
			if _, err := w.client.CoreV1().Pods("default").Update(t.Context(), now, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			if err := w.p.UpdatePod(t.Context(), now.DeepCopy()); err != nil {
				t.Fatal(err)
			}
			now = w.after(time.Minute)
			check(now, step.want)
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

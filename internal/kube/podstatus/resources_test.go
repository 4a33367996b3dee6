package podstatus

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"cocoonstack.io/cocoon/internal/vm"
)

// TestResizeConditions: the status shows what the containers have, and why that is not what the pod says.
func TestResizeConditions(t *testing.T) {
	at := time.Unix(1000, 0)
	sized := func(cpu string) corev1.ResourceRequirements {
		return corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu)}}
	}
	made := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Resources: sized("1")}}}}
	resized := made.DeepCopy()
	resized.Spec.Containers[0].Resources, resized.Generation = sized("500m"), 2
	inside := vm.Record{ID: "id", State: vm.StateRunning, ImageType: vm.ImageOCI, AgentReady: true, Spec: vm.Spec{CPUs: 1, Memory: 1 << 30}, Containers: []vm.ContainerRecord{
		{Name: "c", Root: true, Status: vm.ContainerStatus{State: vm.ContainerRunning, StartedAt: at}},
	}}
	disk := inside
	disk.ImageType, disk.Containers = vm.ImageDisk, nil
	for name, tt := range map[string]struct {
		rec  vm.Record
		view View
		want string
	}{
		"goes on":     {inside, View{}, "1 PodResizeInProgress/"},
		"done":        {inside, View{Resize: Resize{Done: true}}, "500m"},
		"failed":      {inside, View{Resize: Resize{Failed: "no"}}, "1 PodResizeInProgress/Error"},
		"refused":     {inside, View{Resize: Resize{Never: "no"}}, "1 PodResizePending/Infeasible"},
		"asleep":      {inside, View{Asleep: true}, "1 PodResizePending/Deferred"},
		"boots alone": {disk, View{}, "1 PodResizePending/Infeasible"},
	} {
		before := View{Pod: made, Record: &tt.rec}.Status(corev1.PodStatus{}, at)
		v := tt.view
		v.Pod, v.Record = resized, &tt.rec
		s := v.Status(before, at)
		got := s.ContainerStatuses[0].Resources.Limits.Cpu().String()
		for _, c := range s.Conditions {
			if c.Type == corev1.PodResizePending || c.Type == corev1.PodResizeInProgress {
				got += fmt.Sprintf(" %s/%s", c.Type, c.Reason)
				if c.ObservedGeneration != 2 || c.Status != corev1.ConditionTrue {
					t.Errorf("%s: %+v", name, c)
				}
			}
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
		back := View{Pod: made, Record: &tt.rec, Asleep: v.Asleep}.Status(s, at)
		if v.Resize.Done {
			continue
		}
		for _, c := range back.Conditions {
			if c.Type == corev1.PodResizePending || c.Type == corev1.PodResizeInProgress {
				t.Errorf("%s, and resized back: %+v", name, c)
			}
		}
	}
}

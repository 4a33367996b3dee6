package virtualmachineinstance

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// The steps until a guest runs are told if it takes long, or if something is wrong.
func TestSilence(t *testing.T) {
	epoch := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	bound := corev1.PodSpec{NodeName: "n"}
	pulling := corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull", Message: "no such image"}}}}}
	unschedulable := corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}}
	for what, tc := range map[string]struct {
		pod   corev1.Pod
		phase v1.VirtualMachineInstancePhase
		after time.Duration
		want  time.Duration
	}{
		"created":          {corev1.Pod{}, v1.Pending, 0, kubevirt.Quiet},
		"bound":            {corev1.Pod{Spec: bound}, v1.Pending, time.Second, kubevirt.Quiet - time.Second},
		"takes long":       {corev1.Pod{Spec: bound}, v1.Pending, kubevirt.Quiet, 0},
		"runs":             {corev1.Pod{Spec: bound, Status: corev1.PodStatus{Phase: corev1.PodRunning}}, v1.Pending, 0, 0},
		"has failed":       {corev1.Pod{Spec: bound, Status: corev1.PodStatus{Phase: corev1.PodFailed}}, v1.Pending, 0, 0},
		"told before":      {corev1.Pod{Spec: bound}, v1.Scheduling, 0, 0},
		"has no image":     {corev1.Pod{Spec: bound, Status: pulling}, v1.Pending, 0, 0},
		"finds no node":    {corev1.Pod{Status: unschedulable}, v1.Pending, 0, 0},
		"is being deleted": {corev1.Pod{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &metav1.Time{Time: epoch}}}, v1.Pending, 0, 0},
	} {
		r := &Reconciler{Now: func() time.Time { return epoch.Add(tc.after) }}
		vmi := &v1.VirtualMachineInstance{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(epoch)}, Status: v1.VirtualMachineInstanceStatus{Phase: tc.phase}}
		if got := r.silence(vmi, &tc.pod, kubevirt.Observe(vmi, &tc.pod, r.Now())); got != tc.want {
			t.Errorf("%s: %s, want %s", what, got, tc.want)
		}
	}
}

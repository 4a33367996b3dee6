package podstatus

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// A guest that boots itself has the condition from when its agent answers; our own agent is no such agent.
func TestAgentConnected(t *testing.T) {
	p := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "a"}}}}
	var s corev1.PodStatus
	for _, c := range []struct {
		kind    vm.ImageType
		state   vm.State
		answers bool
		want    corev1.ConditionStatus
	}{
		{vm.ImageOCI, vm.StateRunning, true, ""},
		{vm.ImageDisk, vm.StateRunning, false, ""},
		{vm.ImageDisk, vm.StateRunning, true, corev1.ConditionTrue},
		{vm.ImageDisk, vm.StateHibernated, true, corev1.ConditionFalse},
		{vm.ImageDisk, vm.StateRunning, true, corev1.ConditionTrue},
		{vm.ImageDisk, vm.StateRunning, false, corev1.ConditionFalse},
	} {
		rec := &vm.Record{ID: "v", State: c.state, ImageType: c.kind, AgentReady: c.answers}
		s = View{Pod: p, Record: rec, IP: "10.0.0.2", Asleep: c.state == vm.StateHibernated}.Status(s, time.Unix(1, 0))
		var got corev1.ConditionStatus
		for _, x := range s.Conditions {
			if x.Type == contract.ConditionAgent {
				got = x.Status
			}
		}
		if got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

// A pod has the condition from when its guest is frozen; it is false when the guest is thawed, or has no memory any more.
func TestFrozen(t *testing.T) {
	p := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "a"}}}}
	var s corev1.PodStatus
	for _, c := range []struct {
		state  vm.State
		frozen bool
		want   corev1.ConditionStatus
	}{
		{vm.StateRunning, false, ""},
		{vm.StateRunning, true, corev1.ConditionTrue},
		{vm.StateRunning, false, corev1.ConditionFalse},
		{vm.StateRunning, true, corev1.ConditionTrue},
		{vm.StateHibernated, true, corev1.ConditionFalse},
	} {
		rec := &vm.Record{ID: "v", State: c.state, ImageType: vm.ImageDisk, AgentReady: true, Frozen: c.frozen}
		s = View{Pod: p, Record: rec, IP: "10.0.0.2", Asleep: c.state == vm.StateHibernated}.Status(s, time.Unix(1, 0))
		var got corev1.ConditionStatus
		for _, x := range s.Conditions {
			if x.Type == contract.ConditionFrozen {
				got = x.Status
			}
		}
		if got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

package virtualmachine

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	v1 "kubevirt.io/api/core/v1"
)

// A change of the size that the running guest can have goes to its instance, any other waits for a restart.
func TestLiveUpdate(t *testing.T) {
	now := time.Unix(1e9, 0)
	guest, most := resource.MustParse("1Gi"), resource.MustParse("2Gi")
	vm := machine(v1.RunStrategyAlways)
	vm.Spec.Template.Spec.Domain.CPU = &v1.CPU{Sockets: 1, Cores: 1, Threads: 1, MaxSockets: 2}
	vm.Spec.Template.Spec.Domain.Memory = &v1.Memory{Guest: &guest, MaxGuest: &most}
	vmi := &v1.VirtualMachineInstance{Spec: *vm.Spec.Template.Spec.DeepCopy(), Status: v1.VirtualMachineInstanceStatus{Phase: v1.Running}}
	required := func(s step) string {
		for _, c := range s.status.Conditions {
			if c.Type == v1.VirtualMachineRestartRequired {
				return c.Message
			}
		}
		return ""
	}
	look := func() step { return decide(seen{vm: vm, template: vm.Spec.Template, vmi: vmi, now: now}) }
	if s := look(); s.live != nil || required(s) != "" {
		t.Errorf("nothing has changed: %+v", s)
	}
	vm.Spec.Template.Spec.Domain.CPU.Sockets = 2
	if s := look(); s.live == nil || s.live.Domain.CPU.Sockets != 2 || required(s) != "" {
		t.Errorf("one more socket: %+v", s)
	}
	if s := decide(seen{vm: vm, template: vm.Spec.Template, vmi: vmi, now: now, staged: true}); s.live != nil || !strings.Contains(required(s), "Stage") {
		t.Errorf("the rollout strategy is Stage: %+v", s)
	}
	vmi.Status.Conditions = []v1.VirtualMachineInstanceCondition{{Type: v1.VirtualMachineInstanceMemoryChange, Status: corev1.ConditionFalse, Reason: "Infeasible", Message: "no room"}}
	if s := look(); s.live != nil || !strings.Contains(required(s), "no room") {
		t.Errorf("an earlier change has failed: %+v", s)
	}
	vm.Spec.Template.Spec.Domain.CPU.Sockets = 1
	if s := look(); s.live != nil || !strings.Contains(required(s), "no room") {
		t.Errorf("the instance cannot have what it says: %+v", s)
	}
	vmi.Status.Conditions = nil
	vm.Spec.Template.Spec.Domain.CPU.Sockets = 3
	if s := look(); s.live != nil || !strings.Contains(required(s), "can have 2 sockets") {
		t.Errorf("beyond the maximum: %+v", s)
	}
	vm.Spec.Template.Spec.Domain.CPU.Sockets = 2
	vmi.Status.Phase = v1.Scheduled
	if s := look(); s.live != nil || required(s) == "" {
		t.Errorf("it does not run yet: %+v", s)
	}
}

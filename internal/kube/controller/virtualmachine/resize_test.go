package virtualmachine

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/kubevirt"
)

// An interface comes and goes while the guest runs, and one that it has given back leaves the instance first, then the template.
func TestLiveInterfaces(t *testing.T) {
	now := time.Unix(1e9, 0)
	bridge := func(name string) v1.Interface {
		return v1.Interface{Name: name, InterfaceBindingMethod: v1.InterfaceBindingMethod{Bridge: &v1.InterfaceBridge{}}}
	}
	multus := func(name string) v1.Network {
		return v1.Network{Name: name, NetworkSource: v1.NetworkSource{Multus: &v1.MultusNetwork{NetworkName: name}}}
	}
	vm := machine(v1.RunStrategyAlways)
	s := &vm.Spec.Template.Spec
	s.Networks, s.Domain.Devices.Interfaces = []v1.Network{{Name: "default", NetworkSource: v1.NetworkSource{Pod: &v1.PodNetwork{}}}}, []v1.Interface{bridge("default")}
	vmi := &v1.VirtualMachineInstance{Spec: *s.DeepCopy(), Status: v1.VirtualMachineInstanceStatus{Phase: v1.Running}}
	knows := func(names ...string) {
		vmi.Status.Interfaces = nil
		for _, name := range names {
			vmi.Status.Interfaces = append(vmi.Status.Interfaces, v1.VirtualMachineInstanceNetworkInterface{Name: name})
		}
	}
	knows("default")
	look := func() step { return decide(seen{vm: vm, template: vm.Spec.Template, vmi: vmi, now: now}) }
	idle := func(what string) {
		t.Helper()
		if n := look(); n.live != nil || n.template != nil {
			t.Errorf("%s: %+v", what, n)
		}
	}
	idle("nothing has changed")
	s.Networks, s.Domain.Devices.Interfaces = append(s.Networks, multus("lab")), append(s.Domain.Devices.Interfaces, bridge("lab"))
	n := look()
	if n.live == nil || len(n.live.Networks) != 2 || len(n.live.Domain.Devices.Interfaces) != 2 || n.template != nil {
		t.Fatalf("one more: %+v", n)
	}
	vmi.Spec = *n.live
	idle("the node attaches it")
	knows("default", "lab")
	idle("the guest has it")
	s.Domain.Devices.Interfaces = []v1.Interface{bridge("default"), bridge("lab")}
	s.Domain.Devices.Interfaces[1].State = v1.InterfaceStateAbsent
	if n = look(); n.live == nil || n.live.Domain.Devices.Interfaces[1].State != v1.InterfaceStateAbsent || n.template != nil {
		t.Fatalf("absent: %+v", n)
	}
	vmi.Spec = *n.live
	idle("the guest has it still")
	knows("default")
	if n = look(); n.live == nil || len(n.live.Domain.Devices.Interfaces) != 1 || len(n.live.Networks) != 1 || n.template != nil {
		t.Fatalf("the guest has given it back: %+v", n)
	}
	vmi.Spec = *n.live
	if n = look(); n.live != nil || n.template == nil || len(n.template.Domain.Devices.Interfaces) != 1 || len(n.template.Networks) != 1 {
		t.Fatalf("the instance does not have it: %+v", n)
	}
	*s = *n.template
	idle("it is gone")
	s.Networks, s.Domain.Devices.Interfaces = append(s.Networks, multus("lab")), append(s.Domain.Devices.Interfaces, bridge("lab"))
	s.Domain.Devices.Interfaces[1].State = v1.InterfaceStateAbsent
	if made := instance(vm, vm.Spec.Template, kubevirt.Base{}, now); len(made.Spec.Networks) != 1 || len(made.Spec.Domain.Devices.Interfaces) != 1 {
		t.Errorf("an instance starts with %+v", made.Spec.Domain.Devices.Interfaces)
	}
}

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

// An instance requests the memory of its guest, which grows with it. One of an earlier release that does not request it is not changed.
func TestMemoryRequest(t *testing.T) {
	now := time.Unix(1e9, 0)
	guest, more, most := resource.MustParse("1Gi"), resource.MustParse("1152Mi"), resource.MustParse("2Gi")
	vm := machine(v1.RunStrategyAlways)
	vm.Spec.Template.Spec.Domain.Memory = &v1.Memory{Guest: &guest, MaxGuest: &most}
	vmi := instance(vm, vm.Spec.Template, kubevirt.Base{}, now)
	vmi.Status.Phase = v1.Running
	if q := vmi.Spec.Domain.Resources.Requests.Memory(); q.Cmp(guest) != 0 || len(vm.Spec.Template.Spec.Domain.Resources.Requests) > 0 {
		t.Errorf("it requests %s", q)
	}
	earlier := vmi.DeepCopy()
	earlier.Spec.Domain.Resources.Requests = nil
	for name, vmi := range map[string]*v1.VirtualMachineInstance{"new": vmi, "of an earlier release": earlier} {
		vm.Spec.Template.Spec.Domain.Memory.Guest = &guest
		if s := decide(seen{vm: vm, template: vm.Spec.Template, vmi: vmi, now: now}); s.live != nil || changed(vmi, vm.Spec.Template) {
			t.Errorf("%s: nothing has changed: %+v", name, s)
		}
		vm.Spec.Template.Spec.Domain.Memory.Guest = &more
		s := decide(seen{vm: vm, template: vm.Spec.Template, vmi: vmi, now: now})
		if s.live == nil || s.live.Domain.Memory.Guest.Cmp(more) != 0 || name == "new" && s.live.Domain.Resources.Requests.Memory().Cmp(more) != 0 {
			t.Errorf("%s: it grows: %+v", name, s.live)
		}
	}
}

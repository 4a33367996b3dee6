package kubevirt

import (
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

// gain adds an interface of bridge on a network of multus.
func gain(s *v1.VirtualMachineInstanceSpec, network string) *v1.Interface {
	s.Networks = append(s.Networks, v1.Network{Name: network, NetworkSource: v1.NetworkSource{Multus: &v1.MultusNetwork{NetworkName: network}}})
	s.Domain.Devices.Interfaces = append(s.Domain.Devices.Interfaces, v1.Interface{Name: network, InterfaceBindingMethod: v1.InterfaceBindingMethod{Bridge: &v1.InterfaceBridge{}}})
	return &s.Domain.Devices.Interfaces[len(s.Domain.Devices.Interfaces)-1]
}

func nicNames(s v1.VirtualMachineInstanceSpec) (out []string) {
	for _, n := range s.Domain.Devices.Interfaces {
		out = append(out, strings.TrimSuffix(n.Name+" "+string(n.State), " "))
	}
	return out
}

func TestLiveInterfaces(t *testing.T) {
	for what, tt := range map[string]struct {
		want func(*v1.VirtualMachineInstanceSpec)
		why  string // "": it is possible
		has  []string
	}{
		"one more":            {want: func(s *v1.VirtualMachineInstanceSpec) { gain(s, "dmz") }, has: []string{"a", "b", "dmz"}},
		"virtio":              {want: func(s *v1.VirtualMachineInstanceSpec) { gain(s, "dmz").Model = v1.VirtIO }, has: []string{"a", "b", "dmz"}},
		"absent":              {want: func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Interfaces[1].State = v1.InterfaceStateAbsent }, has: []string{"a", "b absent"}},
		"absent, never there": {want: func(s *v1.VirtualMachineInstanceSpec) { gain(s, "dmz").State = v1.InterfaceStateAbsent }, has: []string{"a", "b"}},
		"up":                  {want: func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Interfaces[1].State = v1.InterfaceStateLinkUp }, has: []string{"a", "b up"}},
		"down": {want: func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Devices.Interfaces[1].State = v1.InterfaceStateLinkDown
		}, has: []string{"a", "b down"}},
		"the first down": {want: func(s *v1.VirtualMachineInstanceSpec) {
			s.Domain.Devices.Interfaces[0].State = v1.InterfaceStateLinkDown
		}, has: []string{"a down", "b"}},
		"in another order": {want: func(s *v1.VirtualMachineInstanceSpec) {
			gain(s, "dmz")
			slices.Reverse(s.Domain.Devices.Interfaces[1:])
		}, has: []string{"a", "dmz", "b"}},
		"removed": {want: func(s *v1.VirtualMachineInstanceSpec) {
			*s = withoutInterfaces(*s, func(n v1.Interface) bool { return n.Name == "b" })
		}, why: "unless its state is absent"},
		"another first": {want: func(s *v1.VirtualMachineInstanceSpec) { slices.Reverse(s.Domain.Devices.Interfaces) }, why: "the first interface"},
		"none listed":   {want: func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Interfaces = nil }, why: "the first interface"},
		"another model": {want: func(s *v1.VirtualMachineInstanceSpec) { s.Domain.Devices.Interfaces[1].Model = "e1000" }, why: "interface b and its network stay"},
		"another network": {want: func(s *v1.VirtualMachineInstanceSpec) {
			s.Networks = slices.Clone(s.Networks)
			s.Networks[1].Multus = &v1.MultusNetwork{NetworkName: "other"}
		}, why: "interface b and its network stay"},
		"not virtio":     {want: func(s *v1.VirtualMachineInstanceSpec) { gain(s, "dmz").Model = "e1000" }, why: "not a bridge"},
		"without bridge": {want: func(s *v1.VirtualMachineInstanceSpec) { gain(s, "dmz").Bridge = nil }, why: "not a bridge"},
	} {
		is := growing().Spec
		from := wired(t, "pod", "lab")
		is.Networks, is.Domain.Devices.Interfaces = from.Networks, from.Domain.Devices.Interfaces
		want := *is.DeepCopy()
		tt.want(&want)
		next, why := Live(is, want)
		if (next != nil) != (tt.why == "") || !strings.Contains(why, tt.why) {
			t.Errorf("%s: %v %q", what, next, why)
		}
		if next != nil {
			if d := diff.Of(tt.has, nicNames(*next)); d != "" {
				t.Errorf("%s:\n%s", what, d)
			}
		}
		errs := CheckChange(&v1.VirtualMachineInstance{Spec: is}, &v1.VirtualMachineInstance{Spec: Known(want, is)})
		if (len(errs) == 0) != (tt.why == "") {
			t.Errorf("%s: admission says %v", what, errs)
		}
	}
}

// What was absent does not come back before it is gone, and the manager may take it from the spec.
func TestAbsentInterfaces(t *testing.T) {
	is := wired(t, "pod", "lab")
	is.Domain.Devices.Interfaces[1].State = v1.InterfaceStateAbsent
	if errs, _ := Check(is, field.NewPath("spec")); len(errs) > 0 {
		t.Error(errs)
	}
	back := is.DeepCopy()
	back.Domain.Devices.Interfaces[1].State = ""
	if next, why := Live(*is, *back); next != nil || !strings.Contains(why, "is being taken from the guest") {
		t.Errorf("it comes back: %v %q", next, why)
	}
	if d := diff.Of([]string{"a"}, nicNames(Present(*is))); d != "" || len(Present(*is).Networks) != 1 {
		t.Error(d)
	}
	vmi := &v1.VirtualMachineInstance{Spec: *is, Status: v1.VirtualMachineInstanceStatus{Interfaces: []v1.VirtualMachineInstanceNetworkInterface{{Name: "a"}, {Name: "b"}}}}
	if d := diff.Of([]string{"a", "b absent"}, nicNames(Detached(*is, vmi))); d != "" {
		t.Errorf("the guest has it still:\n%s", d)
	}
	vmi.Status.Interfaces = vmi.Status.Interfaces[:1]
	gone := Detached(*is, vmi)
	if d := diff.Of([]string{"a"}, nicNames(gone)); d != "" {
		t.Errorf("the guest has given it back:\n%s", d)
	}
	if errs := CheckChange(vmi, &v1.VirtualMachineInstance{Spec: gone}); len(errs) > 0 {
		t.Errorf("the manager takes it from the spec: %v", errs)
	}
	is.Domain.Devices.Interfaces[0].State = v1.InterfaceStateAbsent
	if errs, _ := Check(is, field.NewPath("spec")); len(errs) != 1 || errs[0].Field != "spec.domain.devices.interfaces[0].state" {
		t.Errorf("the first: %v", errs)
	}
}

// The pod of an instance is told which networks its guest has now, and nothing else of it changes.
func TestConnected(t *testing.T) {
	vmi := growing()
	from := wired(t, "pod")
	vmi.Spec.Networks, vmi.Spec.Domain.Devices.Interfaces = from.Networks, from.Domain.Devices.Interfaces
	pod := Pod(vmi)
	step := func(what string, want map[string]string) {
		t.Helper()
		got := Connected(vmi, pod)
		if d := diff.Of(want, got); d != "" {
			t.Errorf("%s:\n%s", what, d)
		}
		maps.Copy(pod.Annotations, got)
		if again := Connected(vmi, pod); again != nil {
			t.Errorf("%s, again: %v", what, again)
		}
	}
	step("as it was", nil)
	vmi.Spec.Domain.CPU.Sockets = 4 // the pod is resized, not described anew
	gain(&vmi.Spec, "lab")
	step("one more", map[string]string{contract.KeyNetworks: "lab"})
	gain(&vmi.Spec, "dmz").MacAddress = "02-00-00-00-00-01"
	before := pod.Annotations[contract.KeyHardware]
	got := Connected(vmi, pod)
	if got[contract.KeyNetworks] != "lab,dmz" || !strings.Contains(got[contract.KeyHardware], `["","","02:00:00:00:00:01"]`) || !strings.Contains(before, `"sockets":2`) || !strings.Contains(got[contract.KeyHardware], `"sockets":2`) {
		t.Errorf("with an address: %v; before %s", got, before)
	}
	maps.Copy(pod.Annotations, got)
	vmi.Spec.Domain.Devices.Interfaces[1].State = v1.InterfaceStateAbsent
	if got := Connected(vmi, pod); got[contract.KeyNetworks] != "dmz" || !strings.Contains(got[contract.KeyHardware], `["","02:00:00:00:00:01"]`) {
		t.Errorf("one less: %v", got)
	} else {
		maps.Copy(pod.Annotations, got)
	}
	vmi.Spec.Domain.Devices.Interfaces[2].State = v1.InterfaceStateAbsent
	got = Connected(vmi, pod)
	if got[contract.KeyNetworks] != "[]" || strings.Contains(got[contract.KeyHardware], "macs") {
		t.Errorf("none left: %v", got)
	}
	pod.DeletionTimestamp = &metav1.Time{}
	if got := Connected(vmi, pod); got != nil {
		t.Errorf("a pod that goes: %v", got)
	}
}

// The pod of an instance says which links are down from the beginning, and later that they are up again.
func TestConnectedLinks(t *testing.T) {
	vmi := growing()
	from := wired(t, "pod", "lab")
	vmi.Spec.Networks, vmi.Spec.Domain.Devices.Interfaces = from.Networks, from.Domain.Devices.Interfaces
	n := vmi.Spec.Domain.Devices.Interfaces
	has := func(what string, pod *corev1.Pod, want ...string) {
		t.Helper()
		machine, err := contract.ParseMachine(pod.Annotations)
		if d := diff.Of(want, machine.Hardware.Links); d != "" || err != nil {
			t.Errorf("%s: %v\n%s", what, err, d)
		}
	}
	pod := Pod(vmi)
	has("all up", pod)
	n[1].State = v1.InterfaceStateLinkDown
	has("down from the beginning", Pod(vmi), "up", "down")
	for _, step := range []struct {
		what  string
		state v1.InterfaceState
		want  []string
	}{{"down", v1.InterfaceStateLinkDown, []string{"up", "down"}}, {"up", v1.InterfaceStateLinkUp, []string{"up", "up"}}, {"left out", "", []string{"up", "up"}}, {"absent", v1.InterfaceStateAbsent, []string{"up"}}} {
		n[1].State = step.state
		maps.Copy(pod.Annotations, Connected(vmi, pod))
		has(step.what, pod, step.want...)
		if again := Connected(vmi, pod); again != nil {
			t.Errorf("%s, again: %v", step.what, again)
		}
	}
}

// The status has the interfaces that the guest has, by their networks, and says why it lacks one.
func TestInterfacesThatCome(t *testing.T) {
	s := wired(t, "pod", "lab", "dmz")
	pod := &corev1.Pod{Status: corev1.PodStatus{PodIP: "10.0.0.5", PodIPs: []corev1.PodIP{{IP: "10.0.0.5"}}}}
	status := []contract.NetworkStatus{{Name: "dmz", MAC: "52:54:00:00:00:01", Default: true}, {Name: "dmz", MAC: "52:54:00:00:00:03", IPs: []string{"192.0.2.7"}}}
	pod.Annotations = map[string]string{contract.KeyNetworkStatus: contract.NetworkStatusText(status)}
	got := interfaces(s, pod)
	if len(got) != 2 || got[0].Name != "a" || got[1].Name != "c" || got[1].MAC != "52:54:00:00:00:03" || got[1].IP != "192.0.2.7" {
		t.Errorf("%+v", got)
	}
	gotNames, gave := InterfaceChanges([]v1.VirtualMachineInstanceNetworkInterface{{Name: "a"}, {Name: "b"}}, got)
	if gotNames != "c" || gave != "b" {
		t.Errorf("new %q, gone %q", gotNames, gave)
	}
	if gotNames, gave := InterfaceChanges(nil, got); gotNames != "" || gave != "" {
		t.Errorf("at the start: new %q, gone %q", gotNames, gave)
	}
	pod.Status.Conditions = []corev1.PodCondition{{Type: contract.ConditionNetworks, Status: corev1.ConditionFalse, Message: "there is no network lab"}}
	if why := unconnected(pod); why != "there is no network lab" {
		t.Errorf("it says %q", why)
	}
}

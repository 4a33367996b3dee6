package kubevirt

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation/field"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
)

// ReasonNoNetwork is the reason of the condition Synchronized of an instance whose guest cannot get, or give back, an interface.
const ReasonNoNetwork = "FailedNetworks"

func absent(n v1.Interface) bool { return n.State == v1.InterfaceStateAbsent }

// present returns the interfaces of s that the guest is to have.
func present(s *v1.VirtualMachineInstanceSpec) (out []v1.Interface) {
	for _, n := range s.Domain.Devices.Interfaces {
		if !absent(n) {
			out = append(out, n)
		}
	}
	return out
}

// Present returns s without the interfaces that are absent, and their networks.
func Present(s v1.VirtualMachineInstanceSpec) v1.VirtualMachineInstanceSpec {
	return withoutInterfaces(s, absent)
}

// Detached returns s without the interfaces that are absent and that the guest has given back, according to the status of its instance.
func Detached(s v1.VirtualMachineInstanceSpec, vmi *v1.VirtualMachineInstance) v1.VirtualMachineInstanceSpec {
	return withoutInterfaces(s, func(n v1.Interface) bool {
		there := slices.ContainsFunc(vmi.Status.Interfaces, func(i v1.VirtualMachineInstanceNetworkInterface) bool { return i.Name == n.Name })
		is := func(o v1.Interface) bool { return o.Name == n.Name && !absent(o) }
		return absent(n) && !there && !slices.ContainsFunc(vmi.Spec.Domain.Devices.Interfaces, is)
	})
}

func withoutInterfaces(s v1.VirtualMachineInstanceSpec, gone func(v1.Interface) bool) v1.VirtualMachineInstanceSpec {
	if !slices.ContainsFunc(s.Domain.Devices.Interfaces, gone) {
		return s
	}
	names := map[string]bool{}
	for _, n := range s.Domain.Devices.Interfaces {
		if gone(n) {
			names[n.Name] = true
		}
	}
	s.Domain.Devices.Interfaces = slices.DeleteFunc(slices.Clone(s.Domain.Devices.Interfaces), func(n v1.Interface) bool { return names[n.Name] })
	s.Networks = slices.DeleteFunc(slices.Clone(s.Networks), func(n v1.Network) bool { return names[n.Name] })
	return s
}

// Known returns s without the absent interfaces that the instance with the spec is does not have: nothing is to be done about them.
func Known(s, is v1.VirtualMachineInstanceSpec) v1.VirtualMachineInstanceSpec {
	return withoutInterfaces(s, func(n v1.Interface) bool { return absent(n) && interfaceOf(&is, n.Name) == nil })
}

func interfaceOf(s *v1.VirtualMachineInstanceSpec, name string) *v1.Interface {
	if i := slices.IndexFunc(s.Domain.Devices.Interfaces, func(n v1.Interface) bool { return n.Name == name }); i >= 0 {
		return &s.Domain.Devices.Interfaces[i]
	}
	return nil
}

// liveInterfaces says whether the guest of is can get the interfaces and networks of want while it runs. why says what stands against it; "" if it
// is a change that no running guest can have.
func liveInterfaces(is, want *v1.VirtualMachineInstanceSpec) (ok bool, why string) {
	was, now := is.Domain.Devices.Interfaces, want.Domain.Devices.Interfaces
	if apiequality.Semantic.DeepEqual(was, now) && apiequality.Semantic.DeepEqual(is.Networks, want.Networks) {
		return true, ""
	}
	if len(was) == 0 || len(now) == 0 || now[0].Name != was[0].Name {
		return false, "the first interface of a running guest stays"
	}
	for _, o := range was {
		n := interfaceOf(want, o.Name)
		if n == nil {
			return false, fmt.Sprintf("interface %s is not taken from a running guest unless its state is absent", o.Name)
		}
		same := *n
		same.State = o.State
		if !apiequality.Semantic.DeepEqual(o, same) || !apiequality.Semantic.DeepEqual(networkOf(is, o.Name), networkOf(want, o.Name)) {
			return false, fmt.Sprintf("interface %s and its network stay as they are in a running guest, except its state", o.Name)
		}
		if absent(o) && !absent(*n) {
			return false, fmt.Sprintf("interface %s is being taken from the guest", o.Name)
		}
	}
	for _, n := range now {
		if network := networkOf(want, n.Name); interfaceOf(is, n.Name) == nil && (n.Bridge == nil || network == nil || network.Multus == nil || n.Model != "" && n.Model != v1.VirtIO) {
			return false, fmt.Sprintf("interface %s is not a bridge on a network of multus with the model virtio, so a running guest cannot get it", n.Name)
		}
	}
	return true, ""
}

// CheckChange refuses a change of the interfaces of an instance that its running guest cannot have. The API server refuses that of anything else.
func CheckChange(was, now *v1.VirtualMachineInstance) field.ErrorList {
	at := field.NewPath("spec", "domain", "devices", "interfaces")
	from := withoutInterfaces(was.Spec, func(n v1.Interface) bool { return absent(n) && interfaceOf(&now.Spec, n.Name) == nil })
	if ok, why := liveInterfaces(&from, &now.Spec); !ok {
		return field.ErrorList{field.Forbidden(at, why)}
	}
	return nil
}

// Connected returns the annotations that the pod of vmi has to have so that the guest has the interfaces of the instance, and their links; nil: it has them. A guest
// that was never asked for further interfaces, and is not now, has no annotation.
func Connected(vmi *v1.VirtualMachineInstance, pod *corev1.Pod) map[string]string {
	if pod.DeletionTimestamp != nil {
		return nil
	}
	next := maps.Clone(pod.Annotations)
	if next == nil {
		next = map[string]string{}
	}
	networks(&vmi.Spec, next)
	if _, had := pod.Annotations[contract.KeyNetworks]; had && !furtherNetworks(&vmi.Spec) {
		next[contract.KeyNetworks] = noNetworks
	}
	same := next[contract.KeyNetworks] == pod.Annotations[contract.KeyNetworks]
	if machine, err := contract.ParseMachine(next); err == nil {
		was, is := machine.Hardware.Links, links(&vmi.Spec)
		if is == nil && was != nil { // a pod that does not speak of links leaves them as they are
			is = eachLink(&vmi.Spec)
		}
		same = same && slices.Equal(was, is)
		machine.Hardware.NICs, machine.Hardware.MACs, machine.Hardware.Links = nicModels(&vmi.Spec), macs(&vmi.Spec), is
		machine.Apply(next)
	}
	if same {
		return nil
	}
	changed := map[string]string{}
	for _, key := range []string{contract.KeyNetworks, contract.KeyHardware} {
		if next[key] != pod.Annotations[key] {
			changed[key] = next[key]
		}
	}
	return changed
}

// noNetworks is the value of KeyNetworks that takes all further interfaces from a running guest.
const noNetworks = "[]"

func furtherNetworks(s *v1.VirtualMachineInstanceSpec) bool {
	return len(present(s)) > 1
}

// unconnected says why the guest does not have the interfaces of its instance; "" if nothing is wrong.
func unconnected(pod *corev1.Pod) string {
	if c := condition(pod, contract.ConditionNetworks); c.Status == corev1.ConditionFalse {
		return c.Message
	}
	return ""
}

// InterfaceChanges says which interfaces the guest of an instance has got and given back.
func InterfaceChanges(was, is []v1.VirtualMachineInstanceNetworkInterface) (got, gave string) {
	beside := func(a, b []v1.VirtualMachineInstanceNetworkInterface) string {
		var names []string
		for _, n := range a {
			if !slices.ContainsFunc(b, func(o v1.VirtualMachineInstanceNetworkInterface) bool { return o.Name == n.Name }) {
				names = append(names, n.Name)
			}
		}
		return strings.Join(names, ", ")
	}
	if len(was) == 0 || len(is) == 0 { // it has just started
		return "", ""
	}
	return beside(is, was), beside(was, is)
}

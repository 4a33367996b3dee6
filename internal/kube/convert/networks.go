package convert

import (
	"cmp"
	"math"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// NICs returns the interfaces of pod's VM: the first is on the network of the pod, and has its ports of the host.
func NICs(pod *corev1.Pod) []vm.NICSpec {
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	out := []vm.NICSpec{{Network: ask.Network, Ports: HostPorts(pod), Masquerade: masquerade(pod)}}
	further, _ := contract.ParseNetworks(pod.Annotations)
	for _, a := range further {
		out = append(out, vm.NICSpec{Network: a.Name})
	}
	for i, mac := range macs(pod) {
		if i < len(out) {
			out[i].MAC = mac
		}
	}
	for i, link := range Links(pod) {
		if i < len(out) {
			out[i].LinkDown = link == contract.LinkDown
		}
	}
	return out
}

// Links returns what pod says of the links of its interfaces, in their order.
func Links(pod *corev1.Pod) []string {
	ask, _ := contract.ParseMachine(pod.Annotations)
	return ask.Hardware.Links
}

// macs returns the hardware addresses that pod chooses for its interfaces.
func macs(pod *corev1.Pod) []string {
	ask, _ := contract.ParseMachine(pod.Annotations)
	return ask.Hardware.MACs
}

// CheckNetworks refuses networks that a VM cannot have.
func CheckNetworks(pod *corev1.Pod) field.ErrorList {
	list, err := contract.ParseNetworks(pod.Annotations)
	errs := badKeys(err)
	no, path := forbid(&errs), annotationPath(contract.KeyNetworks)
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	masked, err := contract.ParseMasquerade(pod.Annotations)
	errs = append(errs, badKeys(err)...)
	if masked != nil && err == nil {
		if err := (vm.Spec{NICs: []vm.NICSpec{{Masquerade: masquerade(pod)}}}).ValidateMasquerade(); err != nil {
			errs = append(errs, field.Invalid(annotationPath(contract.KeyMasquerade), pod.Annotations[contract.KeyMasquerade], err.Error()))
		}
	}
	no(slices.ContainsFunc(list, func(a contract.Attachment) bool { return a.Name == ask.Network }), path, "network "+ask.Network+" is that of "+contract.KeyNetwork+" already")
	chosen := macs(pod)
	if n := len(NICs(pod)); len(chosen) > n {
		errs = append(errs, field.TooMany(annotationPath(contract.KeyHardware).Child("macs"), len(chosen), n))
	}
	links := Links(pod)
	if n := len(NICs(pod)); len(links) > n {
		errs = append(errs, field.TooMany(annotationPath(contract.KeyHardware).Child("links"), len(links), n))
	}
	for i, link := range links {
		if link != "" && link != contract.LinkUp && link != contract.LinkDown {
			errs = append(errs, field.NotSupported(annotationPath(contract.KeyHardware).Child("links").Index(i), link, []string{contract.LinkUp, contract.LinkDown}))
		}
	}
	for i, mac := range chosen {
		if at := annotationPath(contract.KeyHardware).Child("macs").Index(i); mac != "" && slices.Contains(chosen[:i], mac) {
			errs = append(errs, field.Duplicate(at, mac))
		} else if err := vm.ValidateMAC(mac); err != nil && mac != "" {
			errs = append(errs, field.Invalid(at, mac, err.Error()))
		}
	}
	return errs
}

// masquerade returns what the annotation asks for. Numbers that are no ports become 0, which the check refuses.
func masquerade(pod *corev1.Pod) (out vm.Masquerade) {
	m, err := contract.ParseMasquerade(pod.Annotations)
	if m == nil || err != nil {
		return out
	}
	out.CIDR, out.CIDR6 = cmp.Or(m.CIDR, vm.MasqueradeCIDR), cmp.Or(m.CIDR6, vm.MasqueradeCIDR6)
	port := func(n int32) uint16 {
		if n < 0 || n > math.MaxUint16 {
			return 0
		}
		return uint16(n)
	}
	for _, p := range m.Ports {
		protocol := vm.Protocol(strings.ToLower(cmp.Or(p.Protocol, string(corev1.ProtocolTCP))))
		out.Ports = append(out.Ports, vm.PortRange{Protocol: protocol, First: port(p.Port), Last: port(cmp.Or(p.Last, p.Port))})
	}
	return out
}

package convert

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/vm"
)

// NICs returns the interfaces of pod's VM: the first is on the network of the pod, and has its ports of the host.
func NICs(pod *corev1.Pod) []vm.NICSpec {
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	out := []vm.NICSpec{{Network: ask.Network, Ports: HostPorts(pod)}}
	further, _ := contract.ParseNetworks(pod.Annotations)
	for _, a := range further {
		out = append(out, vm.NICSpec{Network: a.Name})
	}
	for i, mac := range macs(pod) {
		if i < len(out) {
			out[i].MAC = mac
		}
	}
	return out
}

// macs returns the hardware addresses that pod chooses for its interfaces.
func macs(pod *corev1.Pod) []string {
	ask, _ := contract.ParseMachine(pod.Annotations)
	return ask.Hardware.MACs
}

// checkNetworks refuses networks that a VM cannot have.
func checkNetworks(pod *corev1.Pod) field.ErrorList {
	list, err := contract.ParseNetworks(pod.Annotations)
	errs := badKeys(err)
	no, path := forbid(&errs), annotationPath(contract.KeyNetworks)
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	no(slices.ContainsFunc(list, func(a contract.Attachment) bool { return a.Name == ask.Network }), path, "network "+ask.Network+" is that of "+contract.KeyNetwork+" already")
	chosen := macs(pod)
	if n := len(NICs(pod)); len(chosen) > n {
		errs = append(errs, field.TooMany(annotationPath(contract.KeyHardware).Child("macs"), len(chosen), n))
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

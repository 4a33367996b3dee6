package convert

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/vm"
)

// HostPorts returns the ports of the node that lead to pod's VM. Sidecars may have some; other init containers have ended before
// anybody can connect, but Kubernetes reserves their ports too.
func HostPorts(pod *corev1.Pod) []vm.PortMapping {
	var out []vm.PortMapping
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for _, p := range c.Ports {
			m := portMapping(p)
			if p.HostPort != 0 && !slices.Contains(out, m) {
				out = append(out, m)
			}
		}
	}
	return out
}

func portMapping(p corev1.ContainerPort) vm.PortMapping {
	m := vm.PortMapping{Protocol: vm.TCP, HostIP: p.HostIP, HostPort: uint16(p.HostPort), GuestPort: uint16(p.ContainerPort)} //nolint:gosec // the API server checks their range
	if p.Protocol != "" {
		m.Protocol = vm.Protocol(strings.ToLower(string(p.Protocol)))
	}
	if m.HostIP == "0.0.0.0" {
		m.HostIP = ""
	}
	return m
}

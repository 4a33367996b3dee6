package convert

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
)

func TestHostPorts(t *testing.T) {
	pod := &corev1.Pod{Spec: corev1.PodSpec{
		InitContainers: []corev1.Container{{Name: "mesh", Ports: []corev1.ContainerPort{{ContainerPort: 15000, HostPort: 15000, Protocol: corev1.ProtocolUDP}}}},
		Containers: []corev1.Container{
			{Name: "web", Ports: []corev1.ContainerPort{{ContainerPort: 80, HostPort: 8080, HostIP: "0.0.0.0"}, {ContainerPort: 81}}},
			{Name: "log", Ports: []corev1.ContainerPort{{ContainerPort: 9, HostPort: 9000, HostIP: "192.0.2.7", Protocol: corev1.ProtocolSCTP}}},
		},
	}}
	want := []vm.PortMapping{
		{Protocol: vm.UDP, HostPort: 15000, GuestPort: 15000},
		{Protocol: vm.TCP, HostPort: 8080, GuestPort: 80},
		{Protocol: vm.SCTP, HostIP: "192.0.2.7", HostPort: 9000, GuestPort: 9},
	}
	if d := diff.Of(want, HostPorts(pod)); d != "" {
		t.Error(d)
	}
}

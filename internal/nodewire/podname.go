package nodewire

import (
	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/vm"
)

func encodePodName(p vm.PodName) *nodev1.PodName {
	if p == (vm.PodName{}) {
		return nil
	}
	return &nodev1.PodName{Namespace: p.Namespace, Name: p.Name, Uid: p.UID}
}

func decodePodName(m *nodev1.PodName) vm.PodName {
	return vm.PodName{Namespace: m.GetNamespace(), Name: m.GetName(), UID: m.GetUid()}
}

func encodeBandwidth(b vm.Bandwidth) *nodev1.Bandwidth {
	if b == (vm.Bandwidth{}) {
		return nil
	}
	return &nodev1.Bandwidth{Ingress: b.Ingress, Egress: b.Egress}
}

func decodeBandwidth(m *nodev1.Bandwidth) vm.Bandwidth {
	return vm.Bandwidth{Ingress: m.GetIngress(), Egress: m.GetEgress()}
}

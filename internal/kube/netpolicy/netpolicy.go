// Package netpolicy enforces the cluster's NetworkPolicies on the VMs of one virtual node: it watches policies, pods and
// namespaces, compiles them to the policies of guests (network.Policies), and gives these to the runtime.
//
// It filters no packet. The network of the runtime does that in the kernel, and goes on while this process is down.
package netpolicy

import (
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/kube/convert"
	"cocoonstack.io/cocoon/internal/vm"
)

// pod is what policies can say of a pod, and of its VMs if it is on this node.
type pod struct {
	*corev1.Pod
	addresses []netip.Addr
	guests    []vm.ID
}

// peer reports whether selectors can mean the pod. Those on the network of a node have its addresses, which are no pod's.
func (p pod) peer() bool {
	return !p.Spec.HostNetwork && !finished(p.Pod) && len(p.addresses) > 0
}

// finished reports whether a pod has ended, so that others may have its addresses.
func finished(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

// networks are those of machines that static pods may be. The creator of a static pod chooses its address and the ID of its VM, so
// the pod is a peer only there, and has no VM.
type networks []netip.Prefix

func (n networks) contains(a netip.Addr) bool {
	return slices.ContainsFunc(n, func(p netip.Prefix) bool { return p.Contains(a) })
}

// slimPod keeps the fields of a pod that this package reads. Container IDs are read of pods of this node only.
func slimPod(node string, static networks) func(any) (any, error) {
	return func(obj any) (any, error) {
		p, ok := obj.(*corev1.Pod)
		if !ok {
			return obj, nil
		}
		out := &corev1.Pod{}
		out.Name, out.Namespace, out.UID, out.ResourceVersion, out.Labels = p.Name, p.Namespace, p.UID, p.ResourceVersion, p.Labels
		out.Spec.NodeName, out.Spec.HostNetwork = p.Spec.NodeName, p.Spec.HostNetwork
		out.Status.Phase, out.Status.PodIP, out.Status.PodIPs = p.Status.Phase, p.Status.PodIP, p.Status.PodIPs
		if ports := namedPorts(p); len(ports) > 0 {
			out.Spec.Containers = []corev1.Container{{Ports: ports}}
		}
		if convert.Static(p) {
			out.Status.PodIP, out.Status.PodIPs = "", nil
			for _, a := range addressesOf(p) {
				if static.contains(a) {
					out.Status.PodIPs = append(out.Status.PodIPs, corev1.PodIP{IP: a.String()})
				}
			}
		} else if p.Spec.NodeName == node {
			for _, c := range p.Status.ContainerStatuses {
				out.Status.ContainerStatuses = append(out.Status.ContainerStatuses, corev1.ContainerStatus{ContainerID: c.ContainerID})
			}
		}
		return out, nil
	}
}

// namedPorts returns the ports with a name of the containers that run as long as the pod.
func namedPorts(p *corev1.Pod) (out []corev1.ContainerPort) {
	add := func(c *corev1.Container) {
		for _, port := range c.Ports {
			if port.Name != "" {
				out = append(out, corev1.ContainerPort{Name: port.Name, ContainerPort: port.ContainerPort, Protocol: port.Protocol})
			}
		}
	}
	for i := range p.Spec.Containers {
		add(&p.Spec.Containers[i])
	}
	for i := range p.Spec.InitContainers {
		if always := p.Spec.InitContainers[i].RestartPolicy; always != nil && *always == corev1.ContainerRestartPolicyAlways {
			add(&p.Spec.InitContainers[i])
		}
	}
	return out
}

// addressesOf returns the addresses in a pod's status.
func addressesOf(p *corev1.Pod) (out []netip.Addr) {
	texts := make([]string, 0, 2)
	for _, ip := range p.Status.PodIPs {
		texts = append(texts, ip.IP)
	}
	if len(texts) == 0 {
		texts = append(texts, p.Status.PodIP)
	}
	for _, text := range texts {
		if a, err := netip.ParseAddr(text); err == nil {
			out = append(out, a.Unmap().WithZone(""))
		}
	}
	return out
}

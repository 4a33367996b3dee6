package podprovider

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/reach"
)

// This file handles static pods. Each stands for a machine that somebody else runs. The machine's ID and address are in
// the pod's annotations. The Runtime is never asked about it, whatever VM of the node may have that ID or name.

// runtimeOf returns what the annotations of a static pod say about its machine.
func runtimeOf(pod *corev1.Pod) contract.VMRuntime {
	there, _ := contract.ParseVMRuntime(pod.Annotations)
	return there
}

// forwardable returns an error if no port of a static pod's machine may be forwarded. The creator of the pod chose the
// address, and the node reaches more than pods do, so the operator says which networks are allowed.
func (d *door) forwardable(pod, ip string) error {
	addr, err := netip.ParseAddr(ip)
	if err != nil {
		return errdefs.Preconditionf("the machine of pod %q is at %q, which is no address", pod, ip)
	}
	if err := reach.Forbidden(addr); err != nil {
		return err
	}
	if slices.ContainsFunc(d.allowed, func(n netip.Prefix) bool { return n.Contains(addr.Unmap()) }) {
		return nil
	}
	return errdefs.Preconditionf("pod %q stands for a machine that this node does not run, and no port of %s is forwarded; "+
		"the node's operator allows networks with VK_STATIC_FORWARD_NETWORKS", pod, ip)
}

// unserved returns the error for exec and log of a static pod. It says how to reach the machine instead.
func unserved(pod *corev1.Pod, what string) error {
	there := runtimeOf(pod)
	ask, _ := contract.ParseVMSpec(pod.Annotations)
	at := there.IP
	how := contract.ResolveConnType(ask, there)
	if how == contract.ConnVNC && there.VNCPort != 0 {
		at = fmt.Sprintf("%s, port %d", at, there.VNCPort)
	}
	return errdefs.Preconditionf("pod %q stands for a machine that this node does not run, so there is no %s; reach it by %s at %s", pod.Name, what, how, at)
}

package vkcocoon

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"cocoonstack.io/cocoon/internal/kube/csi"
	"cocoonstack.io/cocoon/internal/kube/podvolumes"
	"cocoonstack.io/cocoon/internal/kube/storage"
)

// plugins makes the part that gives pods volumes of CSI drivers. nil: the VMs are reached by the cocoon binary, which publishes none.
func (n *Node) plugins(p *parts) *csi.Plugins {
	node, ok := n.runtime.(csi.Node)
	if !ok {
		return nil
	}
	return csi.New(csi.Config{
		Name: n.cfg.NodeName, Client: p.clients.main, Node: node, Log: n.log,
		Known: func(uid types.UID) bool { return p.provider.Known(uid) },
		Changed: func() {
			if p.node != nil {
				p.node.Poke()
			}
		},
	})
}

// published is what the provider uses of the plugins; nil: there are none.
func (p *parts) published() podvolumes.Plugins {
	if p.plugins == nil {
		return nil
	}
	return p.plugins
}

// inUse is the function for node.Config; nil: there are no plugins.
func (p *parts) inUse() func() []corev1.UniqueVolumeName {
	if p.plugins == nil {
		return nil
	}
	return p.plugins.InUse
}

// others is what the claims' part uses of the plugins; nil: there are none.
func (p *parts) others() storage.Others {
	if p.plugins == nil {
		return nil
	}
	return p.plugins
}

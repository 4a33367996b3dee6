package vkcocoon

import (
	"cmp"
	"context"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/tools/record"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/kube/netpolicy"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/nodeclient"
)

// policer is a Runtime whose networks may enforce policies. The cocoon binary is none.
type policer interface {
	Informer
	Police(ctx context.Context, p network.Policies) error
}

var (
	_ policer           = (*nodeclient.Client)(nil)
	_ netpolicy.Runtime = (*nodeclient.Client)(nil)
)

// policies makes what enforces network policies on this node.
func (n *Node) policies(c clients, r prometheus.Registerer, events record.EventRecorder, changed func()) (*netpolicy.Enforcer, error) {
	cfg := netpolicy.Config{
		Node: n.cfg.NodeName, Client: c.main, Off: n.cfg.NetworkPolicy == policyIgnore, Changed: changed, Log: n.log, Events: events, Static: n.cfg.static,
		Unpoliced: func(context.Context) (string, error) {
			return "VMs are reached by the cocoon binary, which cannot set policies; use the socket of cocoond", nil
		},
	}
	if p, ok := n.runtime.(interface {
		policer
		netpolicy.Runtime
	}); ok {
		cfg.Runtime = p
		cfg.Unpoliced = func(ctx context.Context) (string, error) { return unpoliced(ctx, p) }
	}
	e, err := netpolicy.New(cfg, r)
	if err != nil {
		return nil, fmt.Errorf("set up network policies: %w", err)
	}
	return e, nil
}

// unpoliced returns why the default network enforces no policies, "" if it does or if another network does.
func unpoliced(ctx context.Context, p policer) (string, error) {
	info, err := p.Info(ctx)
	if err != nil {
		return "", errdefs.Unavailablef("read the networks of the engine: %w", err)
	}
	why := "VMs of this node have no network"
	for i, d := range info.NetworkDetails {
		if d.Polices {
			return "", nil
		}
		if i == 0 {
			why = cmp.Or(d.Unpoliced, "cocoond is older than this node")
		}
	}
	return why, nil
}

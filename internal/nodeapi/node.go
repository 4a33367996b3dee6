package nodeapi

import (
	"context"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/nodewire"
)

type node struct {
	nodev1.UnimplementedNodeServer
	host   Host
	engine Engine
}

func (n *node) Info(ctx context.Context, _ *nodev1.InfoRequest) (*nodev1.NodeInfo, error) {
	i, err := n.host.Info(ctx)
	if err != nil {
		return nil, err
	}
	return nodewire.EncodeNodeInfo(i), nil
}

func (n *node) Doctor(ctx context.Context, _ *nodev1.DoctorRequest) (*nodev1.DoctorResponse, error) {
	checks, err := n.host.Doctor(ctx)
	if err != nil {
		return nil, err
	}
	return nodewire.EncodeChecks(checks), nil
}

func (n *node) TeardownNetworks(ctx context.Context, _ *nodev1.TeardownNetworksRequest) (*nodev1.TeardownNetworksResponse, error) {
	return &nodev1.TeardownNetworksResponse{}, n.host.TeardownNetworks(ctx)
}

func (n *node) Reset(ctx context.Context, _ *nodev1.ResetRequest) (*nodev1.ResetResponse, error) {
	return &nodev1.ResetResponse{}, n.engine.Reset(ctx)
}

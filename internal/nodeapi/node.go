package nodeapi

import (
	"context"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/nodewire"
)

type node struct {
	nodev1.UnimplementedNodeServer
	host   Host
	engine resetter
}

func (n *node) Info(ctx context.Context, _ *nodev1.InfoRequest) (*nodev1.NodeInfo, error) {
	return answer(nodewire.EncodeNodeInfo)(n.host.Info(ctx))
}

func (n *node) Doctor(ctx context.Context, _ *nodev1.DoctorRequest) (*nodev1.DoctorResponse, error) {
	return answer(nodewire.EncodeChecks)(n.host.Doctor(ctx))
}

func (n *node) TeardownNetworks(ctx context.Context, _ *nodev1.TeardownNetworksRequest) (*nodev1.TeardownNetworksResponse, error) {
	return &nodev1.TeardownNetworksResponse{}, n.host.TeardownNetworks(ctx)
}

func (n *node) Strays(ctx context.Context, _ *nodev1.StraysRequest) (*nodev1.StraysResponse, error) {
	return answer(nodewire.EncodeStrays)(n.host.Strays(ctx))
}

func (n *node) AdoptStray(ctx context.Context, req *nodev1.AdoptStrayRequest) (*nodev1.Record, error) {
	return answer(nodewire.EncodeRecord)(n.host.AdoptStray(ctx, req.GetId(), req.GetName()))
}

func (n *node) RemoveStray(ctx context.Context, req *nodev1.RemoveStrayRequest) (*nodev1.RemoveStrayResponse, error) {
	return &nodev1.RemoveStrayResponse{}, n.host.RemoveStray(ctx, req.GetId())
}

func (n *node) KeptFirmware(ctx context.Context, _ *nodev1.KeptFirmwareRequest) (*nodev1.KeptFirmwareResponse, error) {
	return answer(nodewire.EncodeKept)(n.host.KeptFirmware(ctx))
}

func (n *node) DropFirmware(ctx context.Context, req *nodev1.DropFirmwareRequest) (*nodev1.DropFirmwareResponse, error) {
	return &nodev1.DropFirmwareResponse{}, n.host.DropFirmware(ctx, nodewire.DecodeKeptState(req.GetKept()))
}

func (n *node) Police(ctx context.Context, req *nodev1.PoliceRequest) (*nodev1.PoliceResponse, error) {
	return &nodev1.PoliceResponse{}, n.host.Police(ctx, nodewire.DecodePolicies(req))
}

func (n *node) Reset(ctx context.Context, _ *nodev1.ResetRequest) (*nodev1.ResetResponse, error) {
	return &nodev1.ResetResponse{}, n.engine.Reset(ctx)
}

package nodeclient

import (
	"context"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/nodewire"
)

// Info asks the node what it is and runs.
func (c *Client) Info(ctx context.Context) (nodewire.NodeInfo, error) {
	m, err := unary(ctx, c, c.node.Info, &nodev1.InfoRequest{})
	if err != nil {
		return nodewire.NodeInfo{}, err
	}
	return nodewire.DecodeNodeInfo(m), nil
}

// Doctor has the daemon examine its host.
func (c *Client) Doctor(ctx context.Context) ([]nodewire.Check, error) {
	m, err := unary(ctx, c, c.node.Doctor, &nodev1.DoctorRequest{})
	if err != nil {
		return nil, err
	}
	return nodewire.DecodeChecks(m), nil
}

// TeardownNetworks removes every link and rule of the node's networks. FailedPrecondition while a VM that runs uses one.
func (c *Client) TeardownNetworks(ctx context.Context) error {
	_, err := unary(ctx, c, c.node.TeardownNetworks, &nodev1.TeardownNetworksRequest{})
	return err
}

// Reset removes every VM and every link and rule of the node's networks. Images stay.
func (c *Client) Reset(ctx context.Context) error {
	_, err := unary(ctx, c, c.node.Reset, &nodev1.ResetRequest{})
	return err
}

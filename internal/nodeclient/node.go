package nodeclient

import (
	"context"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/vm"
)

// Info returns the description of the node.
func (c *Client) Info(ctx context.Context) (nodewire.NodeInfo, error) {
	m, err := unary(ctx, c, c.node.Info, &nodev1.InfoRequest{})
	if err != nil {
		return nodewire.NodeInfo{}, err
	}
	return nodewire.DecodeNodeInfo(m), nil
}

// Doctor makes the daemon examine its host.
func (c *Client) Doctor(ctx context.Context) ([]nodewire.Check, error) {
	m, err := unary(ctx, c, c.node.Doctor, &nodev1.DoctorRequest{})
	if err != nil {
		return nil, err
	}
	return nodewire.DecodeChecks(m), nil
}

// TeardownNetworks removes every link and rule of the node's networks. FailedPrecondition while a running VM uses one.
func (c *Client) TeardownNetworks(ctx context.Context) error {
	_, err := unary(ctx, c, c.node.TeardownNetworks, &nodev1.TeardownNetworksRequest{})
	return err
}

// Strays lists the VMs on the node that its journal does not know.
func (c *Client) Strays(ctx context.Context) ([]vm.Stray, error) {
	m, err := unary(ctx, c, c.node.Strays, &nodev1.StraysRequest{})
	if err != nil {
		return nil, err
	}
	return nodewire.DecodeStrays(m), nil
}

// AdoptStray makes a stray a VM again, under its own name unless another is given.
func (c *Client) AdoptStray(ctx context.Context, id, name string) (vm.Record, error) {
	m, err := unary(ctx, c, c.node.AdoptStray, &nodev1.AdoptStrayRequest{Id: id, Name: name})
	if err != nil {
		return vm.Record{}, err
	}
	return nodewire.DecodeRecord(m), nil
}

// RemoveStray ends the process of a stray, and removes its interfaces and folders.
func (c *Client) RemoveStray(ctx context.Context, id string) error {
	_, err := unary(ctx, c, c.node.RemoveStray, &nodev1.RemoveStrayRequest{Id: id})
	return err
}

// Reset removes every VM and every link and rule of the node's networks. Images stay.
func (c *Client) Reset(ctx context.Context) error {
	_, err := unary(ctx, c, c.node.Reset, &nodev1.ResetRequest{})
	return err
}

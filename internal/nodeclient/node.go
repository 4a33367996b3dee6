package nodeclient

import (
	"context"

	nodev1 "cocoonstack.io/cocoon/api/node/v1"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/nodewire"
	"cocoonstack.io/cocoon/internal/vm"
)

// Info returns the description of the node.
func (c *Client) Info(ctx context.Context) (nodewire.NodeInfo, error) {
	return ask(ctx, c, c.node.Info, &nodev1.InfoRequest{}, nodewire.DecodeNodeInfo)
}

// Doctor makes the daemon examine its host.
func (c *Client) Doctor(ctx context.Context) ([]nodewire.Check, error) {
	return ask(ctx, c, c.node.Doctor, &nodev1.DoctorRequest{}, nodewire.DecodeChecks)
}

// TeardownNetworks removes every link and rule of the node's networks. FailedPrecondition while a running VM uses one.
func (c *Client) TeardownNetworks(ctx context.Context) error {
	return do(ctx, c, c.node.TeardownNetworks, &nodev1.TeardownNetworksRequest{})
}

// Strays lists the VMs on the node that its journal does not know.
func (c *Client) Strays(ctx context.Context) ([]vm.Stray, error) {
	return ask(ctx, c, c.node.Strays, &nodev1.StraysRequest{}, nodewire.DecodeStrays)
}

// AdoptStray makes a stray a VM again, under its own name unless another is given.
func (c *Client) AdoptStray(ctx context.Context, id, name string) (vm.Record, error) {
	return ask(ctx, c, c.node.AdoptStray, &nodev1.AdoptStrayRequest{Id: id, Name: name}, nodewire.DecodeRecord)
}

// RemoveStray ends the process of a stray, and removes its interfaces and folders.
func (c *Client) RemoveStray(ctx context.Context, id string) error {
	return do(ctx, c, c.node.RemoveStray, &nodev1.RemoveStrayRequest{Id: id})
}

// KeptFirmware lists what the firmware of removed VMs has kept on the node.
func (c *Client) KeptFirmware(ctx context.Context) ([]vm.KeptFirmware, error) {
	return ask(ctx, c, c.node.KeptFirmware, &nodev1.KeptFirmwareRequest{}, nodewire.DecodeKept)
}

// DropFirmware removes one of them.
func (c *Client) DropFirmware(ctx context.Context, k vm.KeptFirmware) error {
	return do(ctx, c, c.node.DropFirmware, &nodev1.DropFirmwareRequest{Kept: nodewire.EncodeKeptState(k)})
}

// Police replaces the network policies of one virtual node. FailedPrecondition when no network of the node enforces policies.
func (c *Client) Police(ctx context.Context, p network.Policies) error {
	return do(ctx, c, c.node.Police, nodewire.EncodePolicies(p))
}

// Reset removes every VM and every link and rule of the node's networks. Images stay.
func (c *Client) Reset(ctx context.Context) error {
	return do(ctx, c, c.node.Reset, &nodev1.ResetRequest{})
}

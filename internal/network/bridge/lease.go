package bridge

import (
	"context"
	"fmt"
	"time"

	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/vm"
)

// Bridge returns the name of the bridge's link.
func (n *Network) Bridge() string { return n.cfg.Bridge }

// Lease gives an address to an interface that another program put on the bridge. DHCP tells the interface that address. It
// returns a NIC without tap. Idempotent per (id, index); durable when it returns. Errors: ResourceExhausted, FailedPrecondition
// before Setup.
func (n *Network) Lease(ctx context.Context, id vm.ID, name string, index int, mac string) (vm.NIC, error) {
	lv, err := n.up()
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return vm.NIC{}, fmt.Errorf("lease an address of network %s: %w", n.cfg.Name, err)
	}
	l, _, err := lv.pool.Reserve(ipam.Request{ID: id, Name: name, Index: index, MAC: mac}, time.Now())
	if err != nil {
		return vm.NIC{}, fmt.Errorf("lease an address of network %s: %w", n.cfg.Name, err)
	}
	lv.pool.Attach(id, index, "")
	if err := n.file.Sync(lv.pool); err != nil {
		return vm.NIC{}, err
	}
	return n.nic(lv, l), nil
}

// Unlease is the inverse of Lease. Idempotent; it also works without Setup.
func (n *Network) Unlease(ctx context.Context, _ vm.ID, _ int, mac string) error {
	return n.Release(ctx, vm.NIC{MAC: mac})
}

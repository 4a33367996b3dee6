package bridge

import (
	"context"
	"net/netip"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/ipam"
)

// usable returns the leases in the file. If the file is damaged it returns no leases and the reason as damage; Remember gets
// them back later from VM records.
func usable(leases []ipam.Lease, err error) (_ []ipam.Lease, damage, _ error) {
	if errdefs.Is(err, errdefs.DataLoss) {
		return nil, err, nil
	}
	return leases, nil, err
}

// setAside moves a damaged lease file out of the way.
func (n *Network) setAside(damage error) error {
	to, err := n.file.SetAside(time.Now())
	if err != nil {
		return err
	}
	n.damaged.Add(1)
	n.log.Warn("lease file damaged and moved aside, leases are rebuilt from taps and the records of vms", "network", n.cfg.Name, "path", to, "err", damage)
	return nil
}

// DamagedLeases returns how often, since the daemon started, Setup found the lease file damaged.
func (n *Network) DamagedLeases() uint64 { return n.damaged.Load() }

// Remember implements network.Network.
func (n *Network) Remember(_ context.Context, held []network.Held) error {
	lv, err := n.up()
	if err != nil {
		return err
	}
	found := 0
	for _, h := range held {
		ip, err := netip.ParseAddr(h.NIC.IP)
		if err != nil || h.NIC.Network != n.cfg.Name {
			continue
		}
		if lv.pool.Remember(ipam.Lease{MAC: h.NIC.MAC, IP: ip, VM: h.Name, ID: h.ID, Index: h.Index, Tap: h.NIC.Tap}, time.Now()) {
			found++
		}
	}
	if found == 0 {
		return nil
	}
	n.log.Warn("leases rebuilt from the records of vms", "network", n.cfg.Name, "count", found)
	return n.file.Sync(lv.pool)
}

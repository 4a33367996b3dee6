package cocoond

import (
	"context"
	"net/netip"

	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/appliance"
	"cocoonstack.io/cocoon/internal/appliance/machine"
	"cocoonstack.io/cocoon/internal/appliance/pid1"
	"cocoonstack.io/cocoon/internal/appliance/uplink"
	hostnet "cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/vm"
)

// listens reports whether a program listens where ports of workloads are. In another namespace the bridge itself finds out.
func (d *daemon) listens(ctx context.Context, p vm.PortMapping) bool {
	return d.cfg.Network.NetNS == "" && hostnet.Listens(ctx, p)
}

// uplink returns the network of the machine if that runs Cocoon OS; nil otherwise.
func (d *daemon) uplink() appliance.Uplink {
	if machine.Slot() == "" {
		return nil
	}
	return &uplink.Control{
		Files: pid1.Network, Age: machine.Uptime,
		Wake: func() error { return unix.Kill(1, unix.SIGHUP) }, // process 1 looks then
		Machine: func() (uplink.Machine, error) {
			links, err := uplink.ListLinks()
			m := uplink.Machine{Links: links}
			if d.nets.bridge != nil {
				if p, _ := d.nets.bridge.Subnet(); p.IsValid() {
					m.Inner = append(m.Inner, p)
				}
				if p, err := netip.ParsePrefix(d.nets.bridge.Subnet6()); err == nil {
					m.Inner = append(m.Inner, p)
				}
			}
			return m, err
		},
	}
}

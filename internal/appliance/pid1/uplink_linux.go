package pid1

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/uplink"
)

// Network says where the configurations of the uplink are.
var Network = uplink.Files{Keep: ownDir, Boot: "/run/cocoon-network"}

// uplink keeps the machine on its network until ctx ends. SIGHUP has it look for another configuration.
func (m *machine) uplink(ctx context.Context, wake <-chan struct{}) {
	var shown []string
	manager := &uplink.Manager{
		Files: Network, Age: age, Log: m.log,
		User: &uplink.Host{Dir: ownDir, Resolv: "/etc/resolv.conf", Hardware: uplink.IsHardware, Log: m.log},
		Changed: func(s *capsulev1.NetworkState) {
			if len(s.GetAddresses()) > 0 && !slices.Equal(s.GetAddresses(), shown) {
				shown = s.GetAddresses()
				m.banner(shown)
			}
		},
	}
	manager.Run(ctx, wake)
}

// banner tells people at the console where the machine is.
func (m *machine) banner(addresses []string) {
	host, _ := os.Hostname()
	fmt.Fprintf(m.console, "\n  Cocoon OS %s, slot %s\n", m.cfg.Version, m.boot.Slot)
	for _, a := range addresses {
		if p, err := netip.ParsePrefix(a); err == nil {
			fmt.Fprintf(m.console, "  %s at %s\n", host, net.JoinHostPort(p.Addr().String(), fmt.Sprint(m.cfg.Port)))
		}
	}
	fmt.Fprintln(m.console)
}

package pid1

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/clock"
	"cocoonstack.io/cocoon/internal/appliance/uplink"
)

// Network says where the configurations of the uplink are.
var Network = uplink.Files{Keep: ownDir, Boot: "/run/cocoon-network"}

// uplink keeps the machine on its network until ctx ends. SIGHUP has it look for another configuration.
func (m *machine) uplink(ctx context.Context, wake <-chan struct{}) {
	var shown []string
	host := &clock.Host{RTC: "/dev/rtc0", Last: filepath.Join(ownDir, "clock")}
	if err := host.Floor(); err != nil {
		m.log.Warn("the clock may be far off", "err", err)
	}
	keeper := &clock.Keeper{Machine: host, Log: m.log}
	manager := &uplink.Manager{
		Files: Network, Age: age, Log: m.log,
		User: &uplink.Host{Dir: ownDir, Resolv: "/etc/resolv.conf", Hardware: uplink.IsHardware, Log: m.log},
		Changed: func(s *capsulev1.NetworkState) {
			if len(s.GetAddresses()) > 0 && !slices.Equal(s.GetAddresses(), shown) {
				shown = s.GetAddresses()
				m.banner(shown)
			}
			if len(s.GetAddresses()) > 0 {
				keeper.Use(s.GetNtp())
			}
		},
	}
	keeper.Told = func(s clock.Status) { manager.Clock(clockOf(s)) }
	go m.guard("keep the clock", func() error { keeper.Run(ctx); return nil })
	manager.Run(ctx, wake)
}

// clockOf says how the clock is. The time of the question is counted from the start of the machine here: uplink.Control makes it relative.
func clockOf(s clock.Status) *capsulev1.NetworkClock {
	return &capsulev1.NetworkClock{
		Synchronized: s.Set, Server: s.Server, OffsetMicroseconds: s.Offset.Microseconds(), AskedSecondsAgo: int64(age() / time.Second), Error: s.Fault,
	}
}

// banner tells people at the console where the machine is.
func (m *machine) banner(addresses []string) {
	host, _ := os.Hostname()
	what := fmt.Sprintf("slot %s", m.boot.Slot)
	if m.installer {
		what = "installer"
	}
	fmt.Fprintf(m.console, "\n  Cocoon OS %s, %s\n", m.cfg.Version, what)
	for _, a := range addresses {
		if p, err := netip.ParsePrefix(a); err == nil {
			fmt.Fprintf(m.console, "  %s at %s\n", host, net.JoinHostPort(p.Addr().String(), fmt.Sprint(m.cfg.Port)))
		}
	}
	fmt.Fprintln(m.console)
}

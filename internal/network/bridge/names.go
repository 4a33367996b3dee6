package bridge

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/resolver"
)

const (
	dnsPort  = 53
	dnsRetry = 5 * time.Second // before the sockets are tried again
)

// publicServers resolve names if the host itself knows no resolver.
var publicServers = []netip.Addr{netip.AddrFrom4([4]byte{1, 1, 1, 1}), netip.AddrFrom4([4]byte{8, 8, 8, 8})}

// SetZone says which names guests have. Until then they cannot resolve these.
func (n *Network) SetZone(z resolver.Zone) { n.zone.Store(&z) }

// Questions returns how many DNS questions guests have asked since the daemon started, by what became of them.
func (n *Network) Questions() map[string]uint64 { return n.questions.counts() }

// resolve answers the names of guests until ctx ends. As long as another program has the port, guests resolve nothing, and all else works.
func (n *Network) resolve(ctx context.Context, lv *live) {
	c := resolver.Config{
		Domain: n.cfg.Domain, Guests: []netip.Prefix{lv.prefix}, Servers: func() []netip.AddrPort { return n.servers(lv) }, Answered: n.questions.add,
		Zone: func() resolver.Zone {
			if z := n.zone.Load(); z != nil {
				return *z
			}
			return nil
		},
	}
	if lv.prefix6.IsValid() {
		c.Guests = append(c.Guests, lv.prefix6)
	}
	r := resolver.New(c)
	for said := false; ctx.Err() == nil; {
		var on *resolver.Sockets
		err := n.space.Do(func() (err error) {
			on, err = resolver.Listen(ctx, n.cfg.Bridge, []netip.AddrPort{netip.AddrPortFrom(lv.gateway, dnsPort)})
			return err
		})
		if err == nil {
			said = false
			err = r.Serve(ctx, on)
		}
		if ctx.Err() != nil {
			return
		}
		if !said {
			n.log.Error("guests resolve no names", "network", n.cfg.Name, "err", err)
			said = true
		}
		select {
		case <-ctx.Done():
		case <-time.After(dnsRetry):
		}
	}
}

// servers returns the resolvers for names that are not ours. The host's own are read anew each time: they come with its uplink. Our own
// address is never one of them.
func (n *Network) servers(lv *live) (out []netip.AddrPort) {
	known := host.NameServers()
	if n.cfg.DNS != nil {
		known = resolvers(n.cfg)
	}
	known = slices.DeleteFunc(known, func(a netip.Addr) bool { return a == lv.gateway || a == gateway6(lv.prefix6) })
	if len(known) == 0 && n.cfg.DNS == nil {
		known = publicServers
	}
	for _, a := range known {
		out = append(out, netip.AddrPortFrom(a, dnsPort))
	}
	return out
}

package uplink

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"google.golang.org/protobuf/proto"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/atomicfile"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// steady is how often a link is set again to what it shall be, as somebody may have pulled it out.
const steady = 15 * time.Second

// publicServers resolve names if nobody says which servers do.
var publicServers = []string{"1.1.1.1", "8.8.8.8"}

// publicClocks are the servers of time if nobody names others.
var publicClocks = []string{"pool.ntp.org", "time.cloudflare.com", "time.google.com"}

// Host uses configurations on this machine, in the network namespace of the process. It owns all links of hardware.
type Host struct {
	Dir      string                  // of the client id and the last address of DHCP, which survive a restart of the machine
	Resolv   string                  // path of resolv.conf
	Hardware func(netlink.Link) bool // IsHardware
	Log      *slog.Logger

	links *links
}

// Use implements User.
func (h *Host) Use(ctx context.Context, c *capsulev1.NetworkConfig, tell func(*capsulev1.NetworkState)) error {
	if h.links == nil {
		h.links = &links{hardware: h.Hardware, mtu: map[string]int{}, used: map[string]bool{}}
	}
	l, err := h.links.prepare(ctx, c)
	if err != nil {
		return err
	}
	u := &use{host: h, config: c, link: l, tell: tell}
	if m := c.GetIpv4().GetMethod(); m == capsulev1.IPv4Method_IPV4_METHOD_STATIC || m == capsulev1.IPv4Method_IPV4_METHOD_OFF {
		return u.keep(ctx)
	}
	return u.lease(ctx)
}

// use is a configuration in use on a link.
type use struct {
	host   *Host
	config *capsulev1.NetworkConfig
	link   netlink.Link
	tell   func(*capsulev1.NetworkState)
	told   *capsulev1.NetworkState
}

// keep keeps a link without DHCP as it shall be, until ctx ends.
func (u *use) keep(ctx context.Context) error {
	for {
		if err := u.set(fixed(u.config), nil, nil); err != nil {
			return err
		}
		if err := u.wait(ctx, steady); err != nil {
			return err
		}
	}
}

// wait waits for a while. Meanwhile it tells of addresses that routers advertise. It returns an error if the link is gone.
func (u *use) wait(ctx context.Context, d time.Duration) error {
	until := time.NewTimer(d)
	defer until.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-until.C:
			return nil
		case <-time.After(min(d, 3*time.Second)):
			l, err := netlink.LinkByName(u.link.Attrs().Name)
			if err != nil || l.Attrs().Index != u.link.Attrs().Index {
				return errdefs.Unavailablef("link %s is gone", u.link.Attrs().Name)
			}
			if s, err := (given{}).look(l); err == nil && u.told != nil && !slices.Equal(s.GetAddresses(), u.told.GetAddresses()) {
				u.told.Addresses = s.GetAddresses()
				u.tell(proto.CloneOf(u.told))
			}
		}
	}
}

// set gives the link what it shall have, and the machine its name servers: those of the configuration, otherwise dns, otherwise public ones.
func (u *use) set(g given, dns, ntp []string) error {
	if err := assign(u.link, g, u.config.GetIpv6().GetMethod()); err != nil {
		return err
	}
	if len(u.config.GetDns()) > 0 {
		dns = u.config.GetDns()
	}
	if len(u.config.GetNtp()) > 0 {
		ntp = u.config.GetNtp()
	}
	if len(dns) == 0 {
		dns = publicServers
	}
	if len(ntp) == 0 {
		ntp = publicClocks
	}
	dns = dns[:min(len(dns), maxServers)]
	text := "nameserver " + strings.Join(dns, "\nnameserver ") + "\n"
	if err := atomicfile.WriteFile(u.host.Resolv, []byte(text), 0o644); err != nil {
		return fmt.Errorf("store the name servers in %s: %w", filepath.Base(u.host.Resolv), err)
	}
	s, err := g.look(u.link)
	if err != nil {
		return err
	}
	s.Dns, s.Ntp = dns, ntp
	if u.told == nil || !proto.Equal(u.told, s) {
		u.told = s
		u.tell(proto.CloneOf(s))
	}
	return nil
}

// dynamic returns what a lease gives, with the static part of the configuration.
func dynamic(c *capsulev1.NetworkConfig, p netip.Prefix, routers []netip.Addr) given {
	g := fixed(c)
	g.addresses = append([]netip.Prefix{p}, g.addresses...)
	if len(routers) > 0 {
		g.gateways = append([]netip.Addr{routers[0]}, g.gateways...)
	}
	return g
}

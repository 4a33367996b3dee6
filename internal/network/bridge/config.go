package bridge

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/dhcp"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/ipam"
)

// SubnetAuto makes Setup choose the first free /24 of the ranges in subnet.go. The choice is kept from then on.
const SubnetAuto = "auto"

// How guests get their IPv6 address. The address is the same in both modes: made from Subnet6 and the MAC.
const (
	IPv6SLAAC    = "slaac"    // guests make it themselves
	IPv6Stateful = "stateful" // our DHCPv6 server assigns it, and guests make none themselves
)

// defaultName is the default name of a network and of a daemon's instance.
const defaultName = "default"

// Config describes one network. The zero values of all fields except StateDir are good defaults for a laptop without NAT.
type Config struct {
	Name     string // "default"; the name that vm.NICSpec.Network uses
	Instance string // "default"; must differ between daemons that share a namespace
	Bridge   string // link name, "cocoon0"
	NetNS    string // name (of `ip netns`) or path of the network namespace; "" is the daemon's own

	Subnet  string   // IPv4 CIDR, or SubnetAuto (the default)
	Gateway string   // our address; by default the first of Subnet
	Subnet6 string   // IPv6 CIDR of 64 bits; "" for no IPv6. Its first address is ours
	DNS     []string // nil: the host's resolvers that guests can reach; empty: none. IPv6 ones need Subnet6
	Search  []string // DNS search domains of guests
	Routes  []Route  // routes of guests in addition to the default one
	MTU     int      // bytes; 0: the MTU of the link with the default route

	// Domain makes the host the name server of guests: it answers for names in this domain by the zone of SetZone, and asks DNS, or the
	// host's resolvers, for all others. "": it does not.
	Domain string

	IPv6Mode string // IPv6SLAAC (the default) or IPv6Stateful

	// Adopt uses an existing bridge, with its address, subnet and MTU, and changes none of them. The rules apply only to taps;
	// the other ports of the bridge are not affected.
	Adopt bool

	NAT            bool   // guests reach other networks, with the host's address as source
	MasqueradeLink string // masquerade only packets that leave by this link; "" for any
	Isolation      bool   // guests cannot reach each other
	Unguarded      bool   // guests reach every port of the host and all networks, and can use each other's addresses
	Switched       bool   // guests of the bridge exchange frames past the host's rules for routed packets; see meeting.go

	// Services are addresses of Services, ADDRESS:PORT, by which guests reach ports of the host that they do not reach directly.
	Services []string
	// Peers are bridges of other nodes of the same cluster on this machine: guests there reach ours, and ours them, with their
	// own addresses.
	Peers []string

	// CIDRs and addresses. Guests cannot reach the host's own addresses, clouds' metadata services and Closed, except for Open.
	Closed []string
	Open   []string

	StateDir  string // our own folder: what Setup decided
	LeasePath string // default: StateDir/leases.json
}

// Route is a route of guests that does not use the gateway.
type Route struct {
	To  string `json:"to"`            // IPv4 CIDR
	Via string `json:"via,omitempty"` // address in the subnet; "" for directly on the link
}

var (
	domainRE = regexp.MustCompile(`^([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?$`)
	labelRE  = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$`)
	linkRE   = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,14}$`)
)

func (c Config) withDefaults() (Config, error) {
	c.Name = cmp.Or(c.Name, defaultName)
	c.Instance = cmp.Or(c.Instance, defaultName)
	c.Bridge = cmp.Or(c.Bridge, "cocoon0")
	c.Subnet = cmp.Or(c.Subnet, SubnetAuto)
	c.LeasePath = cmp.Or(c.LeasePath, filepath.Join(c.StateDir, "leases.json"))
	switch {
	case !labelRE.MatchString(c.Name):
		return c, errdefs.Invalidf("network name %q must be up to 32 lower-case letters, digits and inner dashes", c.Name)
	case !labelRE.MatchString(c.Instance):
		return c, errdefs.Invalidf("network %s: instance %q must be up to 32 lower-case letters, digits and inner dashes", c.Name, c.Instance)
	case !linkRE.MatchString(c.Bridge):
		return c, errdefs.Invalidf("network %s: invalid link name %q; use up to 15 letters, digits, '_', '.' and '-'", c.Name, c.Bridge)
	case c.MasqueradeLink != "" && !linkRE.MatchString(c.MasqueradeLink):
		return c, errdefs.Invalidf("network %s: invalid link name %q", c.Name, c.MasqueradeLink)
	case c.StateDir == "":
		return c, errdefs.Invalidf("network %s: a state folder is needed", c.Name)
	case c.MTU != 0 && (c.MTU < 576 || c.MTU > 65535):
		return c, errdefs.Invalidf("network %s: MTU %d is not between 576 and 65535", c.Name, c.MTU)
	}
	for _, p := range c.Peers {
		if !linkRE.MatchString(p) {
			return c, errdefs.Invalidf("network %s: invalid name of a peer's bridge %q", c.Name, p)
		}
	}
	if _, err := c.services(); err != nil {
		return c, err
	}
	if c.Adopt && (len(c.Services) > 0 || len(c.Peers) > 0) {
		return c, errdefs.Invalidf("network %s: services and peers are for a bridge of Cocoon's own; omit them, or adopt", c.Name)
	}
	if c.Adopt && c.Domain != "" {
		return c, errdefs.Invalidf("network %s: the host answers no names on an adopted bridge, where others may; omit the domain, or adopt", c.Name)
	}
	if c.Adopt && (c.Subnet != SubnetAuto || c.Gateway != "" || c.Isolation) {
		return c, errdefs.Invalidf("network %s: an adopted bridge has its own subnet and gateway and cannot be isolated; omit subnet, gateway and isolation", c.Name)
	}
	if c.Subnet != SubnetAuto {
		prefix, err := netip.ParsePrefix(c.Subnet)
		if err != nil {
			return c, errdefs.Invalidf("network %s: invalid subnet %q; use %q or a subnet such as 10.88.0.0/24", c.Name, c.Subnet, SubnetAuto)
		}
		if err := ipam.CheckPrefix(prefix); err != nil {
			return c, err
		}
		if _, err := c.gatewayIn(prefix); err != nil {
			return c, err
		}
	} else if c.Gateway != "" {
		return c, errdefs.Invalidf("network %s: a gateway needs a subnet; set both", c.Name)
	}
	prefix6, err := c.prefix6()
	if err != nil {
		return c, err
	}
	if _, err := network.NewClosed(c.Closed, c.Open); err != nil {
		return c, fmt.Errorf("network %s: %w", c.Name, err)
	}
	dns, err := c.nameServers(prefix6.IsValid() || c.Domain != "")
	if err != nil {
		return c, err
	}
	if c.Domain != "" {
		c.Search = append([]string{c.Domain}, c.Search...)
	}
	for _, d := range c.Search {
		if len(d) > 253 || !domainRE.MatchString(d) {
			return c, errdefs.Invalidf("network %s: search domain %q is not a domain name", c.Name, d)
		}
	}
	routes, err := c.routes()
	if err != nil {
		return c, err
	}
	// The addresses only need the same length as those that Setup finds.
	any4 := netip.AddrFrom4([4]byte{10})
	told := dhcp.Config{Server: any4, Router: any4, Prefix: netip.PrefixFrom(any4, 8), DNS: make([]netip.Addr, max(len(ofFamily(dns, false)), 3)), Search: c.Search, Routes: routes, MTU: 1500}
	for i := range told.DNS {
		told.DNS[i] = any4
	}
	told6 := dhcp.Config6{Server: make(net.HardwareAddr, 6), DNS: ofFamily(dns, true), Search: c.Search}
	if err := errors.Join(told.Check(), told6.Check()); err != nil {
		return c, fmt.Errorf("network %s: %w", c.Name, err)
	}
	return c, nil
}

// nameServers returns the configured name servers.
func (c Config) nameServers(ipv6 bool) (out []netip.Addr, err error) {
	for _, d := range c.DNS {
		a, err := netip.ParseAddr(d)
		if err != nil || a.Zone() != "" || a.Is4In6() {
			return nil, errdefs.Invalidf("network %s: DNS server %q is not an IP address", c.Name, d)
		}
		if a.Is6() && !ipv6 {
			return nil, errdefs.Invalidf("network %s: guests have no IPv6, so they cannot reach DNS server %s; set subnet6, or omit the server", c.Name, d)
		}
		out = append(out, a)
	}
	return out, nil
}

func (c Config) routes() ([]dhcp.Route, error) {
	var out []dhcp.Route
	for _, r := range c.Routes {
		to, err := netip.ParsePrefix(r.To)
		if err != nil || !to.Addr().Is4() || to != to.Masked() {
			return nil, errdefs.Invalidf("network %s: invalid route destination %q; use an IPv4 subnet such as 192.168.7.0/24", c.Name, r.To)
		}
		route := dhcp.Route{To: to}
		if r.Via != "" {
			if route.Via, err = netip.ParseAddr(r.Via); err != nil || !route.Via.Is4() {
				return nil, errdefs.Invalidf("network %s: the route to %s has gateway %q, which is not an IPv4 address", c.Name, r.To, r.Via)
			}
		}
		out = append(out, route)
	}
	return out, nil
}

// gatewayIn returns our address in prefix.
func (c Config) gatewayIn(prefix netip.Prefix) (netip.Addr, error) {
	if c.Gateway == "" {
		return prefix.Addr().Next(), nil
	}
	g, err := netip.ParseAddr(c.Gateway)
	if err != nil || !prefix.Contains(g) || g == prefix.Addr() || g == lastOf(prefix) {
		return netip.Addr{}, errdefs.Invalidf("network %s: gateway %q is not a host address in %s", c.Name, c.Gateway, prefix)
	}
	return g, nil
}

// services returns the configured addresses of Services.
func (c Config) services() (out []netip.AddrPort, err error) {
	for _, s := range c.Services {
		a, err := netip.ParseAddrPort(s)
		if err != nil || !a.Addr().Is4() || a.Port() == 0 {
			return nil, errdefs.Invalidf("network %s: invalid address of a Service %q; use an IPv4 address and a port, such as 10.96.0.1:443", c.Name, s)
		}
		out = append(out, a)
	}
	return out, nil
}

// owner is the mark on everything that belongs to this network.
func (c Config) owner() string { return c.Instance + "/" + c.Name }

// table is the name of our nftables tables.
func (c Config) table() string { return "cocoon-" + c.Instance + "-" + c.Name }

// policyTable is the name of the table of policies. No name of a network ends like this.
func (c Config) policyTable() string { return c.table() + "_policy" }

// insideTable is the name of the tables that translate the addresses of guests.
func (c Config) insideTable() string { return c.table() + "_inside" }

// bridgeMAC is fixed, so that guests keep their ARP entries over a restart, and so that a bridge without alias is still
// recognized as ours.
func bridgeMAC(owner string) net.HardwareAddr {
	sum := sha256.Sum256([]byte("bridge\x00" + owner))
	return net.HardwareAddr{0x02, sum[0], sum[1], sum[2], sum[3], sum[4]}
}

// nsPath turns a name of `ip netns` into a path.
func nsPath(ns string) string {
	if ns == "" || strings.Contains(ns, "/") {
		return ns
	}
	return filepath.Join("/run/netns", ns)
}

func lastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().As4()
	for i, m := range net.CIDRMask(p.Bits(), 32) {
		b[i] |= ^m
	}
	return netip.AddrFrom4(b)
}

// adopted reads the settings of a bridge that is not ours: its first IPv4 address is our gateway, and the prefix of that
// address is the subnet. Errors: FailedPrecondition if the bridge cannot be used, with the remedy.
func adopted(name string, mtu int) (place, error) {
	br, err := host.FindLink(name)
	if err != nil {
		return place{}, err
	}
	if br == nil || br.Type() != "bridge" {
		return place{}, errdefs.Preconditionf("there is no bridge %s to adopt; make it, or turn network.adopt off", name)
	}
	if br.Attrs().Flags&net.FlagUp == 0 {
		return place{}, errdefs.Preconditionf("bridge %s is down; bring it up with `ip link set %s up`", name, name)
	}
	addrs, err := retryDump(func() ([]netlink.Addr, error) { return netlink.AddrList(br, netlink.FAMILY_V4) })
	if err != nil {
		return place{}, fmt.Errorf("list addresses of %s: %w", name, err)
	}
	for _, a := range addrs {
		prefix, ok := prefixOf(a.IPNet)
		gateway, _ := netip.AddrFromSlice(a.IP.To4())
		if !ok || ipam.CheckPrefix(prefix) != nil {
			continue
		}
		if mtu == 0 || mtu > br.Attrs().MTU {
			mtu = br.Attrs().MTU
		}
		return place{prefix: prefix, gateway: gateway, mac: br.Attrs().HardwareAddr, mtu: mtu}, nil
	}
	return place{}, errdefs.Preconditionf("bridge %s has no IPv4 address that guests can use as gateway; give it one with `ip addr add CIDR dev %s`", name, name)
}

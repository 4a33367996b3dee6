package cloudinit

import (
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/vm"
)

// networkV2 is a network-config of version 2. Interfaces are matched by MAC and get the names eth0, eth1 and so on. Some
// renderers of cloud-init match only by name, so we must set the names.
func networkV2(nics []vm.NIC) map[string]any {
	ethernets := map[string]any{}
	for i, n := range vm.OneDefaultRoute(nics) {
		name := "eth" + strconv.Itoa(i)
		e := map[string]any{"match": map[string]any{"macaddress": strings.ToLower(n.MAC)}, "set-name": name}
		if n.MTU > 0 {
			e["mtu"] = n.MTU
		}
		if addr, ok := static(n); !ok {
			e["dhcp4"] = true
			if i > 0 { // the route of an earlier interface comes first
				e["dhcp4-overrides"] = map[string]any{"route-metric": 100 * (i + 1)}
			}
			if dhcp6(n) {
				e["dhcp6"] = true
			}
		} else {
			e["addresses"] = append([]string{addr.String()}, n.Addresses...)
			var routes []any
			if gw, err := netip.ParseAddr(n.Gateway); err == nil {
				r := map[string]any{"to": everywhere(gw).String(), "via": gw.String()} // many images are too old for "default"
				if !addr.Contains(gw) {
					r["on-link"] = true
				}
				routes = append(routes, r)
			}
			for _, r := range n.Routes {
				routes = append(routes, map[string]any{"to": r.To, "via": r.Via})
			}
			if len(routes) > 0 {
				e["routes"] = routes
			}
			if len(n.DNS) > 0 {
				e["nameservers"] = map[string]any{"addresses": n.DNS}
			}
		}
		ethernets[name] = e
	}
	return map[string]any{"version": 2, "ethernets": ethernets}
}

// everywhere is the destination of a default route through a.
func everywhere(a netip.Addr) netip.Prefix {
	if a.Is6() {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

// static is the address that the guest sets itself. There is none if DHCP answers or no address is known.
func static(n vm.NIC) (netip.Prefix, bool) {
	ip, err := netip.ParseAddr(n.IP)
	if err != nil || n.DHCP || n.Prefix < 1 || n.Prefix > ip.BitLen() {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(ip, n.Prefix), true
}

// dhcp6 reports whether the guest also uses DHCPv6.
func dhcp6(n vm.NIC) bool { return n.DHCP && len(n.Addresses) > 0 }

// networkData is the same configuration in the form of OpenStack's network_data.json.
func networkData(nics []vm.NIC) map[string]any {
	links, networks, services := []any{}, []any{}, []any{}
	for i, n := range vm.OneDefaultRoute(nics) {
		link := "eth" + strconv.Itoa(i)
		l := map[string]any{"id": link, "name": link, "type": "phy", "ethernet_mac_address": strings.ToLower(n.MAC)}
		if n.MTU > 0 {
			l["mtu"] = n.MTU
		}
		links = append(links, l)
		id := "net-" + strconv.Itoa(i)
		addr, ok := static(n)
		if !ok {
			networks = append(networks, map[string]any{"id": id, "network_id": id, "link": link, "type": "ipv4_dhcp"})
			if dhcp6(n) {
				networks = append(networks, map[string]any{"id": id + "-1", "network_id": id, "link": link, "type": "ipv6_dhcpv6-stateful"})
			}
			continue
		}
		all := []netip.Prefix{addr}
		for _, s := range n.Addresses {
			if p, err := netip.ParsePrefix(s); err == nil {
				all = append(all, p)
			}
		}
		for j, p := range all {
			w := map[string]any{"id": id, "network_id": id, "link": link, "type": "ipv4", "ip_address": p.Addr().String(), "netmask": netmask(p)}
			if p.Addr().Is6() {
				w["type"] = "ipv6"
			}
			if j > 0 {
				w["id"] = id + "-" + strconv.Itoa(j)
			}
			if routes := routesBy(n, all, j); len(routes) > 0 {
				w["routes"] = routes
			}
			networks = append(networks, w)
		}
		for _, d := range n.DNS {
			services = append(services, map[string]any{"type": "dns", "address": d})
		}
	}
	return map[string]any{"links": links, "networks": networks, "services": services}
}

// routesBy returns the routes of n that belong to address number at: the first address of a family takes all routes of
// that family.
func routesBy(n vm.NIC, all []netip.Prefix, at int) []any {
	var out []any
	family := func(a netip.Addr) bool {
		return a.IsValid() && at == slices.IndexFunc(all, func(p netip.Prefix) bool { return p.Addr().Is6() == a.Is6() })
	}
	add := func(to netip.Prefix, via string) {
		out = append(out, map[string]any{"network": to.Addr().String(), "netmask": netmask(to), "gateway": via})
	}
	if gw, err := netip.ParseAddr(n.Gateway); err == nil && family(gw) {
		add(everywhere(gw), gw.String())
	}
	for _, r := range n.Routes {
		if to, err := netip.ParsePrefix(r.To); err == nil && family(to.Addr()) {
			add(to, r.Via)
		}
	}
	return out
}

func netmask(p netip.Prefix) string {
	return net.IP(net.CIDRMask(p.Bits(), p.Addr().BitLen())).String()
}

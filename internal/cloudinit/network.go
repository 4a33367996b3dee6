package cloudinit

import (
	"net"
	"net/netip"
	"strconv"
	"strings"

	"cocoonstack.io/cocoon/internal/vm"
)

// networkV2 is a network-config of version 2. Interfaces are found by their MAC and get the names eth0, eth1 and so on:
// some renderers of cloud-init match by name alone, so the name has to be ours.
func networkV2(nics []vm.NIC) map[string]any {
	ethernets := map[string]any{}
	for i, n := range nics {
		name := "eth" + strconv.Itoa(i)
		e := map[string]any{"match": map[string]any{"macaddress": strings.ToLower(n.MAC)}, "set-name": name}
		if n.MTU > 0 {
			e["mtu"] = n.MTU
		}
		if addr, ok := static(n); !ok {
			e["dhcp4"] = true
		} else {
			e["addresses"] = []string{addr.String()}
			if gw, err := netip.ParseAddr(n.Gateway); err == nil {
				to := "0.0.0.0/0" // "default" is younger than many images
				if gw.Is6() {
					to = "::/0"
				}
				r := map[string]any{"to": to, "via": gw.String()}
				if !addr.Contains(gw) {
					r["on-link"] = true
				}
				e["routes"] = []any{r}
			}
			if len(n.DNS) > 0 {
				e["nameservers"] = map[string]any{"addresses": n.DNS}
			}
		}
		ethernets[name] = e
	}
	return map[string]any{"version": 2, "ethernets": ethernets}
}

// static is the address that the guest is to set itself; none where DHCP answers or none is known.
func static(n vm.NIC) (netip.Prefix, bool) {
	ip, err := netip.ParseAddr(n.IP)
	if err != nil || n.DHCP || n.Prefix < 1 || n.Prefix > ip.BitLen() {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(ip, n.Prefix), true
}

// networkData is the same in the form of OpenStack's network_data.json.
func networkData(nics []vm.NIC) map[string]any {
	links, networks, services := []any{}, []any{}, []any{}
	for i, n := range nics {
		link := "eth" + strconv.Itoa(i)
		l := map[string]any{"id": link, "name": link, "type": "phy", "ethernet_mac_address": strings.ToLower(n.MAC)}
		if n.MTU > 0 {
			l["mtu"] = n.MTU
		}
		links = append(links, l)
		id := "net-" + strconv.Itoa(i)
		w := map[string]any{"id": id, "network_id": id, "link": link, "type": "ipv4_dhcp"}
		if addr, ok := static(n); ok {
			w["type"], w["ip_address"], w["netmask"] = "ipv4", addr.Addr().String(), netmask(addr)
			zero := "0.0.0.0"
			if addr.Addr().Is6() {
				w["type"], zero = "ipv6", "::"
			}
			if gw, err := netip.ParseAddr(n.Gateway); err == nil {
				w["routes"] = []any{map[string]any{"network": zero, "netmask": zero, "gateway": gw.String()}}
			}
			for _, d := range n.DNS {
				services = append(services, map[string]any{"type": "dns", "address": d})
			}
		}
		networks = append(networks, w)
	}
	return map[string]any{"links": links, "networks": networks, "services": services}
}

func netmask(p netip.Prefix) string {
	return net.IP(net.CIDRMask(p.Bits(), p.Addr().BitLen())).String()
}

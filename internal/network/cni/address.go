package cni

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"cocoonstack.io/cocoon/internal/vm"
)

// address gives nic the addresses and routes of a result. The first IPv4 address becomes the main address; if there is none,
// the first address does. The first IPv6 address besides that becomes nic.IPv6.
func address(nic *vm.NIC, ips []*types100.IPConfig, routes []*types.Route) {
	ips = slices.Clone(ips)
	slices.SortStableFunc(ips, func(a, b *types100.IPConfig) int { return cmp.Compare(len(plain(a)), len(plain(b))) })
	gateways := map[bool]netip.Addr{} // by family: true for IPv6
	for _, ip := range ips {
		addr, ok := netip.AddrFromSlice(plain(ip))
		bits, size := ip.Address.Mask.Size()
		if bits -= size - addr.BitLen(); !ok || size == 0 || bits < 0 || bits > addr.BitLen() { // an IPv4 address may be written as IPv6
			continue
		}
		if gw, ok := netip.AddrFromSlice(ip.Gateway); ok && !gateways[addr.Is6()].IsValid() {
			gateways[addr.Is6()] = gw.Unmap()
		}
		switch {
		case nic.IP == "":
			nic.IP, nic.Prefix = addr.String(), bits
			continue
		case addr.Is6() && nic.IPv6 == "" && !isIPv6(nic.IP):
			nic.IPv6 = addr.String()
		}
		nic.Addresses = append(nic.Addresses, netip.PrefixFrom(addr, bits).String())
	}
	if nic.IP == "" {
		return // a server outside the plugins decides, also about routes
	}
	for _, r := range routes {
		if r == nil {
			continue
		}
		to, ok := destination(r)
		if !ok {
			continue
		}
		via, given := netip.AddrFromSlice(r.GW)
		via = via.Unmap()
		if own := gateways[to.Addr().Is6()]; !given { // CNI: the gateway of the address
			via = own
		} else if to.Bits() == 0 && !own.IsValid() {
			gateways[to.Addr().Is6()] = via
		}
		if to.Bits() > 0 && via.Is6() == to.Addr().Is6() && via.IsValid() {
			nic.Routes = append(nic.Routes, vm.Route{To: to.String(), Via: via.String()})
		}
	}
	if gw := gateways[isIPv6(nic.IP)]; gw.IsValid() {
		nic.Gateway = gw.String()
	}
	if gw := gateways[true]; gw.IsValid() && nic.IPv6 != "" {
		nic.Routes = append(nic.Routes, vm.Route{To: netip.PrefixFrom(netip.IPv6Unspecified(), 0).String(), Via: gw.String()})
	}
}

// plain returns an address in its shortest form, 4 or 16 bytes.
func plain(ip *types100.IPConfig) []byte {
	if four := ip.Address.IP.To4(); four != nil {
		return four
	}
	return ip.Address.IP
}

func destination(r *types.Route) (netip.Prefix, bool) {
	addr, ok := netip.AddrFromSlice(r.Dst.IP)
	bits, size := r.Dst.Mask.Size()
	if size == 32 {
		addr = addr.Unmap()
	}
	p := netip.PrefixFrom(addr, bits)
	return p, ok && p.IsValid() && addr.BitLen() == size
}

func isIPv6(s string) bool {
	a, err := netip.ParseAddr(s)
	return err == nil && a.Is6()
}

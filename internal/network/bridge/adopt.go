package bridge

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/ipam"
)

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

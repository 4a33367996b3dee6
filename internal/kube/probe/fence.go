package probe

import (
	"net"
	"net/netip"
	"slices"
	"syscall"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
)

// Forbidden says why the node connects to nobody at addr because a pod says so: it is the node itself, its link, a cloud's
// metadata service or nobody in particular. Guests and what runs in them have none of these addresses. Errors:
// FailedPrecondition.
func Forbidden(addr netip.Addr) error {
	addr = addr.Unmap().WithZone("")
	var what string
	switch {
	case !addr.IsValid() || addr.IsUnspecified():
		what = "no address of anybody"
	case addr.IsLoopback():
		what = "the node's loopback"
	case addr.IsLinkLocalUnicast():
		what = "on the node's own link"
	case addr.IsMulticast() || addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		what = "the address of many"
	case slices.ContainsFunc(network.AlwaysClosed(), func(p netip.Prefix) bool { return p.Contains(addr) }):
		what = "a metadata service of clouds"
	default:
		own, err := ownAddress(addr)
		if err != nil {
			return errdefs.Preconditionf("the node cannot tell whether %s is its own address: %w", addr, err)
		}
		if own {
			what = "an address of the node itself"
		}
	}
	if what == "" {
		return nil
	}
	return errdefs.Preconditionf("the node does not connect to %s for a pod: it is %s", addr, what)
}

// ownAddress asks the kernel each time: addresses come and go.
func ownAddress(addr netip.Addr) (bool, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return false, err
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			if own, ok := netip.AddrFromSlice(n.IP); ok && own.Unmap() == addr {
				return true, nil
			}
		}
	}
	// Of a whole network that is local, no link shows the addresses; the kernel answers itself from the one that is asked.
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 9))) // nothing is sent
	if err != nil {
		return false, nil // there is no way to it at all
	}
	defer c.Close()
	from, ok := c.LocalAddr().(*net.UDPAddr)
	return ok && from.AddrPort().Addr().Unmap() == addr, nil
}

// Fence is the Control of a net.Dialer that connects to no forbidden address, whatever name it came from.
func Fence(_, address string, _ syscall.RawConn) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return errdefs.Preconditionf("the node does not connect to %q for a pod: it is no IP address and port", address)
	}
	return Forbidden(to.Addr())
}

package reach

import (
	"net/netip"
	"syscall"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Forbidden says why the node connects to nobody at addr because a pod says so: it is the node itself, its link, a cloud's
// metadata service or nobody in particular. Guests and what runs in them have none of these addresses. Errors:
// FailedPrecondition.
func Forbidden(addr netip.Addr) error {
	if kind := KindOf(addr); kind != Public && kind != Private && kind != Reserved {
		return errdefs.Preconditionf("the node does not connect to %s for a pod: it is %s", addr, kind)
	}
	if err := own(addr); err != nil {
		return errdefs.Preconditionf("the node does not connect to %s for a pod: %w", addr, err)
	}
	return nil
}

// Fence is the Control of a net.Dialer that connects to no forbidden address, whatever name it came from.
func Fence(_, address string, _ syscall.RawConn) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return errdefs.Preconditionf("the node does not connect to %q for a pod: it is no IP address and port", address)
	}
	return Forbidden(to.Addr())
}

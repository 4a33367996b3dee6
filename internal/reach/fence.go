package reach

import (
	"net/netip"
	"syscall"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// Forbidden returns an error if the node must not connect to addr on behalf of a pod: addr is the node itself, its
// link, a cloud's metadata service, or an address that no single host has. Guests and their workloads have none of
// these addresses. Errors: FailedPrecondition.
func Forbidden(addr netip.Addr) error {
	if kind := KindOf(addr); kind != Public && kind != Private && kind != Reserved {
		return errdefs.Preconditionf("the node does not connect to %s for a pod: it is %s", addr, kind)
	}
	if err := own(addr); err != nil {
		return errdefs.Preconditionf("the node does not connect to %s for a pod: %w", addr, err)
	}
	return nil
}

// Fence is the Control of a net.Dialer that refuses forbidden addresses, whatever name resolved to them.
func Fence(_, address string, _ syscall.RawConn) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return errdefs.Preconditionf("the node does not connect to %q for a pod: it is not an IP address and port", address)
	}
	return Forbidden(to.Addr())
}

package bridge

import (
	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/ipam"
)

// linkKind is how an interface is connected to the bridge. Rules, addresses and ports do not depend on it.
type linkKind interface {
	// create creates the link called l.Tap and plugs it. Errors: host.ErrTaken.
	create(n *Network, lv *live, l ipam.Lease, bridge int) error
	// reuse plugs the existing link of the same interface again, or replaces it.
	reuse(n *Network, lv *live, l ipam.Lease, bridge int, old netlink.Link) error
	// finish configures what is beyond the link, after each of the two. It may be repeated.
	finish(n *Network, lv *live, l ipam.Lease) error
}

// tapKind is for a VM, whose hypervisor opens the tap.
type tapKind struct{}

const typeVeth = "veth"

func (tapKind) create(n *Network, lv *live, l ipam.Lease, bridge int) error {
	return n.makeTap(lv, l, bridge)
}

func (tapKind) reuse(n *Network, lv *live, l ipam.Lease, bridge int, old netlink.Link) error {
	if old.Type() == typeVeth {
		return errdefs.Preconditionf("its interface %d is in the network namespace of a container; detach it there first", l.Index)
	}
	return n.freshTap(lv, l, bridge)
}

func (tapKind) finish(*Network, *live, ipam.Lease) error { return nil }

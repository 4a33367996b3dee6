package bridge

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/vm"
)

var _ network.NamespaceAttacher = (*Network)(nil)

// AttachNamespace implements network.NamespaceAttacher by a pair of virtual Ethernet links. The one at the bridge has the name and the mark of
// a tap, so that all rules hold for it. It is the port of the bridge before the other one is up.
func (n *Network) AttachNamespace(ctx context.Context, id vm.ID, name string, index int, spec vm.NICSpec, netns string) (nic vm.NIC, err error) {
	room, err := host.Space{Path: nsPath(netns)}.Open()
	if err == nil {
		defer room.Close()
		err = n.space.Do(func() error {
			own, err := host.Here(room)
			if own {
				err = errdefs.Invalidf("%s is the network namespace of the bridge itself", netns)
			}
			return err
		})
	}
	if err == nil {
		nic, err = n.attachBy(ctx, id, name, index, spec, vethKind{room})
	}
	if err != nil {
		return vm.NIC{}, fmt.Errorf("attach the network namespace of %s to network %s: %w", name, n.cfg.Name, err)
	}
	return nic, nil
}

// vethKind is for a container. room is its open network namespace.
type vethKind struct{ room *os.File }

// unmarkedMAC is the hardware address of the link called name of owner until the link has its alias: the kernel takes an alias only in a
// second request, and after kill -9 in between the address shows that the link is ours. It is higher than those of other hypervisors,
// as that of plugTap.
func unmarkedMAC(owner, name string) net.HardwareAddr {
	sum := sha256.Sum256([]byte("veth\x00" + owner + "\x00" + name))
	return net.HardwareAddr{0xfe, 0xff, sum[0], sum[1], sum[2], sum[3]}
}

// unmarked reports whether l is a link of ours that a crash left without its mark.
func (n *Network) unmarked(l netlink.Link) bool {
	a := l.Attrs()
	return l.Type() == typeVeth && a.Alias == "" && strings.HasPrefix(a.Name, tapPrefix(n.cfg.owner())) &&
		slices.Equal(a.HardwareAddr, unmarkedMAC(n.cfg.owner(), a.Name))
}

// removeUnmarked removes the link called name if a crash left it without its mark. Preconditions: nothing else changes that link.
func (n *Network) removeUnmarked(name string) error {
	l, err := host.FindLink(name)
	if err != nil || l == nil || !n.unmarked(l) {
		return err
	}
	return n.turns.remove(l)
}

// removeAllUnmarked does so with all links. Preconditions: mu is held for writing.
func (n *Network) removeAllUnmarked() error {
	links, err := host.ListLinks()
	if err != nil {
		return err
	}
	links = slices.DeleteFunc(links, func(l netlink.Link) bool { return !n.unmarked(l) })
	return errors.Join(host.RemoveLinks(links)...)
}

// create implements linkKind. Preconditions: it is the turn of the caller.
func (k vethKind) create(n *Network, lv *live, l ipam.Lease, bridge int) error {
	old, err := host.FindLink(l.Tap)
	if err != nil {
		return err
	}
	if old != nil {
		if !n.unmarked(old) {
			return host.ErrTaken
		}
		if err := host.RemoveLink(old); err != nil {
			return err
		}
	}
	mac, err := net.ParseMAC(l.MAC)
	if err != nil {
		return fmt.Errorf("interface %d of %s: %w", l.Index, l.VM, err)
	}
	inner := network.Interface(l.Index)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = l.Tap, unmarkedMAC(n.cfg.owner(), l.Tap), lv.mtu
	pair := netlink.NewVeth(attrs)
	pair.PeerName, pair.PeerHardwareAddr, pair.PeerNamespace = inner, mac, netlink.NsFd(int(k.room.Fd()))
	switch err := netlink.LinkAdd(pair); {
	case errors.Is(err, unix.EEXIST):
		return errdefs.Preconditionf("the network namespace %s already has an interface %s; use a namespace of its own", k.room.Name(), inner)
	case errors.Is(err, unix.EOPNOTSUPP):
		return errdefs.Preconditionf("this kernel has no virtual Ethernet pairs; load the module with `modprobe veth`")
	case err != nil:
		return fmt.Errorf("make link %s: %w", l.Tap, err)
	}
	err = k.plug(n, lv, l, bridge)
	if err != nil {
		return errors.Join(err, host.RemoveLink(pair))
	}
	return nil
}

// plug makes the link the port of an interface that is not up.
func (k vethKind) plug(n *Network, lv *live, l ipam.Lease, bridge int) error {
	_ = host.QuietIPv6(l.Tap) // as for a tap
	return n.freshTap(lv, l, bridge)
}

// reuse implements linkKind. It keeps a link whose other end is where create puts it. Preconditions: it is the turn of the caller.
func (k vethKind) reuse(n *Network, lv *live, l ipam.Lease, bridge int, old netlink.Link) error {
	if old.Type() != typeVeth {
		return errdefs.Preconditionf("its interface %d is a tap of a VM; detach it there first", l.Index)
	}
	leads, err := k.leads(old, l.Index)
	if err != nil {
		return err
	}
	if leads {
		return k.plug(n, lv, l, bridge)
	}
	if err := host.RemoveLink(old); err != nil {
		return err
	}
	return k.create(n, lv, l, bridge)
}

// leads reports whether the other end of a link is the interface with that index in the namespace.
func (k vethKind) leads(link netlink.Link, index int) (leads bool, err error) {
	id, err := netlink.GetNetNsIdByFd(int(k.room.Fd()))
	if err != nil {
		return false, fmt.Errorf("identify network namespace %s: %w", k.room.Name(), err)
	}
	if id < 0 || id != link.Attrs().NetNsID {
		return false, nil
	}
	err = host.Inside(k.room, func() error {
		inner, err := host.FindLink(network.Interface(index))
		leads = inner != nil && inner.Attrs().Index == link.Attrs().ParentIndex
		return err
	})
	return leads, err
}

// finish implements linkKind: it configures the interface in the namespace.
func (k vethKind) finish(n *Network, lv *live, l ipam.Lease) error {
	if err := n.forgetNeighbours(lv, l); err != nil {
		return err
	}
	given := n.nic(lv, l).Guest()
	err := host.Inside(k.room, func() error { return lv.furnish(given, l.Index) })
	if err != nil {
		return fmt.Errorf("configure %s in network namespace %s: %w", network.Interface(l.Index), k.room.Name(), err)
	}
	return nil
}

// forgetNeighbours makes the host ask again who has the addresses of l: a guest that only listens tells nobody that it has them now.
func (n *Network) forgetNeighbours(lv *live, l ipam.Lease) error {
	br, err := netlink.LinkByName(n.cfg.Bridge)
	if err != nil {
		return fmt.Errorf("look for bridge %s: %w", n.cfg.Bridge, err)
	}
	for _, a := range lv.rules.addresses(l) {
		err := netlink.NeighDel(&netlink.Neigh{LinkIndex: br.Attrs().Index, IP: a.AsSlice()})
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("forget the neighbour %s of bridge %s: %w", a, n.cfg.Bridge, err)
		}
	}
	return nil
}

// furnish configures loopback and an interface in the calling thread's namespace, and brings both up. It may be repeated.
func (lv *live) furnish(given vm.NIC, index int) error {
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("bring up loopback: %w", err)
	}
	name := network.Interface(index)
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("look for it: %w", err)
	}
	mac, err := net.ParseMAC(given.MAC)
	if err == nil {
		err = errors.Join(netlink.LinkSetHardwareAddr(link, mac), netlink.LinkSetMTU(link, given.MTU))
	}
	if err != nil {
		return fmt.Errorf("set its hardware address and MTU: %w", err)
	}
	if err := host.SetSysctl("ipv4/conf/"+name+"/arp_notify", "1"); err != nil { // others on the link learn the address at once
		return err
	}
	own, err := netip.ParseAddr(given.IP)
	if err != nil {
		return fmt.Errorf("its address: %w", err)
	}
	if err := setAddress(link, netip.PrefixFrom(own, given.Prefix)); err != nil {
		return err
	}
	if err := lv.furnish6(link, mac, given); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("bring it up: %w", err)
	}
	return lv.route(link, index, given)
}

// furnish6 gives an interface its IPv6 addresses, or switches IPv6 off there. The kernel makes none itself and ignores routers: what they
// would tell is configured here.
func (lv *live) furnish6(link netlink.Link, mac net.HardwareAddr, given vm.NIC) error {
	name := link.Attrs().Name
	conf := "ipv6/conf/" + name + "/"
	if given.IPv6 == "" {
		return host.QuietIPv6(name)
	}
	for key, value := range map[string]string{"disable_ipv6": "0", "accept_ra": "0", "accept_redirects": "0", "addr_gen_mode": "1", "ndisc_notify": "1"} {
		if err := host.SetSysctl(conf+key, value); err != nil {
			return err
		}
	}
	own, err := netip.ParseAddr(given.IPv6)
	if err != nil {
		return fmt.Errorf("its IPv6 address: %w", err)
	}
	bits := own.BitLen()
	if len(given.Addresses) == 0 && lv.rules.meeting != routed {
		bits = lv.prefix6.Bits() // others of the prefix are on the link
	}
	return setAddresses6(link, linkLocal(mac), netip.PrefixFrom(own, bits))
}

// route gives the interface its routes. The default ones of the first interface come first.
func (lv *live) route(link netlink.Link, index int, given vm.NIC) error {
	at := link.Attrs().Index
	const first6 = 1024 // the kernel's default
	routes := []netlink.Route{{LinkIndex: at, Gw: net.ParseIP(given.Gateway), Priority: index}}
	if given.IPv6 != "" {
		routes = append(routes, netlink.Route{LinkIndex: at, Gw: router6.AsSlice(), Priority: first6 + index, Dst: everywhere6()})
	}
	if given.IP == "" || given.Gateway != lv.gateway.String() {
		return addRoutes(routes) // the routes of the network are not of the addresses inside
	}
	for _, r := range lv.routes {
		to := &net.IPNet{IP: r.To.Addr().AsSlice(), Mask: net.CIDRMask(r.To.Bits(), r.To.Addr().BitLen())}
		more := netlink.Route{LinkIndex: at, Dst: to, Priority: index}
		if r.Via.IsValid() {
			more.Gw = r.Via.AsSlice()
		} else {
			more.Scope = netlink.SCOPE_LINK
		}
		routes = append(routes, more)
	}
	return addRoutes(routes)
}

func everywhere6() *net.IPNet { return &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)} }

func addRoutes(routes []netlink.Route) error {
	for _, r := range routes {
		if err := netlink.RouteReplace(&r); err != nil {
			return fmt.Errorf("add route %s: %w", r, err)
		}
	}
	return nil
}

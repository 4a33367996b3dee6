package uplink

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

const (
	bondName        = "uplink"
	mark            = "cocoon:uplink"  // alias of links that we made
	linkPatience    = 15 * time.Second // for a link with a carrier
	monitorMillis   = 100              // between two looks of a bond at its links
	defaultEthernet = 1500
)

// ListLinks returns the Ethernet links of hardware, by name.
func ListLinks() ([]*capsulev1.NetworkLink, error) {
	all, err := hardware(IsHardware)
	if err != nil {
		return nil, err
	}
	var out []*capsulev1.NetworkLink
	for _, l := range all {
		a := l.Attrs()
		out = append(out, &capsulev1.NetworkLink{Name: a.Name, Mac: macOf(l).String(), Up: a.Flags&net.FlagUp != 0, Carrier: a.RawFlags&unix.IFF_LOWER_UP != 0})
	}
	return out, nil
}

// macOf returns the own hardware address of a link, which a member of a bond does not use.
func macOf(l netlink.Link) net.HardwareAddr {
	if a := l.Attrs().PermHWAddr; len(a) > 0 {
		return a
	}
	return l.Attrs().HardwareAddr
}

// IsHardware reports whether a link is a device of the machine.
func IsHardware(l netlink.Link) bool {
	_, err := os.Stat(filepath.Join("/sys/class/net", l.Attrs().Name, "device"))
	return err == nil
}

func hardware(is func(netlink.Link) bool) ([]netlink.Link, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list the links: %w", err)
	}
	links = slices.DeleteFunc(links, func(l netlink.Link) bool { return l.Attrs().EncapType != "ether" || !is(l) })
	slices.SortFunc(links, func(a, b netlink.Link) int { return strings.Compare(a.Attrs().Name, b.Attrs().Name) })
	return links, nil
}

// links are those of the machine.
type links struct {
	hardware func(netlink.Link) bool
	mtu      map[string]int  // of links before we changed it
	used     map[string]bool // names of links of hardware that we have configured
}

// prepare makes the link that gets the addresses, and takes from other links what an earlier configuration gave them.
func (k *links) prepare(ctx context.Context, c *capsulev1.NetworkConfig) (netlink.Link, error) {
	base, members, err := k.base(ctx, c)
	if err != nil {
		return nil, err
	}
	top := base.Attrs().Name
	if c.GetVlan() != 0 {
		top = fmt.Sprintf("%s.%d", bondName, c.GetVlan())
	}
	if err := k.retire(append(members, base.Attrs().Name), top); err != nil {
		return nil, err
	}
	if err := k.setMTU(base, c); err != nil {
		return nil, err
	}
	if err := netlink.LinkSetUp(base); err != nil {
		return nil, fmt.Errorf("set link %s up: %w", base.Attrs().Name, err)
	}
	if c.GetVlan() == 0 {
		return netlink.LinkByName(top)
	}
	return k.vlan(base, top, c)
}

// base returns the link without a tag, and the names of those that it is made of.
func (k *links) base(ctx context.Context, c *capsulev1.NetworkConfig) (netlink.Link, []string, error) {
	if b := c.GetBond(); b != nil {
		return k.bond(b)
	}
	ctx, stop := context.WithTimeout(ctx, linkPatience)
	defer stop()
	var late netlink.Link // it has no carrier yet, and may have one soon
	l, err := backoff.Retry(ctx, func() (netlink.Link, error) {
		l, err := k.pick(c.GetLink())
		if err != nil {
			return nil, err
		}
		if l.Attrs().MasterIndex != 0 {
			if err := netlink.LinkSetNoMaster(l); err != nil {
				return nil, fmt.Errorf("take link %s out of its bond: %w", l.Attrs().Name, err)
			}
		}
		late = l
		k.used[l.Attrs().Name] = true
		if err := netlink.LinkSetUp(l); err != nil {
			return nil, fmt.Errorf("set link %s up: %w", l.Attrs().Name, err)
		}
		if l.Attrs().RawFlags&unix.IFF_LOWER_UP == 0 {
			return nil, errdefs.Unavailablef("link %s has no carrier", l.Attrs().Name)
		}
		return l, nil
	}, backoff.WithBackOff(backoff.NewConstantBackOff(200*time.Millisecond)))
	if late != nil && l == nil && ctx.Err() != nil && c.GetLink() != "" { // static addresses may wait on it
		l, err = late, nil
	}
	return l, nil, err
}

// pick returns the link with a name or hardware address; for "" the first one, one with a carrier if there is one.
func (k *links) pick(name string) (netlink.Link, error) {
	all, err := hardware(k.hardware)
	if err != nil {
		return nil, err
	}
	if name == "" {
		for _, l := range all {
			if l.Attrs().RawFlags&unix.IFF_LOWER_UP != 0 {
				return l, nil
			}
		}
		if len(all) == 0 {
			return nil, errdefs.NotFoundf("the machine has no Ethernet link")
		}
		return all[0], nil
	}
	mac, bad := net.ParseMAC(name)
	for _, l := range all {
		if l.Attrs().Name == name || bad == nil && macOf(l).String() == mac.String() {
			return l, nil
		}
	}
	return nil, errdefs.NotFoundf("the machine has no Ethernet link %s", name)
}

// bond makes the bond, or changes its links.
func (k *links) bond(b *capsulev1.NetworkBond) (netlink.Link, []string, error) {
	mode := netlink.BOND_MODE_ACTIVE_BACKUP
	if b.GetMode() == capsulev1.BondMode_BOND_MODE_LACP {
		mode = netlink.BOND_MODE_802_3AD
	}
	var members []netlink.Link
	for _, name := range b.GetLinks() {
		l, err := k.pick(name)
		if err != nil {
			return nil, nil, err
		}
		members = append(members, l)
	}
	old, err := own(bondName)
	if err != nil {
		return nil, nil, err
	}
	if have, ok := old.(*netlink.Bond); old != nil && (!ok || have.Mode != mode) {
		if err := netlink.LinkDel(old); err != nil {
			return nil, nil, fmt.Errorf("remove the old bond: %w", err)
		}
		old = nil
	}
	if old == nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = bondName
		want := netlink.NewLinkBond(attrs)
		want.Mode, want.Miimon = mode, monitorMillis
		if old, err = made(want); err != nil {
			return nil, nil, err
		}
	}
	var names []string
	for _, l := range members {
		a := l.Attrs()
		names = append(names, a.Name)
		k.used[a.Name] = true
		if a.MasterIndex == old.Attrs().Index {
			continue
		}
		if err := errors.Join(flush(l, nil, true), netlink.LinkSetDown(l), netlink.LinkSetMaster(l, old), netlink.LinkSetUp(l)); err != nil {
			return nil, nil, fmt.Errorf("put link %s into the bond: %w", a.Name, err)
		}
	}
	return old, names, nil
}

// vlan makes the link called name for the tag of c.
func (k *links) vlan(base netlink.Link, name string, c *capsulev1.NetworkConfig) (netlink.Link, error) {
	// What is untagged there is not for us.
	if err := errors.Join(flush(base, nil, true), setIPv6(base.Attrs().Name, capsulev1.IPv6Method_IPV6_METHOD_OFF)); err != nil {
		return nil, err
	}
	old, err := own(name)
	if err != nil {
		return nil, err
	}
	if old != nil && old.Attrs().ParentIndex != base.Attrs().Index {
		if err := netlink.LinkDel(old); err != nil {
			return nil, fmt.Errorf("remove link %s: %w", name, err)
		}
		old = nil
	}
	if old == nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.ParentIndex = name, base.Attrs().Index
		if old, err = made(&netlink.Vlan{LinkAttrs: attrs, VlanId: int(c.GetVlan()), VlanProtocol: netlink.VLAN_PROTOCOL_8021Q}); err != nil {
			return nil, err
		}
	}
	if err := netlink.LinkSetMTU(old, int(cmp.Or(c.GetMtu(), uint32(base.Attrs().MTU)))); err != nil {
		return nil, fmt.Errorf("set the MTU of link %s: %w", name, err)
	}
	if err := netlink.LinkSetUp(old); err != nil {
		return nil, fmt.Errorf("set link %s up: %w", name, err)
	}
	return netlink.LinkByName(name)
}

// own returns a link that we made; nil if there is none. Errors: FailedPrecondition if it is another's.
func own(name string) (netlink.Link, error) {
	l, err := netlink.LinkByName(name)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for link %s: %w", name, err)
	}
	if l.Attrs().Alias != mark {
		return nil, errdefs.Preconditionf("link %s is none of ours; remove it", name)
	}
	return l, nil
}

// made makes a link with our mark.
func made(l netlink.Link) (netlink.Link, error) {
	name := l.Attrs().Name
	if err := netlink.LinkAdd(l); err != nil {
		return nil, fmt.Errorf("make link %s: %w", name, err)
	}
	l, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetAlias(l, mark)
	}
	if err != nil {
		return nil, fmt.Errorf("make link %s: %w", name, err)
	}
	return l, nil
}

// retire removes links of ours that are not needed any more, and takes links of hardware out of use. keep are links of hardware and the
// bond, top is the one with the addresses.
func (k *links) retire(keep []string, top string) error {
	all, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list the links: %w", err)
	}
	var errs []error
	for _, l := range all { // a tag before its bond
		if name := l.Attrs().Name; l.Attrs().Alias == mark && l.Type() == "vlan" && name != top {
			errs = append(errs, netlink.LinkDel(l))
		}
	}
	for _, l := range all {
		if l.Attrs().Alias == mark && l.Type() == "bond" && !slices.Contains(keep, l.Attrs().Name) {
			errs = append(errs, netlink.LinkDel(l))
		}
	}
	for _, l := range all {
		name := l.Attrs().Name
		if !k.used[name] || slices.Contains(keep, name) {
			continue
		}
		if l.Attrs().MasterIndex != 0 {
			errs = append(errs, netlink.LinkSetNoMaster(l))
		}
		errs = append(errs, flush(l, nil, true), netlink.LinkSetDown(l))
		delete(k.used, name)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("take back the old configuration: %w", err)
	}
	return nil
}

// setMTU sets the MTU that is configured, or the one that the link had.
func (k *links) setMTU(l netlink.Link, c *capsulev1.NetworkConfig) error {
	name := l.Attrs().Name
	if k.mtu[name] == 0 {
		k.mtu[name] = cmp.Or(l.Attrs().MTU, defaultEthernet)
	}
	want := cmp.Or(int(c.GetMtu()), k.mtu[name])
	if want == l.Attrs().MTU {
		return nil
	}
	if err := netlink.LinkSetMTU(l, want); err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "link %s takes no MTU of %d: %w", name, want, err)
	}
	return nil
}

// flush removes the IPv4 addresses of a link, and those of IPv6 if six, except link-local ones of IPv6 and those to keep.
func flush(l netlink.Link, keep []netip.Prefix, six bool) error {
	family := netlink.FAMILY_V4
	if six {
		family = netlink.FAMILY_ALL
	}
	all, err := netlink.AddrList(l, family)
	if err != nil {
		return fmt.Errorf("list the addresses of %s: %w", l.Attrs().Name, err)
	}
	var errs []error
	for _, a := range all {
		p, ok := prefix(a.IPNet)
		if !ok || p.Addr().Is6() && p.Addr().IsLinkLocalUnicast() || slices.Contains(keep, p) {
			continue
		}
		errs = append(errs, netlink.AddrDel(l, &a))
	}
	return errors.Join(errs...)
}

func prefix(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP)
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(a.Unmap(), ones), ok
}

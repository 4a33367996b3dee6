package cni

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/host"
)

// alias is the mark of a tap of this instance.
func (n *Network) alias(r record) string {
	return fmt.Sprintf("cocoon:%s/%s tap vm=%s nic=%d", n.cfg.Instance, n.cfg.Name, r.ID, r.Index)
}

// join creates the tap of an attachment, if it does not exist, and redirects all incoming frames of each link out of the other
// one. The kernel's own stack in the namespace sees none of them. It may be repeated.
func (n *Network) join(r record) error {
	return n.space(r).Do(func() error {
		name := n.tap(r)
		eth, err := netlink.LinkByName(r.link())
		if err != nil {
			return fmt.Errorf("look for link %s: %w", r.link(), err)
		}
		// The guest uses this MAC, so the kernel must not use it too.
		if err := host.QuietIPv6(r.link()); err != nil {
			return err
		}
		wire := func() error {
			tap, err := netlink.LinkByName(name)
			if err != nil {
				return fmt.Errorf("look for tap %s: %w", name, err)
			}
			if err := host.QuietIPv6(name); err != nil {
				return err
			}
			return wire(eth, tap, n.alias(r), r.NIC.MTU, plan(n.closed, r.NIC))
		}
		err = host.MakeTap(name, wire)
		if !errors.Is(err, host.ErrTaken) {
			return err
		}
		tap, err := host.FindLink(name)
		if err != nil {
			return err
		}
		if tap == nil || tap.Attrs().Alias != n.alias(r) {
			return errdefs.Existsf("link %s in %s does not belong to Cocoon; look at `ip -n %s link`", name, n.space(r).Path, n.space(r).Path)
		}
		return wire()
	})
}

func wire(eth, tap netlink.Link, alias string, mtu int, closed []match) error {
	name := tap.Attrs().Name
	if err := netlink.LinkSetAlias(tap, alias); err != nil {
		return fmt.Errorf("mark tap %s: %w", name, err)
	}
	if err := netlink.LinkSetMTU(tap, mtu); err != nil {
		return fmt.Errorf("set MTU %d of tap %s: %w", mtu, name, err)
	}
	if err := errors.Join(netlink.LinkSetUp(tap), netlink.LinkSetUp(eth)); err != nil {
		return fmt.Errorf("bring up tap %s and its link: %w", name, err)
	}
	return errors.Join(redirect(eth, tap, nil), redirect(tap, eth, closed))
}

var ingress = netlink.MakeHandle(0xffff, 0)

// redirect sends every frame that comes in at from out of to, except frames to closed networks.
func redirect(from, to netlink.Link, closed []match) error {
	qdisc := &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: from.Attrs().Index, Handle: ingress, Parent: netlink.HANDLE_INGRESS}}
	if err := netlink.QdiscAdd(qdisc); err != nil && !errors.Is(err, unix.EEXIST) {
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
			return errdefs.New(errdefs.FailedPrecondition, "this kernel cannot redirect frames: %w; load the modules with `modprobe -a sch_ingress cls_u32 act_mirred`", err)
		}
		return fmt.Errorf("add ingress to %s: %w", from.Attrs().Name, err)
	}
	filter := &netlink.U32{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: from.Attrs().Index, Parent: ingress, Priority: priorityAll, Protocol: unix.ETH_P_ALL,
		},
		Actions: []netlink.Action{netlink.NewMirredAction(to.Attrs().Index)},
	}
	old, err := netlink.FilterList(from, ingress)
	if err != nil {
		return fmt.Errorf("list the filters of %s: %w", from.Attrs().Name, err)
	}
	for _, f := range old { // filters of a removed tap, or of an earlier call
		if err := netlink.FilterDel(f); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("remove a filter from %s: %w", from.Attrs().Name, err)
		}
	}
	if err := fence(from, to, closed); err != nil {
		return err
	}
	if err := netlink.FilterAdd(filter); err != nil {
		return fmt.Errorf("redirect from %s to %s: %w", from.Attrs().Name, to.Attrs().Name, err)
	}
	return nil
}

// part removes the tap of an attachment and reports whether there was one. This also removes the redirection. At the plugins'
// link only a filter that drops is left, and join replaces it.
func (n *Network) part(r record) (there bool, err error) {
	if !n.space(r).Exists() {
		return false, nil
	}
	err = n.space(r).Do(func() error {
		tap, err := host.FindLink(n.tap(r))
		if err != nil || tap == nil || tap.Attrs().Alias != n.alias(r) {
			return err
		}
		there = true
		return host.RemoveLink(tap)
	})
	if err != nil {
		return there, fmt.Errorf("remove tap %s: %w", n.tap(r), err)
	}
	return there, nil
}

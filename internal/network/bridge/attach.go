package bridge

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Attach implements network.Network. It does not wait for the lease file. If a crash comes before Run has written it, the tap's
// alias holds the lease; without the tap, the same name gets the same address again.
func (n *Network) Attach(ctx context.Context, id vm.ID, name string, index int, spec vm.NICSpec) (nic vm.NIC, err error) {
	if nic, err = n.attachBy(ctx, id, name, index, spec, tapKind{}); err != nil {
		return vm.NIC{}, fmt.Errorf("attach vm %s to network %s: %w", name, n.cfg.Name, err)
	}
	return nic, nil
}

// attachBy attaches an interface whose link is of kind by.
func (n *Network) attachBy(ctx context.Context, id vm.ID, name string, index int, spec vm.NICSpec, by linkKind) (nic vm.NIC, err error) {
	err = n.single(ctx, tapName(n.cfg.owner(), id, index, 0), func(lv *live) (err error) {
		if lv == nil {
			return n.notUp()
		}
		nic, err = n.attach(ctx, lv, ipam.Request{ID: id, Name: name, Index: index, MAC: spec.MAC, Policed: spec.Policed}, spec, by)
		return err
	})
	if err == nil {
		n.markDirty()
	}
	return nic, err
}

func (n *Network) attach(ctx context.Context, lv *live, r ipam.Request, spec vm.NICSpec, by linkKind) (nic vm.NIC, err error) {
	open := spec.Ports
	if err := n.masquerades(lv, spec.Masquerade); err != nil {
		return vm.NIC{}, err
	}
	if len(open) > 0 && n.cfg.Adopt {
		return vm.NIC{}, errdefs.Preconditionf("ports of the host cannot lead to guests of bridge %s, whose owner routes for it; connect to the guest's own address", n.cfg.Bridge)
	}
	var back undo.Stack
	defer func() {
		if err != nil {
			err = errors.Join(err, back.Run(ctx))
		}
	}()
	l, fresh, err := lv.pool.Reserve(r, time.Now())
	if err != nil {
		return vm.NIC{}, err
	}
	if fresh {
		back.Push(func(context.Context) error { lv.pool.Cancel(l); return nil })
	}
	if err := n.ensureLink(lv, &l, spec.Masquerade, by, &back); err != nil {
		return vm.NIC{}, err
	}
	if err := by.finish(n, lv, l); err != nil {
		return vm.NIC{}, err
	}
	if len(open) > 0 {
		if err := n.ports.forward(ctx, l.IP, open); err != nil {
			return vm.NIC{}, err
		}
	}
	lv.pool.Attach(l.ID, l.Index, l.Tap)
	back.Release()
	return n.nic(lv, l), nil
}

// masquerades returns why the network cannot give a guest another address than that of its interface, nil if it can or need not. It
// needs what policies need: all packets pass the host's rules, and senders are checked.
func (n *Network) masquerades(lv *live, m vm.Masquerade) error {
	if !m.Asked() {
		return nil
	}
	if err := lv.rules.polices(lv.gate != nil); err != nil {
		return errdefs.Preconditionf("its guest cannot be masqueraded: %w; ask for the address of the interface itself, or for another network", err)
	}
	return nil
}

// nic returns the NIC for a lease.
func (n *Network) nic(lv *live, l ipam.Lease) vm.NIC {
	out := vm.NIC{
		Network: n.cfg.Name, Tap: l.Tap, NetNS: n.space.Path, MAC: l.MAC,
		IP: l.IP.String(), Prefix: lv.prefix.Bits(), Gateway: lv.gateway.String(), MTU: lv.mtu, DHCP: true,
	}
	if a := address6(lv.prefix6, l.MAC); a.IsValid() {
		out.IPv6 = a.String()
		if n.cfg.IPv6Mode == IPv6Stateful {
			out.Addresses = []string{netip.PrefixFrom(a, a.BitLen()).String()} // for guests without a DHCPv6 client
		}
	}
	for _, d := range lv.dns {
		out.DNS = append(out.DNS, d.String())
	}
	if g, ok := n.inside.at(l.Tap); ok {
		if out.Inside = g.inside; out.IPv6 == "" {
			out.Inside.IPv6, out.Inside.Prefix6, out.Inside.Gateway6 = "", 0, ""
		}
	}
	return out
}

// ensureLink creates the link of l, or finds it, and sets its name in l.
func (n *Network) ensureLink(lv *live, l *ipam.Lease, m vm.Masquerade, by linkKind, back *undo.Stack) error {
	br, err := netlink.LinkByName(n.cfg.Bridge)
	if err != nil {
		return errdefs.New(errdefs.FailedPrecondition, "bridge %s is missing: %w; restart the daemon to create it again", n.cfg.Bridge, err)
	}
	for salt := range attempts {
		name := tapName(n.cfg.owner(), l.ID, l.Index, salt)
		l.Tap = name
		err := n.openLink(lv, *l, m, by, br.Attrs().Index, back)
		if !errors.Is(err, host.ErrTaken) {
			return err
		}
	}
	return errdefs.Existsf("all %d link names for an interface of vm %s are taken by others; look at `ip link`", attempts, l.VM)
}

// attempts is the number of names of a link. Each has 50 bits, so all are taken only by intent.
const attempts = 8

// openLink creates the link called l.Tap, or uses the existing one if its mark names the same interface.
func (n *Network) openLink(lv *live, l ipam.Lease, m vm.Masquerade, by linkKind, bridge int, back *undo.Stack) error {
	if err := n.translate(lv, l, m); err != nil {
		return err
	}
	if lv.gate != nil {
		if err := lv.gate.admit(l); err != nil {
			return errors.Join(err, n.inside.dismiss(l.Tap))
		}
	}
	err := n.turns.make(func() error { return by.create(n, lv, l, bridge) })
	if err == nil {
		back.Push(func(context.Context) error { return n.detach(lv, l) })
		return nil
	}
	if errors.Is(err, host.ErrTaken) {
		if old, ferr := n.findTap(l.Tap); ferr != nil {
			err = ferr
		} else if old != nil && old.lease.ID == l.ID && old.lease.Index == l.Index {
			return n.turns.make(func() error { return by.reuse(n, lv, l, bridge, old.link) })
		}
	}
	if lv.gate != nil {
		err = errors.Join(err, lv.gate.dismiss(l))
	}
	return errors.Join(err, n.inside.dismiss(l.Tap))
}

// translate gives the guest of l the address inside that m asks for, or none.
func (n *Network) translate(lv *live, l ipam.Lease, m vm.Masquerade) error {
	if !m.Asked() {
		return n.inside.dismiss(l.Tap)
	}
	g, err := lv.rules.insiderOf(l, m)
	if err != nil {
		return err
	}
	return n.inside.admit(lv.rules, n.mac, g)
}

// findTap returns our tap called name, nil if there is none.
func (n *Network) findTap(name string) (*tap, error) {
	l, err := host.FindLink(name)
	if err != nil || l == nil {
		return nil, err
	}
	lease, ok := parseTapAlias(n.cfg.owner(), l.Attrs().Alias)
	if !ok {
		return nil, nil
	}
	lease.Tap = name
	return &tap{l, lease}, nil
}

// detach removes the tap of l if it is ours, and its entries in the sets of allowed senders. If lv is nil, there is only the
// tap to remove.
func (n *Network) detach(lv *live, l ipam.Lease) error {
	t, err := n.findTap(l.Tap)
	if err != nil {
		return err
	}
	if t != nil {
		if err := n.turns.remove(t.link); err != nil {
			return err
		}
		l.MAC, l.IP = t.lease.MAC, t.lease.IP
	} else if err := n.removeUnmarked(l.Tap); err != nil {
		return err
	}
	if lv == nil {
		return nil
	}
	lv.pool.Detach(l.MAC, l.Tap)
	gone, err := n.dismiss(lv, l)
	return errors.Join(err, n.inside.dismiss(l.Tap), n.flows.forget(gone...))
}

// dismiss removes what the host has for the guest of l, whose tap is gone. It returns the addresses whose connections the caller
// makes the kernel forget.
func (n *Network) dismiss(lv *live, l ipam.Lease) (gone []netip.Addr, err error) {
	if !l.IP.IsValid() || n.passedOn(lv, l) {
		return nil, nil
	}
	err = n.ports.close(l.IP)
	if lv.gate != nil {
		err = errors.Join(err, lv.gate.dismiss(l))
	}
	return lv.rules.addresses(l), err
}

// passedOn reports whether another interface has the address or the MAC of l, because l was detached and released before. The
// rules and ports that the address has now are those of that interface.
func (n *Network) passedOn(lv *live, l ipam.Lease) bool {
	other := func(held ipam.Lease, ok bool) bool {
		for salt := range attempts {
			if !ok || l.Tap == tapName(n.cfg.owner(), held.ID, held.Index, salt) {
				return false
			}
		}
		return true
	}
	return other(lv.pool.ByIP(l.IP)) || other(lv.pool.ByMAC(l.MAC))
}

// Detach implements network.Network. It also works on a network that is not set up: it removes what exists.
func (n *Network) Detach(ctx context.Context, nic vm.NIC) error {
	err := n.single(ctx, nic.Tap, func(lv *live) error { return n.detach(lv, leaseOf(nic)) })
	if err != nil && !n.spaceGone(err) {
		return fmt.Errorf("detach tap %s from network %s: %w", nic.Tap, n.cfg.Name, err)
	}
	return nil
}

// Release implements network.Network. It returns when the lease file durably contains the release, so that a crash leaks no
// address; concurrent releases share one write. It also works on a network that is not set up.
func (n *Network) Release(ctx context.Context, nic vm.NIC) error {
	err := ctx.Err()
	if err == nil {
		err = n.release(nic)
	}
	if err != nil {
		return fmt.Errorf("release %s of network %s: %w", nic.IP, n.cfg.Name, err)
	}
	return nil
}

func (n *Network) release(nic vm.NIC) error {
	defer n.mu.Read()()
	if n.live == nil {
		return n.file.Release(nic.MAC, nic.Tap)
	}
	n.live.pool.Release(nic.MAC, nic.Tap)
	return n.file.Sync(n.live.pool)
}

// Bridge returns the name of the bridge's link.
func (n *Network) Bridge() string { return n.cfg.Bridge }

// Lease gives an address to an interface that another program put on the bridge. DHCP tells the interface that address. It
// returns a NIC without tap. Idempotent per (id, index); durable when it returns. Errors: ResourceExhausted, FailedPrecondition
// before Setup.
func (n *Network) Lease(ctx context.Context, id vm.ID, name string, index int, mac string) (vm.NIC, error) {
	lv, err := n.up()
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return vm.NIC{}, fmt.Errorf("lease an address of network %s: %w", n.cfg.Name, err)
	}
	l, _, err := lv.pool.Reserve(ipam.Request{ID: id, Name: name, Index: index, MAC: mac}, time.Now())
	if err != nil {
		return vm.NIC{}, fmt.Errorf("lease an address of network %s: %w", n.cfg.Name, err)
	}
	lv.pool.Attach(id, index, "")
	if err := n.file.Sync(lv.pool); err != nil {
		return vm.NIC{}, err
	}
	return n.nic(lv, l), nil
}

// Unlease is the inverse of Lease. Idempotent; it also works without Setup.
func (n *Network) Unlease(ctx context.Context, _ vm.ID, _ int, mac string) error {
	if err := n.single(ctx, mac, func(lv *live) error {
		if lv == nil {
			return nil
		}
		l, ok := lv.pool.ByMAC(mac)
		if !ok || l.Tap != "" {
			return nil
		}
		return n.flows.forget(lv.rules.addresses(l)...)
	}); err != nil && !n.spaceGone(err) {
		return fmt.Errorf("release an address of network %s: %w", n.cfg.Name, err)
	}
	return n.Release(ctx, vm.NIC{MAC: mac})
}

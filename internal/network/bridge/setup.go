package bridge

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/undo"
	"cocoonstack.io/cocoon/internal/vm"
)

// Setup implements network.Network. It inspects the host, decides, and then makes the changes; it rolls back a partial failure.
func (n *Network) Setup(ctx context.Context) error {
	return n.whole(ctx, func() error {
		lv, st, taps, err := n.plan()
		if err != nil {
			return fmt.Errorf("set up network %s: %w", n.cfg.Name, err)
		}
		if err := n.file.Sweep(); err != nil {
			return fmt.Errorf("set up network %s: %w", n.cfg.Name, err)
		}
		if lv.damage != nil {
			if err := n.setAside(lv.damage); err != nil {
				return fmt.Errorf("set up network %s: %w", n.cfg.Name, err)
			}
		}
		if err := n.build(ctx, lv, st, taps); err != nil {
			return fmt.Errorf("set up network %s: %w", n.cfg.Name, err)
		}
		if old := n.live; old != nil {
			err = old.gate.close()
		}
		n.live = lv
		return err
	})
}

// tap is an existing link of ours, of any kind.
type tap struct {
	link  netlink.Link
	lease ipam.Lease
}

// plan checks whether the network is possible and decides its settings. It changes nothing.
func (n *Network) plan() (*live, state, []tap, error) {
	fail := func(err error) (*live, state, []tap, error) { return nil, state{}, nil, err }
	if err := n.checkHost(); err != nil {
		return fail(err)
	}
	st, err := n.loadState()
	if err != nil {
		return fail(err)
	}
	leases, damage, err := usable(n.file.Read())
	if err != nil {
		return fail(err)
	}
	taps, err := n.taps()
	if err != nil {
		return fail(err)
	}
	own, err := n.place(st, len(leases)+len(taps) > 0 || damage != nil)
	if err != nil {
		return fail(err)
	}
	prefix := own.prefix
	if own.prefix6, err = n.cfg.prefix6(); err == nil {
		err = n.checkIPv6(own.prefix6)
	}
	if err != nil {
		return fail(err)
	}
	lv, err := n.settle(own, leases, taps)
	if err != nil {
		return fail(err)
	}
	if lv.damage == nil {
		lv.damage = damage
	}
	st.Subnet = prefix
	if err := n.noteForward(&st, own.prefix6.IsValid()); err != nil {
		return fail(err)
	}
	return lv, st, taps, nil
}

// place holds the network's basic settings: the subnet, our address and MAC in it, and the MTU.
type place struct {
	prefix  netip.Prefix
	gateway netip.Addr
	prefix6 netip.Prefix
	mac     net.HardwareAddr
	mtu     int
}

// place decides the basic settings, or reads them from the bridge that it adopts.
func (n *Network) place(st state, keep bool) (place, error) {
	if n.cfg.Adopt {
		return adopted(n.cfg.Bridge, n.cfg.MTU)
	}
	uses, err := hostUses(n.cfg.Bridge)
	if err != nil {
		return place{}, err
	}
	prefix, err := chooseSubnet(n.cfg, st.Subnet, keep, uses)
	if err != nil {
		return place{}, err
	}
	gateway, err := n.cfg.gatewayIn(prefix)
	mtu := n.cfg.MTU
	if mtu == 0 {
		mtu = defaultMTU()
	}
	return place{prefix: prefix, gateway: gateway, mac: n.mac, mtu: mtu}, err
}

// checkHost looks for what is missing or in conflict.
func (n *Network) checkHost() error {
	if err := host.CheckCaps(); err != nil {
		return err
	}
	tun, err := host.OpenTun()
	if err != nil {
		return err
	}
	tun.Close()
	if n.cfg.NAT || !n.cfg.Unguarded {
		if err := probeNFT(); err != nil {
			return err
		}
	}
	br, err := host.FindLink(n.cfg.Bridge)
	if err != nil {
		return err
	}
	if br != nil && !n.cfg.Adopt && !n.ownBridge(br) {
		return errdefs.Preconditionf("link %s exists, but does not belong to Cocoon (%s, alias %q); configure another bridge name, or remove it with `ip link del %s`",
			n.cfg.Bridge, br.Type(), br.Attrs().Alias, n.cfg.Bridge)
	}
	return nil
}

// settle combines all decisions with the leases of the file and those that only taps hold.
func (n *Network) settle(at place, leases []ipam.Lease, taps []tap) (*live, error) {
	prefix, gateway := at.prefix, at.gateway
	lv := &live{prefix: prefix, gateway: gateway, prefix6: at.prefix6, dns: resolvers(n.cfg), mtu: at.mtu}
	var err error
	if lv.routes, err = n.cfg.routes(); err != nil {
		return nil, err
	}
	closed, err := network.NewClosed(n.cfg.Closed, n.cfg.Open)
	if err != nil {
		return nil, err
	}
	services, err := n.cfg.services()
	if err != nil {
		return nil, err
	}
	owner := n.cfg.owner()
	lv.rules = rules{
		table: n.cfg.table(), bridge: n.cfg.Bridge, tapPrefix: tapPrefix(owner),
		prefix: prefix, gateway: gateway, prefix6: at.prefix6, stateful6: n.cfg.IPv6Mode == IPv6Stateful, dns: lv.dns, closed: closed,
		nat: n.cfg.NAT, natLink: n.cfg.MasqueradeLink, guard: !n.cfg.Unguarded, adopt: n.cfg.Adopt,
		meeting: n.cfg.meeting(), services: services, peers: n.cfg.Peers,
	}
	if n.cfg.Domain != "" {
		lv.dns = []netip.Addr{gateway}
		lv.rules.dns = lv.dns
	}
	if old := n.live; old != nil && old.prefix == prefix && old.gateway == gateway {
		lv.pool = old.pool // Run uses this pool
	} else {
		lv.pool, err = ipam.New(ipam.Config{Salt: owner, Prefix: prefix, Gateway: gateway, ReservedMAC: at.mac, TTL: leaseTime})
		if err != nil {
			return nil, err
		}
		_, lv.damage, err = usable(nil, lv.pool.Load(leases, time.Now()))
		if err == nil && lv.damage != nil {
			err = lv.pool.Load(nil, time.Now())
		}
		if err != nil {
			return nil, err
		}
	}
	for _, t := range taps {
		if err := lv.pool.Adopt(t.lease); err != nil {
			// Such a tap is left for Sweep, because the engine knows whether a VM has it.
			n.log.Warn("tap without lease", "network", n.cfg.Name, "tap", t.lease.Tap, "vm", t.lease.ID, "err", err)
		}
	}
	lv.pool.Refresh(time.Now())
	return lv, nil
}

// noteForward records in st what Teardown must restore, if build is going to switch forwarding on.
func (n *Network) noteForward(st *state, ipv6 bool) error {
	here, err := host.Identity()
	if err != nil {
		return err
	}
	if st.Space != here {
		st.Space, st.Forward, st.Forward6 = here, "", "" // a reboot or a new namespace has removed our change
	}
	for _, f := range st.forwarding(ipv6) {
		value, err := host.Sysctl(f.key)
		if err != nil {
			return fmt.Errorf("read sysctl net/%s: %w", f.key, err)
		}
		if value != "1" && *f.before == "" {
			*f.before = value
		}
	}
	return nil
}

// build carries out the plan. The rules come first, so that no packet ever passes an unguarded bridge.
func (n *Network) build(ctx context.Context, lv *live, st state, taps []tap) (err error) {
	var back undo.Stack
	defer func() {
		if err != nil {
			err = errors.Join(err, back.Run(ctx))
		}
	}()
	if err := n.saveState(st); err != nil {
		return err
	}
	leases := make([]ipam.Lease, 0, len(taps))
	for _, t := range taps {
		leases = append(leases, t.lease)
	}
	before, err := host.FindLink(n.cfg.Bridge)
	if err != nil {
		return err
	}
	if before == nil || n.cfg.Adopt && len(taps) == 0 && n.live == nil { // otherwise VMs of an earlier run need the rules
		back.Push(func(context.Context) error { return lv.rules.remove() })
	}
	checked, err := lv.rules.apply(leases)
	if err != nil {
		return err
	}
	if checked {
		lv.gate = &gate{rules: lv.rules, police: n.police, socket: socket{space: n.space}}
	}
	if before == nil {
		back.Push(func(context.Context) error { return n.police.teardown() })
	}
	if n.live == nil {
		if err := n.police.saved.load(); err != nil {
			n.log.Warn("saved policies not usable, guests of other virtual nodes are closed once the first node sets its policies, until theirs does", "network", n.cfg.Name, "err", err)
		}
	}
	unpoliced := lv.rules.polices(checked)
	if unpoliced == nil {
		unpoliced = probeFlows()
	}
	if err := n.police.setup(lv.rules, lv.pool.Attached(), leases, unpoliced); err != nil {
		return err
	}
	if err := n.inside.load(leases); err != nil {
		return err
	}
	if lv.rules.guard && !checked {
		n.log.Warn("source addresses of guests are not checked, this kernel has no nftables for bridges", "network", n.cfg.Name)
	}
	created, err := n.ensureBridge(lv)
	if created {
		back.Push(func(context.Context) error { return n.removeBridge() })
	}
	if err != nil {
		return err
	}
	for _, f := range st.forwarding(lv.prefix6.IsValid()) {
		if err := host.SetSysctl(f.key, "1"); err != nil {
			return err
		}
		if created && *f.before != "" {
			back.Push(func(context.Context) error { return host.SetSysctl(f.key, *f.before) })
		}
	}
	if err := n.removeAllUnmarked(); err != nil {
		return err
	}
	br, err := netlink.LinkByName(n.cfg.Bridge)
	if err != nil {
		return fmt.Errorf("look for bridge %s: %w", n.cfg.Bridge, err)
	}
	for _, t := range taps {
		if err := n.keptTap(lv, t.lease, br.Attrs().Index, unpoliced == nil); err != nil {
			return err
		}
	}
	if err := n.ports.load(func(a netip.Addr) bool {
		return slices.ContainsFunc(leases, func(l ipam.Lease) bool { return l.IP == a })
	}); err != nil {
		return err
	}
	if n.live == nil && !n.cfg.Adopt {
		if err := n.flows.which(lv.vacant(leases)); err != nil {
			return err
		}
	}
	if err := n.file.Sync(lv.pool); err != nil {
		return err
	}
	back.Release()
	return nil
}

// vacant returns what says whether a connection has an address of the network that nobody uses. An earlier run of the daemon may
// have ended before it made the kernel forget the connections of a guest. guests are those with an existing tap.
func (lv *live) vacant(guests []ipam.Lease) func(flow) bool {
	used := map[netip.Addr]bool{lv.gateway: true, gateway6(lv.prefix6): true}
	all, _ := lv.pool.Snapshot()
	for _, l := range all {
		if l.Tap == "" { // an interface of another program
			guests = append(guests, l)
		}
	}
	for _, l := range guests {
		for _, a := range lv.rules.addresses(l) {
			used[a] = true
		}
	}
	return func(f flow) bool {
		return f.any(func(a netip.Addr) bool {
			return (lv.prefix.Contains(a) || lv.prefix6.Contains(a)) && !used[a]
		})
	}
}

// taps lists the links of interfaces that have our mark.
func (n *Network) taps() ([]tap, error) {
	links, err := host.ListLinks()
	if err != nil {
		return nil, err
	}
	var out []tap
	for _, l := range links {
		if lease, ok := parseTapAlias(n.cfg.owner(), l.Attrs().Alias); ok {
			lease.Tap = l.Attrs().Name
			out = append(out, tap{l, lease})
		}
	}
	return out, nil
}

func (n *Network) removeBridge() error {
	br, err := host.FindLink(n.cfg.Bridge)
	if err != nil || br == nil || n.cfg.Adopt || !n.ownBridge(br) {
		return err
	}
	return host.RemoveLink(br)
}

// Sweep implements network.Network.
func (n *Network) Sweep(ctx context.Context, keep []string, known func(vm.ID) bool) (removed []string, strays []network.Stray, err error) {
	err = n.whole(ctx, func() error {
		taps, err := n.taps()
		if err != nil {
			return err
		}
		taps = slices.DeleteFunc(taps, func(t tap) bool {
			if slices.Contains(keep, t.lease.Tap) {
				return true
			}
			if known(t.lease.ID) {
				return false
			}
			strays = append(strays, network.Stray{ID: t.lease.ID, NIC: n.stray(t.lease)})
			return true
		})
		removed, err = n.unplug(taps)
		return err
	})
	if err != nil {
		return removed, strays, fmt.Errorf("sweep network %s: %w", n.cfg.Name, err)
	}
	slices.Sort(removed)
	return removed, strays, nil
}

// stray returns the NIC that a tap describes. It needs no Setup.
func (n *Network) stray(l ipam.Lease) vm.NIC {
	if n.live != nil {
		return n.nic(n.live, l)
	}
	return vm.NIC{Network: n.cfg.Name, Tap: l.Tap, NetNS: n.space.Path, MAC: l.MAC, IP: l.IP.String()}
}

// unplug removes taps and their entries in the sets of allowed senders. It returns the names of the removed taps.
// Preconditions: mu is held for writing.
func (n *Network) unplug(taps []tap) (removed []string, err error) {
	var links []netlink.Link
	for _, t := range taps {
		links = append(links, t.link)
	}
	errs := host.RemoveLinks(links)
	var gone []netip.Addr
	for i, t := range taps {
		if errs[i] == nil && n.live != nil {
			n.live.pool.Detach(t.lease.MAC, t.lease.Tap)
			var addrs []netip.Addr
			addrs, errs[i] = n.dismiss(n.live, t.lease)
			gone = append(gone, addrs...)
		}
		if errs[i] == nil {
			removed = append(removed, t.lease.Tap)
		}
	}
	return removed, errors.Join(append(errs, n.inside.dismiss(removed...), n.flows.forget(gone...))...)
}

// Teardown implements network.Network. It needs no Setup in this process, and it is no error if nothing exists.
func (n *Network) Teardown(ctx context.Context) error {
	err := n.whole(ctx, n.teardown)
	if err != nil && !n.spaceGone(err) {
		return fmt.Errorf("tear down network %s: %w", n.cfg.Name, err)
	}
	return nil
}

func (n *Network) teardown() error {
	var errs []error
	if n.live != nil {
		errs = append(errs, n.file.Sync(n.live.pool))
	}
	taps, err := n.taps()
	errs = append(errs, err, n.removeAllUnmarked())
	_, err = n.unplug(taps)
	errs = append(errs, err)
	if n.live != nil {
		errs = append(errs, n.live.gate.close())
	}
	errs = append(errs, n.removeBridge(), n.police.teardown(), n.inside.teardown(), rules{table: n.cfg.table()}.remove(), n.ports.remove(), n.restoreForward())
	n.live = nil
	return errors.Join(errs...)
}

// restoreForward restores forwarding to what Setup found, unless another network of ours in the namespace needs it.
func (n *Network) restoreForward() error {
	st, err := n.loadState()
	if err != nil || st.Forward == "" && st.Forward6 == "" {
		return err
	}
	here, err := host.Identity()
	if err != nil {
		return err
	}
	links, err := host.ListLinks()
	if err != nil {
		return err
	}
	shared := slices.ContainsFunc(links, func(l netlink.Link) bool { return strings.HasPrefix(l.Attrs().Alias, aliasMark) })
	if st.Space == here && !shared {
		for _, f := range st.forwarding(true) {
			if *f.before == "" {
				continue
			}
			if err := host.SetSysctl(f.key, *f.before); err != nil {
				return err
			}
		}
	}
	st.Forward, st.Forward6, st.Space = "", "", ""
	return n.saveState(st)
}

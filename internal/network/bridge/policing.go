package bridge

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/vm"
)

// policing enforces policies on routed packets of guests, in an nftables table of its own. Each address of a policed guest leads
// to a verdict in both directions: a chain of its policies, or a drop if its policies are unknown. The table outlives the daemon,
// so a restart changes nothing for guests.
type policing struct {
	table  string
	socket socket

	mu     sync.Mutex
	why    error                       // why there is no table; nil: there is one
	nodes  map[string]network.Policies // what each virtual node has set since the daemon started
	fates  map[vm.ID]fate              // of the guests in nodes
	placed map[netip.Addr]fate         // addresses in the table; of those that an earlier daemon placed, only the keys count
	saved  savedPolicies
}

func newPolicing(table, file string, space host.Space) *policing {
	return &policing{
		table: table, socket: socket{space: space, large: true}, saved: savedPolicies{path: file},
		why: errdefs.Preconditionf("the network is not set up"), nodes: map[string]network.Policies{},
	}
}

var _ network.Policer = (*Network)(nil)

// polices returns nil if rules can see every packet of every guest. It runs in the network's namespace.
func (r rules) polices(checked bool) error {
	switch {
	case r.adopt:
		return errdefs.Preconditionf("packets on an adopted bridge may not pass the host's rules")
	case !r.guard:
		return errdefs.Preconditionf("guests of an unguarded network can use each other's addresses")
	case !checked:
		return errdefs.Preconditionf("this kernel has no nftables for bridges, so guests can use each other's addresses")
	case r.meeting == direct:
		return errdefs.Preconditionf("network.switched lets guests exchange packets past the host's rules")
	case r.meeting == filtered:
		return r.shown()
	}
	return nil
}

// shown returns nil if the kernel shows bridged packets to the rules.
func (r rules) shown() error {
	if on, _ := host.Sysctl(filteredKey); on != "1" {
		return errdefs.Preconditionf("net.bridge.bridge-nf-call-iptables was 1 when cocoond started and is not any more, so packets between guests pass the host's rules; set it, or restart cocoond")
	}
	if on, _ := host.Sysctl(filtered6Key); r.prefix6.IsValid() && on != "1" {
		return errdefs.Preconditionf("net.bridge.bridge-nf-call-iptables is 1, but net.bridge.bridge-nf-call-ip6tables is not, so IPv6 between guests passes the host's rules; set both")
	}
	return nil
}

// filtered6Key is filteredKey for IPv6.
const filtered6Key = "bridge/bridge-nf-call-ip6tables"

// setup makes sure that the table exists, unless why says that there can be none. A table that exists stays as it is, except that
// policed guests that it does not know are closed, and addresses that none of the taps has are removed.
func (p *policing) setup(r rules, leases, taps []ipam.Lease, why error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.why = why; why != nil {
		p.placed = nil
		return removeTable(p.table, nftables.TableFamilyINet)
	}
	placed, err := readPlaced(p.table)
	if err == nil && p.placed == nil {
		err = p.vacate(r, taps, placed)
	}
	if errors.Is(err, unix.ENOENT) { // somebody has changed the table
		placed, err = nil, nil
	}
	if err != nil {
		return err
	}
	if placed == nil {
		p.saved.nodes = nil
		return p.replace(r, leases, p.nodes)
	}
	if p.placed == nil {
		p.placed = placed
	}
	for _, l := range leases {
		if l.Policed {
			if err := p.change(l, r.addresses(l), p.socket.commit); err != nil {
				return err
			}
		}
	}
	return nil
}

// vacate removes addresses that no tap has from the table and from placed. An earlier run of the daemon may have ended before it
// removed them, and the next guest with such an address would have the policies of the earlier one. Preconditions: mu is held.
func (p *policing) vacate(r rules, taps []ipam.Lease, placed map[netip.Addr]fate) error {
	unused := maps.Clone(placed)
	for _, l := range taps {
		for _, a := range r.addresses(l) {
			delete(unused, a)
		}
	}
	if len(unused) == 0 {
		return nil
	}
	gone := slices.Collect(maps.Keys(unused))
	if err := p.socket.commit(func(c *nftables.Conn) error { return removeAddresses(c, p.table, gone) }); err != nil {
		return fmt.Errorf("remove earlier guests from nftables table %s: %w", p.table, err)
	}
	for _, a := range gone {
		delete(placed, a)
	}
	return nil
}

// admit runs commit with the requests that close or open the guest of l, before its tap exists.
func (p *policing) admit(l ipam.Lease, addrs []netip.Addr, commit func(func(*nftables.Conn) error) error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.change(l, addrs, commit)
}

// change does the work of admit. Preconditions: mu is held.
func (p *policing) change(l ipam.Lease, addrs []netip.Addr, commit func(func(*nftables.Conn) error) error) error {
	want, known := p.fates[l.ID]
	if p.why != nil {
		return commit(func(*nftables.Conn) error { return nil })
	}
	var drop, put []netip.Addr
	for _, a := range addrs {
		have, there := p.placed[a]
		switch {
		case !known && l.Policed && there: // as before a restart of the daemon, or closed
		case known && there && have == want:
		case known || l.Policed:
			if put = append(put, a); there {
				drop = append(drop, a)
			}
		case there: // left by an earlier guest
			drop = append(drop, a)
		}
	}
	if !known {
		want = closed
	}
	if err := commit(func(c *nftables.Conn) error {
		return errors.Join(removeAddresses(c, p.table, drop), putAddresses(c, p.table, put, want))
	}); err != nil {
		return err
	}
	for _, a := range drop {
		delete(p.placed, a)
	}
	for _, a := range put {
		p.placed[a] = want
	}
	return nil
}

// dismiss runs commit with the requests that remove the addresses.
func (p *policing) dismiss(addrs []netip.Addr, commit func(func(*nftables.Conn) error) error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	addrs = slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { _, there := p.placed[a]; return !there })
	err := commit(func(c *nftables.Conn) error { return removeAddresses(c, p.table, addrs) })
	if err == nil || errors.Is(err, unix.ENOENT) {
		for _, a := range addrs {
			delete(p.placed, a)
		}
	}
	return err
}

// enforced returns nil if the policies are enforced now. Somebody may have changed a setting of the kernel since Setup. Closed guests
// stay closed in that case. Preconditions: mu is held.
func (p *policing) enforced(r rules) error {
	if p.why != nil || r.meeting != filtered {
		return p.why
	}
	return p.socket.space.Do(r.shown)
}

// set replaces the policies of one node. If that fails, the earlier ones stay in force, or the new ones are in force and not saved.
// It saves first. So after a crash the file may be ahead of the kernel, which is what the node wanted, but never behind: policies
// that a node has replaced do not come back.
func (p *policing) set(r rules, pool *ipam.Pool, of network.Policies) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.enforced(r); err != nil {
		return err
	}
	nodes := p.saved.with(p.nodes, pool.Attached())
	nodes[of.Node] = of
	unsaved := p.saved.save(nodes)
	named := map[vm.ID]bool{}
	for _, g := range of.Guests {
		named[g.ID] = true
	}
	pool.Police(func(id vm.ID) bool { return named[id] })
	if err := p.replace(r, pool.Attached(), nodes); err != nil {
		before := p.nodes
		if len(before) == 0 {
			before = p.saved.nodes
		}
		return errors.Join(err, unsaved, p.saved.save(before))
	}
	p.saved.nodes = nil
	return unsaved
}

// replace replaces the table in one batch, or only what has changed of its guests. Preconditions: mu is held.
func (p *policing) replace(r rules, leases []ipam.Lease, nodes map[string]network.Policies) error {
	fates, placed := fatesOf(nodes), map[netip.Addr]fate{}
	for _, l := range leases {
		f, known := fates[l.ID]
		if !known {
			f = closed
		}
		if known || l.Policed {
			for _, a := range r.addresses(l) {
				placed[a] = f
			}
		}
	}
	fill := func(c *nftables.Conn) error { return fillPolicies(c, p.table, placed, nodes) }
	if samePolicies(p.nodes, nodes) && p.hasChains(fates) {
		fill = func(c *nftables.Conn) error { return fillChanges(c, p.table, p.placed, placed) }
	}
	err := p.socket.commit(fill)
	if errors.Is(err, unix.ENOENT) { // somebody has changed the table
		err = p.socket.commit(func(c *nftables.Conn) error { return fillPolicies(c, p.table, placed, nodes) })
	}
	if err != nil {
		return fmt.Errorf("replace nftables table %s: %w", p.table, err)
	}
	p.nodes, p.fates, p.placed = nodes, fates, placed
	return nil
}

// hasChains reports whether the table has the chains of these fates.
func (p *policing) hasChains(fates map[vm.ID]fate) bool {
	has := map[verdict]bool{dropped: true, passed: true}
	for _, f := range p.fates {
		has[f.ingress], has[f.egress] = true, true
	}
	for _, f := range fates {
		if !has[f.ingress] || !has[f.egress] {
			return false
		}
	}
	return true
}

// samePolicies reports whether two maps differ at most in the guests of the nodes. Without any node there is no table to change.
func samePolicies(a, b map[string]network.Policies) bool {
	return len(a) > 0 && maps.EqualFunc(a, b, func(a, b network.Policies) bool {
		return reflect.DeepEqual(a.Ingress, b.Ingress) && reflect.DeepEqual(a.Egress, b.Egress)
	})
}

// fillChanges adds to a batch what has changed of the guests.
func fillChanges(c *nftables.Conn, table string, before, after map[netip.Addr]fate) error {
	var err error
	for a, f := range before {
		if now, there := after[a]; !there || now != f {
			err = errors.Join(err, removeAddresses(c, table, []netip.Addr{a}))
		}
	}
	for a, f := range after {
		if old, there := before[a]; !there || old != f {
			err = errors.Join(err, putAddresses(c, table, []netip.Addr{a}, f))
		}
	}
	return err
}

// teardown removes the table. What the nodes have set is kept for the next setup.
func (p *policing) teardown() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.why, p.placed = errdefs.Preconditionf("the network is not set up"), nil
	return errors.Join(p.socket.close(), removeTable(p.table, nftables.TableFamilyINet))
}

// Polices implements network.Policer.
func (n *Network) Polices() error {
	defer n.mu.Read()()
	n.police.mu.Lock()
	defer n.police.mu.Unlock()
	if n.live == nil {
		return n.notUp()
	}
	return n.police.enforced(n.live.rules)
}

// Police implements network.Policer.
func (n *Network) Police(ctx context.Context, of network.Policies) error {
	if err := errors.Join(ctx.Err(), of.Validate()); err != nil {
		return err
	}
	defer n.mu.Read()()
	lv := n.live
	if lv == nil {
		return n.notUp()
	}
	if err := n.police.set(lv.rules, lv.pool, of); err != nil {
		return fmt.Errorf("set the policies of node %s on network %s: %w", of.Node, n.cfg.Name, err)
	}
	n.markDirty()
	return nil
}

// addresses returns the addresses that the guest of l can use beyond its link.
func (r rules) addresses(l ipam.Lease) []netip.Addr {
	out := []netip.Addr{l.IP}
	if a := address6(r.prefix6, l.MAC); a.IsValid() {
		out = append(out, a)
	}
	return out
}

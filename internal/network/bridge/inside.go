package bridge

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/vm"
)

// inside translates the addresses of masqueraded guests, in two nftables tables of its own. Family bridge rewrites frames at the tap,
// in front of all other rules, so that those see only the address of the interface. Family inet limits the ports by which others
// reach such a guest. Each guest has chains of its own. No file records them: the kernel keeps the tables when the daemon ends, and the
// next daemon reads them. Methods run in the network's namespace.
type inside struct {
	table  string
	socket *socket

	mu     sync.Mutex
	made   bool // the tables exist
	guests map[string]insider
}

// insider is a masqueraded guest.
type insider struct {
	tap    string
	mac    net.HardwareAddr
	outer  netip.Addr // of the interface
	outer6 netip.Addr // the zero value without IPv6
	inside vm.Inside
	ports  []network.Port // none: all; of a guest that an earlier daemon attached only the number counts
}

const (
	mapFrom     = "from"     // tap -> chain of frames from the guest
	mapTo       = "to"       // tap -> chain of frames to it
	mapLimited4 = "limited4" // address -> chain of its ports
	mapLimited6 = "limited6"

	mapFromID     = 1
	mapToID       = 2
	mapLimited4ID = 3
	mapLimited6ID = 4
)

// insiderOf returns the guest of l, masqueraded by m.
func (r rules) insiderOf(l ipam.Lease, m vm.Masquerade) (insider, error) {
	mac, err := net.ParseMAC(l.MAC)
	if err != nil {
		return insider{}, fmt.Errorf("masquerade the guest of tap %s: %w", l.Tap, err)
	}
	g := insider{tap: l.Tap, mac: mac, outer: l.IP, outer6: address6(r.prefix6, l.MAC), inside: m.Inside()}
	for _, p := range m.Ports {
		g.ports = append(g.ports, network.Port{Protocol: network.Protocol(protocols[p.Protocol]), First: p.First, Last: p.Last})
	}
	return g, nil
}

// text is the comment by which a later daemon knows the guest. A comment has at most 253 bytes.
func (g insider) text() string {
	outer6 := "-"
	if g.outer6.IsValid() {
		outer6 = g.outer6.String()
	}
	in := g.inside
	return fmt.Sprintf("%s %s %s %s/%d %s/%d %d", g.mac, g.outer, outer6, in.IP, in.Prefix, in.IPv6, in.Prefix6, len(g.ports))
}

// parseInsider is the inverse of text.
func parseInsider(tap, text string) (g insider, ok bool) {
	var mac, outer, outer6, in4, in6 string
	var ports uint16
	if n, err := fmt.Sscan(text, &mac, &outer, &outer6, &in4, &in6, &ports); n != 6 || err != nil {
		return g, false
	}
	g.tap = tap
	var errs [4]error
	var p4, p6 netip.Prefix
	g.mac, errs[0] = net.ParseMAC(mac)
	g.outer, errs[1] = netip.ParseAddr(outer)
	p4, errs[2] = netip.ParsePrefix(in4)
	p6, errs[3] = netip.ParsePrefix(in6)
	if errors.Join(errs[:]...) != nil || len(g.mac) != 6 || !g.outer.Is4() || !p4.Addr().Is4() || !p6.Addr().Is6() {
		return insider{}, false
	}
	g.outer6, _ = netip.ParseAddr(outer6)
	g.inside = vm.Masquerade{CIDR: p4.Masked().String(), CIDR6: p6.Masked().String()}.Inside()
	g.ports = make([]network.Port, ports)
	return g, true
}

func newInside(table string, space host.Space) *inside {
	return &inside{table: table, socket: &socket{space: space}, guests: map[string]insider{}}
}

func (n *inside) tables() (ether, inet *nftables.Table) {
	return &nftables.Table{Name: n.table, Family: nftables.TableFamilyBridge}, &nftables.Table{Name: n.table, Family: nftables.TableFamilyINet}
}

func byTap(t *nftables.Table, name string, id uint32) *nftables.Set {
	return &nftables.Set{Table: t, Name: name, ID: id, IsMap: true, KeyType: nftables.TypeIFName, DataType: nftables.TypeVerdict}
}

func byAddress(t *nftables.Table, name string, id uint32) *nftables.Set {
	s := &nftables.Set{Table: t, Name: name, ID: id, IsMap: true, KeyType: nftables.TypeIPAddr, DataType: nftables.TypeVerdict}
	if name == mapLimited6 {
		s.KeyType = nftables.TypeIP6Addr
	}
	return s
}

// base adds what all guests share to a batch.
func (n *inside) base(c *nftables.Conn, r rules) error {
	ether, inet := n.tables()
	var err error
	for _, t := range []*nftables.Table{ether, inet} { // also if only one of them exists
		c.AddTable(t)
		c.DelTable(t)
		c.AddTable(t)
	}
	for _, s := range []*nftables.Set{byTap(ether, mapFrom, mapFromID), byTap(ether, mapTo, mapToID), byAddress(inet, mapLimited4, mapLimited4ID), byAddress(inet, mapLimited6, mapLimited6ID)} {
		err = errors.Join(err, c.AddSet(s, nil))
	}
	lookup := func(name string, id uint32) []expr.Any {
		return []expr.Any{&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: name, SetID: id, IsDestRegSet: true, DestRegister: unix.NFT_REG_VERDICT}}
	}
	const first, last = -310, 310 // around all other rules for frames
	from := c.AddChain(&nftables.Chain{Name: "prerouting", Table: ether, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRef(first)})
	add(c, from, [][]expr.Any{join(loadTap(), lookup(mapFrom, mapFromID))})
	to := c.AddChain(&nftables.Chain{Name: "postrouting", Table: ether, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityRef(last)})
	add(c, to, [][]expr.Any{join([]expr.Any{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: unix.NFT_REG_1}}, lookup(mapTo, mapToID))})
	for name, hook := range map[string]*nftables.ChainHook{"forward": nftables.ChainHookForward, "output": nftables.ChainHookOutput} {
		ch := c.AddChain(&nftables.Chain{Name: name, Table: inet, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityRef(5)})
		add(c, ch, [][]expr.Any{
			join(oif(expr.CmpOpNeq, r.bridge), accept()),
			join(ctBits(expr.CtKeySTATE, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept()),
			join(overIP(unix.NFPROTO_IPV4), loadNetwork(offsetTo4, 4, unix.NFT_REG_1), lookup(mapLimited4, mapLimited4ID)),
			join(overIP(unix.NFPROTO_IPV6), loadNetwork(offsetTo6, 16, unix.NFT_REG_1), lookup(mapLimited6, mapLimited6ID)),
		})
	}
	return err
}

// put adds the guest to a batch.
func (n *inside) put(c *nftables.Conn, r rules, bridge net.HardwareAddr, g insider) error {
	ether, inet := n.tables()
	chain := func(t *nftables.Table, kind string, rules [][]expr.Any) *expr.Verdict {
		ch := c.AddChain(&nftables.Chain{Name: kind + "-" + g.tap, Table: t})
		add(c, ch, rules)
		return &expr.Verdict{Kind: expr.VerdictGoto, Chain: ch.Name}
	}
	element := func(key []byte, v *expr.Verdict) []nftables.SetElement {
		return []nftables.SetElement{{Key: key, VerdictData: v, Comment: g.text()}}
	}
	err := errors.Join(
		c.SetAddElements(byTap(ether, mapFrom, mapFromID), element(linkName(g.tap), chain(ether, mapFrom, r.fromInside(g)))),
		c.SetAddElements(byTap(ether, mapTo, mapToID), element(linkName(g.tap), chain(ether, mapTo, r.toInside(g, bridge)))),
	)
	if len(g.ports) == 0 {
		return err
	}
	limit := chain(inet, "ports", limited(g.ports))
	return errors.Join(err, n.eachLimit(inet, g, func(s *nftables.Set, key []byte) error { return c.SetAddElements(s, element(key, limit)) }))
}

// eachLimit calls fn with the map and the key of each address of a guest whose ports are limited.
func (n *inside) eachLimit(inet *nftables.Table, g insider, fn func(s *nftables.Set, key []byte) error) error {
	err := fn(byAddress(inet, mapLimited4, mapLimited4ID), g.outer.AsSlice())
	if g.outer6.IsValid() {
		err = errors.Join(err, fn(byAddress(inet, mapLimited6, mapLimited6ID), g.outer6.AsSlice()))
	}
	return err
}

// drop adds the removal of the guest to a batch.
func (n *inside) drop(c *nftables.Conn, g insider) error {
	ether, inet := n.tables()
	err := errors.Join(
		c.SetDeleteElements(byTap(ether, mapFrom, mapFromID), []nftables.SetElement{{Key: linkName(g.tap)}}),
		c.SetDeleteElements(byTap(ether, mapTo, mapToID), []nftables.SetElement{{Key: linkName(g.tap)}}),
	)
	c.DelChain(&nftables.Chain{Name: mapFrom + "-" + g.tap, Table: ether})
	c.DelChain(&nftables.Chain{Name: mapTo + "-" + g.tap, Table: ether})
	if len(g.ports) == 0 {
		return err
	}
	err = errors.Join(err, n.eachLimit(inet, g, func(s *nftables.Set, key []byte) error {
		return c.SetDeleteElements(s, []nftables.SetElement{{Key: key}})
	}))
	c.DelChain(&nftables.Chain{Name: "ports-" + g.tap, Table: inet})
	return err
}

// admit translates the addresses of a guest, before its tap exists, in place of what the tap and the address had before. It may be
// repeated.
func (n *inside) admit(r rules, bridge net.HardwareAddr, g insider) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var before []insider
	for _, o := range n.guests {
		if o.tap == g.tap || o.outer == g.outer {
			before = append(before, o)
		}
	}
	err := n.change(before, func(c *nftables.Conn) error { return n.put(c, r, bridge, g) }, !n.made, r)
	if errors.Is(err, unix.ENOENT) && n.made { // somebody has changed the tables, so no guest has rules any more
		n.made, n.guests = false, map[string]insider{}
		err = n.change(nil, func(c *nftables.Conn) error { return n.put(c, r, bridge, g) }, true, r)
	}
	if err != nil {
		return fmt.Errorf("masquerade %s at tap %s: %w", g.outer, g.tap, nftError(err))
	}
	n.made, n.guests[g.tap] = true, g
	return nil
}

// change removes guests and adds what put adds, in one batch. Preconditions: mu is held.
func (n *inside) change(gone []insider, put func(*nftables.Conn) error, base bool, r rules) error {
	err := n.socket.commit(func(c *nftables.Conn) error {
		var err error
		if base {
			err = n.base(c, r)
		}
		for _, g := range gone {
			err = errors.Join(err, n.drop(c, g))
		}
		return errors.Join(err, put(c))
	})
	if err == nil {
		for _, g := range gone {
			delete(n.guests, g.tap)
		}
	}
	return err
}

// dismiss is the inverse of admit, also of a guest that is not masqueraded. It may be repeated.
func (n *inside) dismiss(taps ...string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var gone []insider
	for _, tap := range taps {
		if g, there := n.guests[tap]; there {
			gone = append(gone, g)
		}
	}
	return n.removeLocked(gone)
}

func (n *inside) removeLocked(gone []insider) error {
	if len(gone) == 0 {
		return nil
	}
	err := n.change(gone, func(*nftables.Conn) error { return nil }, false, rules{})
	if errors.Is(err, unix.ENOENT) { // somebody has removed them
		for _, g := range gone {
			delete(n.guests, g.tap)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove masqueraded guests from nftables table %s: %w", n.table, err)
	}
	return nil
}

// load reads the guests that an earlier daemon admitted, and removes those without a tap.
func (n *inside) load(taps []ipam.Lease) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var err error
	if n.guests, err = n.read(); err != nil {
		return err
	}
	n.made = n.guests != nil
	if !n.made {
		n.guests = map[string]insider{}
	}
	var gone []insider
	for tap, g := range n.guests {
		if !slices.ContainsFunc(taps, func(l ipam.Lease) bool { return l.Tap == tap }) {
			gone = append(gone, g)
		}
	}
	return n.removeLocked(gone)
}

// read returns the guests in the tables, nil if a table is missing.
func (n *inside) read() (map[string]insider, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, nftError(err)
	}
	ether, inet := n.tables()
	for _, t := range []*nftables.Table{ether, inet} {
		all, err := c.ListTablesOfFamily(t.Family)
		if err != nil && !absent(err) {
			return nil, fmt.Errorf("read nftables table %s: %w", n.table, nftError(err))
		}
		if !slices.ContainsFunc(all, func(o *nftables.Table) bool { return o.Name == t.Name }) {
			return nil, nil
		}
	}
	elements, err := c.GetSetElements(byTap(ether, mapFrom, mapFromID))
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read nftables table %s: %w", n.table, err)
	}
	out := map[string]insider{}
	for _, e := range elements {
		tap := strings.TrimRight(string(e.Key), "\x00")
		if g, ok := parseInsider(tap, e.Comment); ok {
			out[tap] = g
		}
	}
	return out, nil
}

// teardown removes the tables.
func (n *inside) teardown() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.made, n.guests = false, map[string]insider{}
	return errors.Join(n.socket.close(), removeTable(n.table, nftables.TableFamilyBridge), removeTable(n.table, nftables.TableFamilyINet))
}

// at returns the guest of a tap.
func (n *inside) at(tap string) (insider, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	g, ok := n.guests[tap]
	return g, ok
}

// macs returns the hardware addresses of all masqueraded guests with IPv6.
func (n *inside) macs() (out []net.HardwareAddr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, g := range n.guests {
		if g.outer6.IsValid() {
			out = append(out, g.mac)
		}
	}
	return out
}

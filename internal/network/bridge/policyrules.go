package bridge

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/vm"
)

// The table of policies. Two chains look at each packet that the host forwards, one for its sender and one for its receiver, and
// both must let it pass. Each finds the chain of the guest's policies by the guest's address. Guests with the same policies share
// that chain, and policies with the same peers share a set. An accept ends only one of the two chains, because each is a chain of
// the hook.

// fate is what becomes of the packets of a guest: the chains of its policies, or a drop, in each direction.
type fate struct{ ingress, egress verdict }

// verdict is a chain, or one of the two below.
type verdict string

const (
	dropped verdict = "drop"
	passed  verdict = "accept"
)

var closed = fate{dropped, dropped}

// direction is one of the two base chains and what belongs to it.
type direction struct {
	name       string
	map4, map6 string // verdicts by address of a guest
	id4, id6   uint32
	own4, own6 uint32 // offsets of the guest's address
	far4, far6 uint32 // and of its peer's
	policies   func(network.Policies) []network.Policy
	selected   func(network.Guest) []int
	fate       func(fate) verdict
}

// Set IDs need to be unique only in a batch.
const (
	mapIngress4 = iota + 1
	mapIngress6
	mapEgress4
	mapEgress6
	setSelf4
	setSelf6
	setsFrom // the first one for the sets of policies
)

var (
	ingress = direction{
		"ingress", "ingress4", "ingress6", mapIngress4, mapIngress6, offsetTo4, offsetTo6, offsetSource4, offsetSource6,
		func(p network.Policies) []network.Policy { return p.Ingress }, func(g network.Guest) []int { return g.Ingress },
		func(f fate) verdict { return f.ingress },
	}
	egress = direction{
		"egress", "egress4", "egress6", mapEgress4, mapEgress6, offsetSource4, offsetSource6, offsetTo4, offsetTo6,
		func(p network.Policies) []network.Policy { return p.Egress }, func(g network.Guest) []int { return g.Egress },
		func(f fate) verdict { return f.egress },
	}
)

// group is the name of the chain for guests with these policies of a node. The number of a node is its place in the order of
// their names.
func (d direction) group(node int, indexes []int) verdict {
	if len(indexes) == 0 {
		return passed
	}
	var b strings.Builder
	for _, i := range slices.Sorted(slices.Values(indexes)) {
		fmt.Fprintf(&b, ",%d", i)
	}
	return verdict(fmt.Sprintf("%s-%d-%s", d.name, node, letters(16, b.String())))
}

func (d direction) policy(node, index int) string {
	return fmt.Sprintf("%s-%d-policy-%d", d.name, node, index)
}

// fatesOf returns the fate of each guest that a node names. A guest that several nodes name is closed, because it is not known which
// of them it belongs to.
func fatesOf(nodes map[string]network.Policies) map[vm.ID]fate {
	out := map[vm.ID]fate{}
	for n, name := range slices.Sorted(maps.Keys(nodes)) {
		for _, g := range nodes[name].Guests {
			if _, there := out[g.ID]; there {
				out[g.ID] = closed
				continue
			}
			out[g.ID] = fate{ingress.group(n, g.Ingress), egress.group(n, g.Egress)}
		}
	}
	return out
}

// fillPolicies adds the whole table to a batch, in place of one that exists.
func fillPolicies(c *nftables.Conn, table string, placed map[netip.Addr]fate, nodes map[string]network.Policies) error {
	t := rules{table: table}.fresh(c, nftables.TableFamilyINet)
	f := filler{c: c, t: t, sets: map[string]*nftables.Set{}}
	for _, s := range []*nftables.Set{self(t, false), self(t, true)} {
		f.set(s, nil)
	}
	for _, d := range []direction{egress, ingress} {
		for n, name := range slices.Sorted(maps.Keys(nodes)) {
			f.policies(d, n, nodes[name])
		}
		f.base(d)
	}
	for _, a := range slices.SortedFunc(maps.Keys(placed), netip.Addr.Compare) {
		f.err = errors.Join(f.err, putAddresses(c, table, []netip.Addr{a}, placed[a]))
	}
	return f.err
}

// filler adds the parts of the table to a batch.
type filler struct {
	c    *nftables.Conn
	t    *nftables.Table
	sets map[string]*nftables.Set // by content
	err  error
}

// set adds a set. A message has room for few thousand elements.
func (f *filler) set(s *nftables.Set, all []nftables.SetElement) {
	const chunk = 512
	f.err = errors.Join(f.err, f.c.AddSet(s, nil))
	for part := range slices.Chunk(all, chunk) {
		f.err = errors.Join(f.err, f.c.SetAddElements(s, part))
	}
}

// base adds the chain of the hook for one direction, and its maps. A guest may always reach itself by a Service, as every pod.
func (f *filler) base(d direction) {
	for _, s := range []*nftables.Set{d.verdicts(f.t, false), d.verdicts(f.t, true)} {
		f.set(s, nil)
	}
	priority := nftables.ChainPriorityRef(10)
	if d.name == ingress.name {
		priority = nftables.ChainPriorityRef(20)
	}
	ch := f.c.AddChain(&nftables.Chain{Name: d.name, Table: f.t, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: priority})
	lookup := func(set string, id uint32) []expr.Any {
		return []expr.Any{&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: set, SetID: id}}
	}
	vmap := func(set string, id uint32) []expr.Any {
		return []expr.Any{&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: set, SetID: id, IsDestRegSet: true, DestRegister: unix.NFT_REG_VERDICT}}
	}
	ip, ip6 := overIP(unix.NFPROTO_IPV4), overIP(unix.NFPROTO_IPV6)
	add(f.c, ch, [][]expr.Any{
		join(ctBits(expr.CtKeySTATE, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept()),
		join(neighbours(), accept()), // from port to port
		join(ip, loadNetwork(offsetSource4, 8, unix.NFT_REG_1), lookup(self4, setSelf4), accept()),
		join(ip6, loadNetwork(offsetSource6, 32, unix.NFT_REG_1), lookup(self6, setSelf6), accept()),
		join(ip, loadNetwork(d.own4, 4, unix.NFT_REG_1), vmap(d.map4, d.id4)),
		join(ip6, loadNetwork(d.own6, 16, unix.NFT_REG_1), vmap(d.map6, d.id6)),
	})
}

// policies adds the chains of one node: one for each policy, and one for each group of policies that a guest has.
func (f *filler) policies(d direction, node int, p network.Policies) {
	all := d.policies(p)
	for i, policy := range all {
		ch := f.c.AddChain(&nftables.Chain{Name: d.policy(node, i), Table: f.t})
		for _, r := range policy.Rules {
			for _, match := range f.matches(d, r) {
				f.rule(ch, policy.Name, join(match, accept()))
			}
		}
	}
	made := map[verdict]bool{passed: true}
	for _, g := range p.Guests {
		name := d.group(node, d.selected(g))
		if made[name] {
			continue
		}
		made[name] = true
		ch := f.c.AddChain(&nftables.Chain{Name: string(name), Table: f.t})
		for _, i := range d.selected(g) {
			f.rule(ch, all[i].Name, jump(d.policy(node, i)))
		}
		f.rule(ch, "", drop())
	}
}

// rule adds a rule; nft shows the comment.
func (f *filler) rule(ch *nftables.Chain, comment string, exprs []expr.Any) {
	r := &nftables.Rule{Table: f.t, Chain: ch, Exprs: exprs}
	if comment != "" {
		const most = 127 // of the kernel's tools
		r.UserData = userdata.AppendString(nil, userdata.TypeComment, comment[:min(len(comment), most)])
	}
	f.c.AddRule(r)
}

// matches returns the packets that a rule allows, as expressions any of which must hold.
func (f *filler) matches(d direction, r network.Rule) (out [][]expr.Any) {
	for _, peers := range f.peers(d, r) {
		if r.AllPorts {
			out = append(out, peers)
			continue
		}
		for _, p := range r.Ports {
			out = append(out, join(peers, portRange(p)))
		}
		for _, named := range f.named(r.Named) {
			out = append(out, join(peers, named))
		}
	}
	return out
}

// peers matches the peers of a rule: one expression for each family.
func (f *filler) peers(d direction, r network.Rule) (out [][]expr.Any) {
	if r.Anyone {
		return [][]expr.Any{nil}
	}
	for _, v := range []struct {
		is4          bool
		family       byte
		offset, size uint32
		key          nftables.SetDatatype
	}{{true, unix.NFPROTO_IPV4, d.far4, 4, nftables.TypeIPAddr}, {false, unix.NFPROTO_IPV6, d.far6, 16, nftables.TypeIP6Addr}} {
		var content strings.Builder
		var elements []nftables.SetElement
		for _, x := range network.Merge(slices.Clone(r.Peers)) {
			if x.First.Is4() != v.is4 {
				continue
			}
			fmt.Fprintf(&content, "%s-%s ", x.First, x.Last)
			elements = append(elements, nftables.SetElement{Key: x.First.AsSlice()})
			if next := x.Last.Next(); next.IsValid() {
				elements = append(elements, nftables.SetElement{Key: next.AsSlice(), IntervalEnd: true})
			}
		}
		if len(elements) == 0 {
			continue
		}
		s := f.shared("peers", content.String(), &nftables.Set{Interval: true, KeyType: v.key}, elements)
		out = append(out, join(overIP(v.family), loadNetwork(v.offset, v.size, unix.NFT_REG_1), in(s)))
	}
	return out
}

// named matches destinations: address, protocol and port, one expression for each family.
func (f *filler) named(all []network.Endpoint) (out [][]expr.Any) {
	for _, v := range []struct {
		is4          bool
		family       byte
		offset, size uint32
		key          nftables.SetDatatype
	}{{true, unix.NFPROTO_IPV4, offsetTo4, 4, nftables.TypeIPAddr}, {false, unix.NFPROTO_IPV6, offsetTo6, 16, nftables.TypeIP6Addr}} {
		mine := slices.DeleteFunc(slices.Clone(all), func(e network.Endpoint) bool { return e.Addr.Is4() != v.is4 })
		slices.SortFunc(mine, func(a, b network.Endpoint) int {
			return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
		})
		var elements []nftables.SetElement
		mine = slices.Compact(mine)
		for _, e := range mine {
			key := append(e.Addr.AsSlice(), byte(e.Protocol), 0, 0, 0) // each part fills complete registers
			elements = append(elements, nftables.SetElement{Key: append(key, byte(e.Port>>8), byte(e.Port), 0, 0)})
		}
		if len(elements) == 0 {
			continue
		}
		kind := nftables.MustConcatSetType(v.key, nftables.TypeInetProto, nftables.TypeInetService)
		s := f.shared("ports", fmt.Sprint(mine), &nftables.Set{Concatenation: true, KeyType: kind}, elements)
		at := unix.NFT_REG32_00 + v.size/4
		out = append(out, join(overIP(v.family), loadNetwork(v.offset, v.size, unix.NFT_REG_1), []expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: at},
			&expr.Payload{DestRegister: at + 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		}, in(s)))
	}
	return out
}

// shared returns the set with that content, and adds it if there is none.
func (f *filler) shared(kind, content string, s *nftables.Set, elements []nftables.SetElement) *nftables.Set {
	content = kind + " " + content
	if there := f.sets[content]; there != nil {
		return there
	}
	s.Table, s.ID, s.Name = f.t, uint32(setsFrom+len(f.sets)), fmt.Sprintf("%s-%d", kind, len(f.sets))
	f.set(s, elements)
	f.sets[content] = s
	return s
}

func in(s *nftables.Set) []expr.Any {
	return []expr.Any{&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: s.Name, SetID: s.ID}}
}

// portRange matches packets to the ports.
func portRange(p network.Port) []expr.Any {
	load := []expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}}
	first, last := binaryutil.BigEndian.PutUint16(p.First), binaryutil.BigEndian.PutUint16(p.Last)
	if p.First == p.Last {
		return join(proto(byte(p.Protocol)), load, equal(first))
	}
	return join(proto(byte(p.Protocol)), load, []expr.Any{&expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: first, ToData: last}})
}

const self4, self6 = "self4", "self6"

// self is the set of pairs of a policed guest's address with itself.
func self(t *nftables.Table, ipv6 bool) *nftables.Set {
	if ipv6 {
		return &nftables.Set{Table: t, Name: self6, ID: setSelf6, Concatenation: true, KeyType: nftables.MustConcatSetType(nftables.TypeIP6Addr, nftables.TypeIP6Addr)}
	}
	return &nftables.Set{Table: t, Name: self4, ID: setSelf4, Concatenation: true, KeyType: nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeIPAddr)}
}

// verdicts is the map of verdicts by a guest's address.
func (d direction) verdicts(t *nftables.Table, ipv6 bool) *nftables.Set {
	if ipv6 {
		return &nftables.Set{Table: t, Name: d.map6, ID: d.id6, IsMap: true, KeyType: nftables.TypeIP6Addr, DataType: nftables.TypeVerdict}
	}
	return &nftables.Set{Table: t, Name: d.map4, ID: d.id4, IsMap: true, KeyType: nftables.TypeIPAddr, DataType: nftables.TypeVerdict}
}

func (v verdict) data() *expr.Verdict {
	switch v {
	case dropped:
		return &expr.Verdict{Kind: expr.VerdictDrop}
	case passed:
		return &expr.Verdict{Kind: expr.VerdictAccept}
	}
	return &expr.Verdict{Kind: expr.VerdictGoto, Chain: string(v)}
}

// putAddresses adds addresses of a guest with its fate to a batch.
func putAddresses(c *nftables.Conn, table string, addrs []netip.Addr, f fate) error {
	return eachMap(table, addrs, func(s *nftables.Set, d *direction, key []byte) error {
		e := nftables.SetElement{Key: key}
		if d != nil {
			e.VerdictData = d.fate(f).data()
		}
		return c.SetAddElements(s, []nftables.SetElement{e})
	})
}

// removeAddresses is the inverse of putAddresses.
func removeAddresses(c *nftables.Conn, table string, addrs []netip.Addr) error {
	return eachMap(table, addrs, func(s *nftables.Set, _ *direction, key []byte) error {
		return c.SetDeleteElements(s, []nftables.SetElement{{Key: key}})
	})
}

// eachMap calls fn with each set that has the addresses, and with their key in it. d is nil for the set self.
func eachMap(table string, addrs []netip.Addr, fn func(s *nftables.Set, d *direction, key []byte) error) error {
	t := &nftables.Table{Name: table, Family: nftables.TableFamilyINet}
	for _, a := range addrs {
		key := a.AsSlice()
		err := fn(self(t, a.Is6()), nil, append(key, key...))
		for _, d := range []*direction{&ingress, &egress} {
			err = errors.Join(err, fn(d.verdicts(t, a.Is6()), d, key))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// readPlaced returns the addresses in the table, nil if there is no table of this form.
func readPlaced(table string) (map[netip.Addr]fate, error) {
	c, err := nftables.New()
	if err != nil {
		return nil, err
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, fmt.Errorf("list nftables tables: %w", err)
	}
	i := slices.IndexFunc(tables, func(t *nftables.Table) bool { return t.Name == table })
	if i < 0 {
		return nil, nil
	}
	sets, err := c.GetSets(tables[i])
	if err != nil {
		return nil, fmt.Errorf("list the sets of nftables table %s: %w", table, err)
	}
	has := map[string]bool{}
	for _, s := range sets {
		has[s.Name] = true
	}
	if !has[self4] || !has[self6] {
		return nil, nil
	}
	out := map[netip.Addr]fate{}
	for _, s := range []*nftables.Set{ingress.verdicts(tables[i], false), ingress.verdicts(tables[i], true), egress.verdicts(tables[i], false), egress.verdicts(tables[i], true)} {
		if !has[s.Name] {
			return nil, nil
		}
		all, err := c.GetSetElements(s)
		if err != nil {
			return nil, fmt.Errorf("read set %s of nftables table %s: %w", s.Name, table, err)
		}
		for _, e := range all {
			if a, ok := netip.AddrFromSlice(e.Key); ok {
				out[a] = fate{}
			}
		}
	}
	return out, nil
}

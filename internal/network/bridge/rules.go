package bridge

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/ipam"
)

// rules are all packet rules of one network, in two nftables tables of our own, both called table. Family inet masquerades,
// forwards and guards the host. Family bridge lets each tap send only with its own MAC and address. Packets that other tables
// drop stay dropped, and none of those tables is changed.
type rules struct {
	table     string
	bridge    string
	tapPrefix string
	prefix    netip.Prefix
	gateway   netip.Addr
	prefix6   netip.Prefix // the zero value if there is no IPv6
	stateful6 bool         // our DHCPv6 server assigns addresses to guests
	dns       []netip.Addr
	closed    network.Closed
	nat       bool
	natLink   string
	guard     bool
	adopt     bool // others use the bridge too: the rules apply only to guests, by their addresses
	meeting   meeting
	services  []netip.AddrPort
	peers     []string // bridges of the same cluster
}

const (
	setSenders = "senders" // tap . mac
	setGuests  = "guests"  // tap . mac . address
	setGuests6 = "guests6" // tap . mac . IPv6 address
	setTenants = "tenants" // address; family inet
	chainDHCP  = "dhcp"    // messages to a DHCP server

	chainClosed = "closed" // packets of guests to other networks
)

// empty reports whether no nftables rules are needed.
func (r rules) empty() bool { return !r.nat && !r.guard }

// probeNFT checks whether this kernel has nftables, before anything is changed.
func probeNFT() error {
	c, err := nftables.New()
	if err == nil {
		_, err = c.ListTablesOfFamily(nftables.TableFamilyINet)
	}
	return nftError(err)
}

func nftError(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, os.ErrPermission) {
		return errdefs.New(errdefs.FailedPrecondition, "no permission for nftables: %w; run the daemon as root", err)
	}
	return errdefs.New(errdefs.FailedPrecondition,
		"this kernel does not support the nftables rules: %w; load the modules with `modprobe -a nf_tables nft_masq nft_ct`, or turn NAT and the guard off", err)
}

// apply replaces the rules as one atomic batch. guests are those with an existing tap. spoof says whether senders are checked,
// which needs the bridge family of nftables.
func (r rules) apply(guests []ipam.Lease) (spoof bool, err error) {
	if r.empty() {
		return false, r.remove()
	}
	if r.guard {
		err := r.commit(func(c *nftables.Conn) error {
			return errors.Join(r.inet(c, guests), r.ether(c, guests))
		})
		if err == nil {
			return true, nil
		}
		if !errors.Is(err, unix.EAFNOSUPPORT) && !errors.Is(err, unix.EOPNOTSUPP) {
			return false, nftError(err)
		}
	}
	return false, nftError(r.commit(func(c *nftables.Conn) error {
		return r.inet(c, guests)
	}))
}

// remove removes both tables. Without nftables in the kernel there are none.
func (r rules) remove() error {
	return errors.Join(removeTable(r.table, nftables.TableFamilyINet), removeTable(r.table, nftables.TableFamilyBridge))
}

// removeTable removes a table. It is no error if there is none, or if the kernel has no such tables.
func removeTable(name string, family nftables.TableFamily) error {
	c, err := nftables.New()
	if err == nil {
		c.DelTable(&nftables.Table{Name: name, Family: family})
		err = c.Flush()
	}
	if err != nil && !absent(err) {
		return fmt.Errorf("remove nftables table %s: %w", name, err)
	}
	return nil
}

// absent reports whether err says that a table does not exist, or cannot exist in this kernel.
func absent(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPROTONOSUPPORT)
}

// commit runs fill and sends its requests as one batch, in the calling thread's namespace.
func (r rules) commit(fill func(*nftables.Conn) error) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	if err := fill(c); err != nil {
		return err
	}
	return c.Flush()
}

// fresh adds an empty table of a family to the batch, whether or not the table already exists.
func (r rules) fresh(c *nftables.Conn, family nftables.TableFamily) *nftables.Table {
	t := &nftables.Table{Name: r.table, Family: family}
	c.AddTable(t)
	c.DelTable(t)
	return c.AddTable(t)
}

// add appends rules to a chain.
func add(c *nftables.Conn, ch *nftables.Chain, rules [][]expr.Any) {
	for _, e := range rules {
		c.AddRule(&nftables.Rule{Table: ch.Table, Chain: ch, Exprs: e})
	}
}

// inet fills the table for routed packets.
func (r rules) inet(c *nftables.Conn, guests []ipam.Lease) error {
	t := r.fresh(c, nftables.TableFamilyINet)
	if r.adopt {
		if err := c.AddSet(r.tenants(t), tenants(guests)); err != nil {
			return err
		}
	}
	if r.nat {
		ch := c.AddChain(&nftables.Chain{
			Name: "postrouting", Table: t, Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
		})
		for _, ours := range r.sources() {
			// The host speaks to itself by loopback. There, the kernel would choose the address of any other link, which may go.
			match := join(ours, oif(expr.CmpOpNeq, r.bridge), oif(expr.CmpOpNeq, "lo"))
			for _, p := range r.peers {
				match = append(match, oif(expr.CmpOpNeq, p)...)
			}
			if r.natLink != "" {
				match = append(match, oif(expr.CmpOpEq, r.natLink)...)
			}
			c.AddRule(&nftables.Rule{Table: t, Chain: ch, Exprs: join(match, []expr.Any{&expr.Masq{}})})
		}
	}
	if r.guard {
		add(c, c.AddChain(&nftables.Chain{Name: chainClosed, Table: t}), r.routed())
	}
	forward := c.AddChain(&nftables.Chain{
		Name: "forward", Table: t, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter,
	})
	add(c, forward, r.forward())
	if r.meeting == routed {
		output := c.AddChain(&nftables.Chain{
			Name: "output", Table: t, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityFilter,
		})
		add(c, output, r.output())
	}
	if !r.guard {
		return nil
	}
	input := c.AddChain(&nftables.Chain{
		Name: "input", Table: t, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
	})
	add(c, input, r.input())
	return nil
}

// sources match packets from guests, one match for each IP protocol in use.
func (r rules) sources() [][]expr.Any {
	out := [][]expr.Any{join(overIP(unix.NFPROTO_IPV4), source(r.prefix))}
	if r.prefix6.IsValid() {
		out = append(out, join(overIP(unix.NFPROTO_IPV6), source(r.prefix6)))
	}
	return out
}

// forward lets guests send out with their own addresses. It lets in replies and what port mappings of other programs send.
// Without NAT the network is routed: any host with a route may send to it.
func (r rules) forward() (out [][]expr.Any) {
	if r.guard {
		out = append(out, join(r.guests(), jump(chainClosed)))
	}
	if r.adopt {
		return out // the bridge's owner routes; senders are checked at their taps
	}
	meet := accept()
	if r.meeting == apart {
		meet = drop()
	}
	out = append(out, join(iif(expr.CmpOpEq, r.bridge), oif(expr.CmpOpEq, r.bridge), meet))
	for _, ours := range r.sources() {
		out = append(out, join(iif(expr.CmpOpEq, r.bridge), ours, accept()))
	}
	out = append(out, join(iif(expr.CmpOpEq, r.bridge), drop()))
	for _, p := range r.peers { // the rules of the peer have checked the sender
		out = append(out, join(oif(expr.CmpOpEq, r.bridge), iif(expr.CmpOpEq, p), accept()))
	}
	if r.nat {
		out = append(out,
			join(oif(expr.CmpOpEq, r.bridge), ctBits(expr.CtKeySTATE, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept()),
			join(oif(expr.CmpOpEq, r.bridge), ctBits(expr.CtKeySTATUS, ctStatusDNAT), accept()),
			join(oif(expr.CmpOpEq, r.bridge), drop()))
	}
	return out
}

// output keeps guests from being told to send to each other directly, which isolated ports forbid.
func (r rules) output() [][]expr.Any {
	return [][]expr.Any{
		join(oif(expr.CmpOpEq, r.bridge), overIP(unix.NFPROTO_IPV4), icmpKind(unix.IPPROTO_ICMP, icmpRedirect4), drop()),
		join(oif(expr.CmpOpEq, r.bridge), overIP(unix.NFPROTO_IPV6), icmpKind(unix.IPPROTO_ICMPV6, redirect), drop()),
	}
}

// ctStatusDNAT is IPS_DST_NAT of the kernel.
const ctStatusDNAT = 1 << 5

// called matches packets of connections that were opened to the address of a Service and redirected from there.
func called(service netip.AddrPort) []expr.Any {
	return join(overIP(unix.NFPROTO_IPV4), ctBits(expr.CtKeySTATUS, ctStatusDNAT),
		ctOriginal(expr.CtKeyDST, service.Addr().AsSlice()), ctOriginal(expr.CtKeyPROTODST, binaryutil.BigEndian.PutUint16(service.Port())))
}

// input guards the host: guests get DHCP, ping, configured DNS, and replies to connections that the host started.
func (r rules) input() [][]expr.Any {
	from := r.guests()
	others := iif(expr.CmpOpNeq, r.bridge)
	out := [][]expr.Any{
		join(others, accept()),
		join(from, ctBits(expr.CtKeySTATE, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept()),
		join(from, overIP(unix.NFPROTO_IPV4), proto(unix.IPPROTO_UDP), dport(67), accept()),
		join(from, destination(r.gateway), icmpKind(unix.IPPROTO_ICMP, icmpEchoRequest4), accept()),
	}
	for _, asks := range r.resolvers() {
		out = append(out, join(from, asks, accept()))
	}
	for _, s := range r.services {
		out = append(out, join(from, called(s), accept()))
	}
	for _, p := range r.closed.Open {
		out = append(out, join(from, to(p), accept()))
	}
	out = append(out, r.input6(from)...)
	return append(out, join(from, drop()))
}

// guests match routed packets that come from guests.
func (r rules) guests() []expr.Any {
	from := iif(expr.CmpOpEq, r.bridge)
	if r.adopt {
		from = join(from, overIP(unix.NFPROTO_IPV4), loadNetwork(12, 4, 1), []expr.Any{&expr.Lookup{SourceRegister: 1, SetName: setTenants, SetID: setTenantsID}})
	}
	return from
}

// ether fills the table for frames from taps.
func (r rules) ether(c *nftables.Conn, guests []ipam.Lease) error {
	t := r.fresh(c, nftables.TableFamilyBridge)
	senders, hosts := r.sets(t)
	mine, addresses := elements(guests)
	if err := errors.Join(c.AddSet(senders, mine), c.AddSet(hosts, addresses)); err != nil {
		return err
	}
	if r.prefix6.IsValid() {
		if err := c.AddSet(r.guests6(t), r.elements6(guests)); err != nil {
			return err
		}
	}
	ch := c.AddChain(&nftables.Chain{
		Name: "prerouting", Table: t, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRef(-300),
	})
	asks := c.AddChain(&nftables.Chain{Name: chainDHCP, Table: t})
	if r.adopt {
		add(c, c.AddChain(&nftables.Chain{Name: chainClosed, Table: t}), r.elsewhere())
	}
	if r.meeting == filtered {
		forward := c.AddChain(&nftables.Chain{
			Name: "forward", Table: t, Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityRef(-300),
		})
		add(c, forward, r.between())
	}
	add(c, ch, r.sender())
	add(c, asks, r.asker())
	return nil
}

// sender checks frames from our taps: they need their own MAC and, in IPv4 and ARP, their own address. A guest without address
// may send only DHCP and ARP probes. IPv6 is allowed as in sender6; all other protocols are dropped, and so are tags of virtual
// LANs.
func (r rules) sender() [][]expr.Any {
	zero := netip.AddrFrom4([4]byte{})
	out := [][]expr.Any{
		join(r.tap(expr.MetaKeyIIFNAME, expr.CmpOpNeq), accept()),
		join(tagged(unix.ETH_P_8021Q), drop()),
		join(tagged(unix.ETH_P_8021AD), drop()),
		join(loadTap(), loadEther(), []expr.Any{&expr.Lookup{SourceRegister: 1, SetName: setSenders, SetID: setSendersID, Invert: true}}, drop()),
		join(etherType(unix.ETH_P_IP), proto(unix.IPPROTO_UDP), dport(67), []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chainDHCP}}),
	}
	if r.adopt {
		out = append(out, join(etherType(unix.ETH_P_IP), jump(chainClosed)))
	}
	out = append(out,
		join(etherType(unix.ETH_P_IP), loadTap(), loadEther(), loadNetwork(12, 4, unix.NFT_REG32_06), lookupGuest(), accept()),
		join(etherType(unix.ETH_P_ARP), loadTap(), loadNetwork(8, 6, unix.NFT_REG_2), loadNetwork(14, 4, unix.NFT_REG32_06), lookupGuest(), accept()),
		join(etherType(unix.ETH_P_ARP), loadNetwork(14, 4, 1), equal(zero.AsSlice()), accept()),
	)
	return append(append(out, r.sender6()...), drop())
}

// asker checks DHCP: the hardware address in the message, which the server uses, must be the sender's own. Of a fragmented
// message the first fragment is dropped if it is too short to contain that address.
func (r rules) asker() [][]expr.Any {
	const udpHeader, chaddr = 8, 28
	itself := join(loadTap(), []expr.Any{
		&expr.Payload{DestRegister: unix.NFT_REG_2, Base: expr.PayloadBaseTransportHeader, Offset: udpHeader + chaddr, Len: 6},
		&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: setSenders, SetID: setSendersID},
	})
	return [][]expr.Any{
		join(itself, loadTap(), loadEther(), loadNetwork(12, 4, unix.NFT_REG32_06), lookupGuest(), accept()),
		join(itself, source(netip.PrefixFrom(netip.AddrFrom4([4]byte{}), 32)), accept()),
		drop(),
	}
}

// Set IDs must be unique only within a batch. Fixed IDs avoid the library's package-level counter.
const (
	setSendersID = 1
	setGuestsID  = 2
	setTenantsID = 3
	setGuests6ID = 4
)

func (r rules) sets(t *nftables.Table) (senders, guests *nftables.Set) {
	senders = &nftables.Set{
		Table: t, Name: setSenders, ID: setSendersID,
		KeyType: nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeEtherAddr),
	}
	guests = &nftables.Set{
		Table: t, Name: setGuests, ID: setGuestsID,
		KeyType: nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeEtherAddr, nftables.TypeIPAddr),
	}
	return senders, guests
}

func (r rules) tenants(t *nftables.Table) *nftables.Set {
	return &nftables.Set{Table: t, Name: setTenants, ID: setTenantsID, KeyType: nftables.TypeIPAddr}
}

func tenants(guests []ipam.Lease) (out []nftables.SetElement) {
	for _, l := range guests {
		out = append(out, nftables.SetElement{Key: l.IP.AsSlice()})
	}
	return out
}

func elements(guests []ipam.Lease) (senders, addresses []nftables.SetElement) {
	for _, l := range guests {
		mac, err := net.ParseMAC(l.MAC)
		if err != nil {
			continue // leases are validated where they are read
		}
		key := append(append(linkName(l.Tap), mac...), 0, 0) // parts of a key fill complete registers
		senders = append(senders, nftables.SetElement{Key: key})
		addresses = append(addresses, nftables.SetElement{Key: append(append([]byte{}, key...), l.IP.AsSlice()...)})
	}
	return senders, addresses
}

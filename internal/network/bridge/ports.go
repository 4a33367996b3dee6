package bridge

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/vm"
)

// ports forwards ports of the host to guests, by an nftables table of its own. The table is the only record of open ports. A
// restart of the daemon leaves it, so that connections to guests go on. Each change replaces it as one atomic batch; the kernel
// keeps the connections. Methods run in the network's namespace.
type ports struct {
	table string // of family ip
	flows *flows

	mu   sync.Mutex
	open []openPort
}

// openPort is a port of the host that leads to a guest.
type openPort struct {
	vm.PortMapping
	guest netip.Addr
}

const (
	mapEverywhere = "everywhere" // protocol . port -> address . port
	mapAt         = "at"         // address . protocol . port -> address . port
	setLoops      = "loops"      // address . address: a guest that reaches itself through the host

	mapEverywhereID = 1
	mapAtID         = 2
	setLoopsID      = 3
)

var protocols = map[vm.Protocol]byte{vm.TCP: unix.IPPROTO_TCP, vm.UDP: unix.IPPROTO_UDP, vm.SCTP: unix.IPPROTO_SCTP}

// load reads the ports that an earlier run opened, and closes those of guests that keep does not report.
func (p *ports) load(keep func(netip.Addr) bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	open, err := p.read()
	if err != nil {
		return err
	}
	p.open = open
	if err := p.closeLocked(func(o openPort) bool { return !keep(o.guest) }); err != nil {
		return err
	}
	return p.forget(open)
}

// forward opens the ports of a guest, and closes others that it has. Idempotent. Errors: FailedPrecondition if another guest or a
// program of the host has one of the ports.
func (p *ports) forward(ctx context.Context, guest netip.Addr, want []vm.PortMapping) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var now, own []openPort
	for _, o := range p.open {
		if o.guest == guest {
			own = append(own, o)
			continue
		}
		now = append(now, o)
		for _, w := range want {
			if w.Clashes(o.PortMapping) {
				return errdefs.Preconditionf("port %s of the host leads to another VM, at %s; choose another port", w, o.guest)
			}
		}
	}
	var mine []openPort
	for _, w := range want {
		o := openPort{w, guest}
		if !slices.Contains(own, o) && host.Listens(ctx, w) {
			return errdefs.Preconditionf("a program of the host listens on port %s; choose another port", w)
		}
		mine = append(mine, o)
	}
	if slices.Equal(own, mine) {
		return nil
	}
	if err := p.replace(append(now, mine...)); err != nil {
		return err
	}
	return p.forget(own)
}

// forget ends the connections by those of the ports that are closed now. Without this, whoever has one stays connected.
// Preconditions: mu is held.
func (p *ports) forget(some []openPort) error {
	gone := slices.DeleteFunc(slices.Clone(some), func(o openPort) bool { return slices.Contains(p.open, o) })
	if len(gone) == 0 {
		return nil
	}
	return p.flows.which(func(f flow) bool {
		return slices.ContainsFunc(gone, func(o openPort) bool {
			return f.original.protocol == protocols[o.Protocol] && f.original.dport == o.HostPort && f.original.dst != o.guest &&
				f.reply.src == o.guest && f.reply.sport == o.GuestPort
		})
	})
}

// close closes the ports of a guest. Idempotent. The caller makes the kernel forget the connections of the guest.
func (p *ports) close(guest netip.Addr) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closeLocked(func(o openPort) bool { return o.guest == guest })
}

func (p *ports) closeLocked(which func(openPort) bool) error {
	if !slices.ContainsFunc(p.open, which) {
		return nil
	}
	return p.replace(slices.DeleteFunc(slices.Clone(p.open), which))
}

// replace makes open the forwarded ports.
func (p *ports) replace(open []openPort) error {
	c, err := nftables.New()
	if err != nil {
		return nftError(err)
	}
	t := &nftables.Table{Name: p.table, Family: nftables.TableFamilyIPv4}
	c.AddTable(t)
	c.DelTable(t)
	if len(open) > 0 {
		err = p.fill(c, c.AddTable(t), open)
	}
	if err = errors.Join(err, c.Flush()); err != nil {
		return fmt.Errorf("forward ports of the host: %w", nftError(err))
	}
	p.open = open
	return nil
}

// remove removes the table. Without nftables in the kernel there is none.
func (p *ports) remove() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = nil
	return removeTable(p.table, nftables.TableFamilyIPv4)
}

func (p *ports) sets(t *nftables.Table) (everywhere, at, loops *nftables.Set) {
	target := nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetService)
	everywhere = &nftables.Set{
		Table: t, Name: mapEverywhere, ID: mapEverywhereID, IsMap: true, DataType: target,
		KeyType: nftables.MustConcatSetType(nftables.TypeInetProto, nftables.TypeInetService),
	}
	at = &nftables.Set{
		Table: t, Name: mapAt, ID: mapAtID, IsMap: true, DataType: target,
		KeyType: nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetProto, nftables.TypeInetService),
	}
	loops = &nftables.Set{
		Table: t, Name: setLoops, ID: setLoopsID, KeyType: nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeIPAddr),
	}
	return everywhere, at, loops
}

// fill adds the rules for open to the table.
func (p *ports) fill(c *nftables.Conn, t *nftables.Table, open []openPort) error {
	everywhere, at, loops := p.sets(t)
	var all, own, self []nftables.SetElement
	seen := map[netip.Addr]bool{}
	for _, o := range open {
		e := nftables.SetElement{Key: o.key(), Val: append(o.guest.AsSlice(), slot(o.GuestPort)...)}
		if o.HostIP == "" {
			all = append(all, e)
		} else {
			own = append(own, e)
		}
		if !seen[o.guest] {
			seen[o.guest] = true
			self = append(self, nftables.SetElement{Key: append(o.guest.AsSlice(), o.guest.AsSlice()...)})
		}
	}
	if err := errors.Join(c.AddSet(everywhere, all), c.AddSet(at, own), c.AddSet(loops, self)); err != nil {
		return err
	}
	for _, h := range []struct {
		name string
		hook *nftables.ChainHook
	}{{"prerouting", nftables.ChainHookPrerouting}, {"output", nftables.ChainHookOutput}} {
		// Programs that redirect connections of Services come first: nobody listens on a NodePort, so it cannot be refused.
		after := nftables.ChainPriorityRef(*nftables.ChainPriorityNATDest + 1)
		ch := c.AddChain(&nftables.Chain{Name: h.name, Table: t, Type: nftables.ChainTypeNAT, Hooknum: h.hook, Priority: after})
		add(c, ch, [][]expr.Any{
			join(within(netip.MustParsePrefix("127.0.0.0/8"), offsetTo4), pass()),
			join(toHost(), loadNetwork(offsetTo4, 4, unix.NFT_REG32_00), loadPort(unix.NFT_REG32_01), translate(mapAt, mapAtID)),
			join(toHost(), loadPort(unix.NFT_REG32_00), translate(mapEverywhere, mapEverywhereID)),
		})
	}
	back := c.AddChain(&nftables.Chain{
		Name: "postrouting", Table: t, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource,
	})
	add(c, back, [][]expr.Any{join(
		loadNetwork(offsetSource4, 4, unix.NFT_REG32_00), loadNetwork(offsetTo4, 4, unix.NFT_REG32_01),
		[]expr.Any{&expr.Lookup{SourceRegister: unix.NFT_REG32_00, SetName: setLoops, SetID: setLoopsID}, &expr.Masq{}},
	)})
	return nil
}

// toHost matches packets to an address of the host.
func toHost() []expr.Any {
	local := make([]byte, 4)
	binary.NativeEndian.PutUint32(local, unix.RTN_LOCAL)
	return join([]expr.Any{&expr.Fib{Register: 1, ResultADDRTYPE: true, FlagDADDR: true}}, equal(local))
}

// loadPort loads the protocol and the destination port into two registers.
func loadPort(register uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: register},
		&expr.Payload{DestRegister: register + 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
	}
}

// translate sends a packet to the address and port that the map has for the key in the first registers.
func translate(name string, id uint32) []expr.Any {
	return []expr.Any{
		&expr.Lookup{SourceRegister: unix.NFT_REG32_00, DestRegister: unix.NFT_REG32_00, IsDestRegSet: true, SetName: name, SetID: id},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: unix.NFT_REG32_00, RegProtoMin: unix.NFT_REG32_01, Specified: true},
	}
}

// slot is a port as a part of a key: parts fill complete registers.
func slot(port uint16) []byte { return append(binaryutil.BigEndian.PutUint16(port), 0, 0) }

func (o openPort) key() []byte {
	key := append([]byte{protocols[o.Protocol], 0, 0, 0}, slot(o.HostPort)...)
	if o.HostIP == "" {
		return key
	}
	return append(netip.MustParseAddr(o.HostIP).AsSlice(), key...) // a spec with another address is refused
}

// read returns the ports in the table, none if there is no table.
func (p *ports) read() (open []openPort, err error) {
	c, err := nftables.New()
	if err != nil {
		return nil, nftError(err)
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyIPv4)
	if err != nil && !absent(err) {
		return nil, fmt.Errorf("read the forwarded ports of the host: %w", nftError(err))
	}
	i := slices.IndexFunc(tables, func(t *nftables.Table) bool { return t.Name == p.table })
	if i < 0 {
		return nil, nil
	}
	everywhere, at, _ := p.sets(tables[i])
	for _, s := range []*nftables.Set{everywhere, at} {
		elements, err := c.GetSetElements(s)
		if err != nil {
			return nil, fmt.Errorf("read the forwarded ports of the host: %w", err)
		}
		for _, e := range elements {
			if o, ok := parsePort(e); ok {
				open = append(open, o)
			}
		}
	}
	return open, nil
}

// parsePort is the inverse of key and of the value beside it.
func parsePort(e nftables.SetElement) (o openPort, ok bool) {
	key := e.Key
	if len(key) == 12 {
		o.HostIP, key = netip.AddrFrom4([4]byte(key)).String(), key[4:]
	}
	if len(key) != 8 || len(e.Val) < 6 {
		return o, false
	}
	for name, number := range protocols {
		if number == key[0] {
			o.Protocol = name
		}
	}
	o.HostPort, o.GuestPort = binary.BigEndian.Uint16(key[4:]), binary.BigEndian.Uint16(e.Val[4:])
	o.guest = netip.AddrFrom4([4]byte(e.Val))
	return o, o.Protocol != ""
}

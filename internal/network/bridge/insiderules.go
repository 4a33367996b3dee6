package bridge

import (
	"net"
	"net/netip"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/network"
)

// The rules that translate the addresses of one guest. They are stateless: each address inside has one outside. So nothing is known
// about the guest that must outlive a frame, and errors of ICMP, fragments and offloaded checksums are translated as all packets are.
// The gateway inside stands for the host on the link only: the guest finds it by ARP and neighbour discovery, and may ping it.

// The offsets of the address that an error of ICMP quotes: that of the sender of the packet that caused it, and of its receiver.
const (
	icmpHeader    = 8
	quotedFrom4   = icmpHeader + offsetSource4
	quotedTo4     = icmpHeader + offsetTo4
	quotedSum4    = icmpHeader + headerSum4
	quotedFrom6   = icmpHeader + offsetSource6
	quotedTo6     = icmpHeader + offsetTo6
	headerSum4    = 10
	icmpSum       = 2
	targetAt      = 8 // of neighbour discovery, in its message
	arpOperation  = 6
	arpFrom       = 14
	arpTo         = 24
	arpAsks       = 1
	arpAnswers    = 2
	echoReply4    = 0
	echoReply6    = 129
	lastError6    = 127
	pseudoHeader  = 1 // NFT_PAYLOAD_L4CSUM_PSEUDOHDR of the kernel
	etherAddrSize = 6
)

// errors4 are the kinds of ICMP messages that quote a packet.
var errors4 = []byte{3, 4, 5, 11, 12}

// load loads a field behind base.
func load(base expr.PayloadBase, offset, length uint32) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: 1, Base: base, Offset: offset, Len: length}}
}

// write puts data in place of a field behind base. sum is the offset of the checksum behind base; with none there is no checksum.
func write(base expr.PayloadBase, offset uint32, data []byte, sum int) []expr.Any {
	p := &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: 1, Base: base, Offset: offset, Len: uint32(len(data))}
	if sum != none {
		p.CsumType, p.CsumOffset = expr.CsumTypeInet, uint32(sum)
	}
	return []expr.Any{&expr.Immediate{Register: 1, Data: data}, p}
}

const none = -1

// writeAddress puts an address into the header of a packet. The checksums of TCP, UDP and ICMPv6 cover it, too. The header of IPv6 has
// no checksum. There the kernel is told one in the address itself, because it writes the address last; without any, the library leaves out
// that there are those other checksums.
func writeAddress(offset uint32, a netip.Addr) []expr.Any {
	sum := headerSum4
	if a.Is6() {
		sum = int(offset)
	}
	out := write(expr.PayloadBaseNetworkHeader, offset, a.AsSlice(), sum)
	out[1].(*expr.Payload).CsumFlags = pseudoHeader
	return out
}

// has matches packets with an address at offset of the network header.
func has(offset uint32, a netip.Addr) []expr.Any {
	return join(loadNetwork(offset, uint32(a.BitLen()/8), 1), equal(a.AsSlice()))
}

// quotes matches errors of ICMP that quote an address at offset. The caller has matched the kind.
func quotes(offset uint32, a netip.Addr) []expr.Any {
	return join(load(expr.PayloadBaseTransportHeader, offset, uint32(a.BitLen()/8)), equal(a.AsSlice()))
}

// requote changes the address that errors of ICMP quote. In IPv4 the checksum of the quoted header changes with it, so that the
// one of the message, which covers both, stays as it is.
func requote(offset uint32, was, is netip.Addr) (out [][]expr.Any) {
	if is.Is6() {
		kinds := join(proto(unix.IPPROTO_ICMPV6), load(expr.PayloadBaseTransportHeader, 0, 1), []expr.Any{&expr.Cmp{Op: expr.CmpOpLte, Register: 1, Data: []byte{lastError6}}})
		return [][]expr.Any{join(etherType(unix.ETH_P_IPV6), kinds, quotes(offset, was), write(expr.PayloadBaseTransportHeader, offset, is.AsSlice(), icmpSum))}
	}
	for _, kind := range errors4 {
		out = append(out, join(etherType(unix.ETH_P_IP), icmpKind(unix.IPPROTO_ICMP, kind), quotes(offset, was), write(expr.PayloadBaseTransportHeader, offset, is.AsSlice(), quotedSum4)))
	}
	return out
}

func arp(operation byte) []expr.Any {
	return join(etherType(unix.ETH_P_ARP), loadNetwork(arpOperation, 2, 1), equal([]byte{0, operation}))
}

// addresses are those of one family that a guest and the host have on the link, as each of the two knows them.
type addresses struct{ guest, gateway netip.Addr }

func (g insider) inner4() addresses {
	return addresses{netip.MustParseAddr(g.inside.IP), netip.MustParseAddr(g.inside.Gateway)}
}

func (g insider) inner6() addresses {
	return addresses{netip.MustParseAddr(g.inside.IPv6), netip.MustParseAddr(g.inside.Gateway6)}
}

func (g insider) net4() netip.Prefix {
	return netip.PrefixFrom(g.inner4().guest, g.inside.Prefix).Masked()
}

func (g insider) net6() netip.Prefix {
	return netip.PrefixFrom(g.inner6().guest, g.inside.Prefix6).Masked()
}

// fromInside gives frames from the guest the address of its interface. Of IP it lets only packets with the guest's address inside pass,
// and what a guest without address sends. The rules for senders check the rest.
func (r rules) fromInside(g insider) [][]expr.Any {
	in, ip := g.inner4(), etherType(unix.ETH_P_IP)
	out := [][]expr.Any{
		join(arp(arpAnswers), has(arpFrom, in.guest), write(expr.PayloadBaseNetworkHeader, arpFrom, g.outer.AsSlice(), none), accept()),
		join(arp(arpAsks), has(arpFrom, in.guest), has(arpTo, in.gateway),
			write(expr.PayloadBaseNetworkHeader, arpFrom, g.outer.AsSlice(), none), write(expr.PayloadBaseNetworkHeader, arpTo, r.gateway.AsSlice(), none), accept()),
		join(ip, has(offsetSource4, netip.IPv4Unspecified()), proto(unix.IPPROTO_UDP), dport(67), accept()),
		join(ip, loadNetwork(offsetSource4, 4, 1), []expr.Any{&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: in.guest.AsSlice()}}, drop()),
		join(ip, has(offsetTo4, in.gateway), icmpKind(unix.IPPROTO_ICMP, icmpEchoRequest4), writeAddress(offsetTo4, r.gateway)),
		join(ip, within(g.net4(), offsetTo4), drop()), // nobody else is there
	}
	out = append(out, requote(quotedTo4, in.guest, g.outer)...)
	out = append(out, join(ip, writeAddress(offsetSource4, g.outer), accept()))
	if g.outer6.IsValid() {
		out = append(out, r.fromInside6(g)...)
	}
	return append(out, drop())
}

func (r rules) fromInside6(g insider) [][]expr.Any {
	in, gateway, ip := g.inner6(), gateway6(r.prefix6), etherType(unix.ETH_P_IPV6)
	solicits := join(ip, icmpKind(unix.IPPROTO_ICMPV6, neighbourSolicit))
	out := [][]expr.Any{
		join(solicits, has(offsetTo6, askedAt(in.gateway)), quotes(targetAt, in.gateway), writeAddress(offsetTo6, askedAt(gateway))),
		join(solicits, quotes(targetAt, in.gateway), write(expr.PayloadBaseTransportHeader, targetAt, gateway.AsSlice(), icmpSum)),
		join(solicits, load(expr.PayloadBaseTransportHeader, targetAt, 16), inNet(g.net6()), drop()), // nobody else is there
		join(ip, icmpKind(unix.IPPROTO_ICMPV6, neighbourAdvert), quotes(targetAt, in.guest), write(expr.PayloadBaseTransportHeader, targetAt, g.outer6.AsSlice(), icmpSum)),
		join(ip, proto(unix.IPPROTO_ICMPV6), has(offsetTo6, in.gateway), writeAddress(offsetTo6, gateway)),
		join(ip, within(g.net6(), offsetTo6), drop()),
	}
	out = append(out, requote(quotedTo6, in.guest, g.outer6)...)
	return append(out,
		join(ip, has(offsetSource6, in.guest), writeAddress(offsetSource6, g.outer6), accept()),
		join(ip, within(netip.MustParsePrefix("fe80::/10"), offsetSource6), accept()),
		join(ip, has(offsetSource6, netip.IPv6Unspecified()), accept()),
	)
}

// toInside is the other direction. bridge is the hardware address of the host on the link. Guests of a bridge that meet on the link
// ask each other, and must not be taken for the host.
func (r rules) toInside(g insider, bridge net.HardwareAddr) [][]expr.Any {
	in, ip := g.inner4(), etherType(unix.ETH_P_IP)
	host := join(load(expr.PayloadBaseLLHeader, etherAddrSize, etherAddrSize), equal(bridge))
	to := write(expr.PayloadBaseNetworkHeader, arpTo, in.guest.AsSlice(), none)
	from := write(expr.PayloadBaseNetworkHeader, arpFrom, in.gateway.AsSlice(), none)
	out := [][]expr.Any{
		join(etherType(unix.ETH_P_ARP), has(arpTo, g.outer), host, to, from, accept()),
		join(etherType(unix.ETH_P_ARP), has(arpTo, g.outer), to, accept()),
		join(etherType(unix.ETH_P_ARP), drop()),
		join(ip, has(offsetSource4, r.gateway), icmpKind(unix.IPPROTO_ICMP, echoReply4), writeAddress(offsetSource4, in.gateway)),
	}
	out = append(out, requote(quotedFrom4, g.outer, in.guest)...)
	out = append(out, join(ip, has(offsetTo4, g.outer), writeAddress(offsetTo4, in.guest)))
	if g.outer6.IsValid() {
		out = append(out, r.toInside6(g)...)
	}
	return out
}

func (r rules) toInside6(g insider) [][]expr.Any {
	in, gateway, ip := g.inner6(), gateway6(r.prefix6), etherType(unix.ETH_P_IPV6)
	kind := func(k byte) []expr.Any { return join(ip, icmpKind(unix.IPPROTO_ICMPV6, k)) }
	out := [][]expr.Any{
		join(kind(routerAdvert), has(offsetTo6, netip.IPv6LinkLocalAllNodes()), drop()), // it gets advertisements of its own
		join(kind(neighbourSolicit), has(offsetTo6, askedAt(g.outer6)), writeAddress(offsetTo6, askedAt(in.guest)),
			write(expr.PayloadBaseLLHeader, 0, g.mac, none)),
		join(kind(neighbourSolicit), quotes(targetAt, g.outer6), write(expr.PayloadBaseTransportHeader, targetAt, in.guest.AsSlice(), icmpSum)),
		join(kind(neighbourAdvert), quotes(targetAt, gateway), write(expr.PayloadBaseTransportHeader, targetAt, in.gateway.AsSlice(), icmpSum)),
	}
	for _, k := range []byte{neighbourSolicit, neighbourAdvert, echoReply6} {
		out = append(out, join(kind(k), has(offsetSource6, gateway), writeAddress(offsetSource6, in.gateway)))
	}
	out = append(out, requote(quotedFrom6, g.outer6, in.guest)...)
	return append(out, join(ip, has(offsetTo6, g.outer6), writeAddress(offsetTo6, in.guest)))
}

// askedAt is the group at which a machine is asked for the hardware address of a (RFC 4291, section 2.7.1).
func askedAt(a netip.Addr) netip.Addr {
	of, group := a.As16(), netip.MustParseAddr("ff02::1:ff00:0").As16()
	copy(group[13:], of[13:])
	return netip.AddrFrom16(group)
}

// inNet matches if the address in register 1 is in p.
func inNet(p netip.Prefix) []expr.Any { return within(p, 0)[1:] }

// limited lets only packets to the ports pass, beside ICMP, which belongs to no port. Others get the answer of a port that nobody serves.
func limited(ports []network.Port) [][]expr.Any {
	const reset, unreachable, port = 1, 2, 1 // NFT_REJECT_TCP_RST, NFT_REJECT_ICMPX_UNREACH, NFT_REJECT_ICMPX_PORT_UNREACH of the kernel
	out := [][]expr.Any{join(proto(unix.IPPROTO_ICMP), accept()), join(proto(unix.IPPROTO_ICMPV6), accept())}
	for _, p := range ports {
		out = append(out, join(portRange(p), accept()))
	}
	return append(out,
		join(proto(unix.IPPROTO_TCP), []expr.Any{&expr.Reject{Type: reset}}),
		[]expr.Any{&expr.Reject{Type: unreachable, Code: port}})
}

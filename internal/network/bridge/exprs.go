package bridge

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// The building blocks of rules. Each one loads register 1 and compares it, unless its name begins with load.

func join(parts ...[]expr.Any) []expr.Any { return slices.Concat(parts...) }

func accept() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}} }

func drop() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}} }

// pass returns to the chain that jumped here.
func pass() []expr.Any { return []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}} }

func jump(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}
}

func equal(data []byte) []expr.Any {
	return []expr.Any{&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data}}
}

// linkName is a link name in the kernel's form for comparison: padded with zeros.
func linkName(name string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, name)
	return b
}

func iif(op expr.CmpOp, name string) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: op, Register: 1, Data: linkName(name)}}
}

func oif(op expr.CmpOp, name string) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, &expr.Cmp{Op: op, Register: 1, Data: linkName(name)}}
}

// overIP matches packets of one family: unix.NFPROTO_IPV4 or unix.NFPROTO_IPV6.
func overIP(family byte) []expr.Any {
	return join([]expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}}, equal([]byte{family}))
}

func proto(p byte) []expr.Any {
	return join([]expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}}, equal([]byte{p}))
}

// The offsets of addresses in the headers of IPv4 and IPv6.
const (
	offsetSource4, offsetTo4 = 12, 16
	offsetSource6, offsetTo6 = 8, 24
)

// source matches packets from p. The caller has matched the family.
func source(p netip.Prefix) []expr.Any {
	if p.Addr().Is6() {
		return within(p, offsetSource6)
	}
	return within(p, offsetSource4)
}

// to matches packets to p, in the tables of both families.
func to(p netip.Prefix) []expr.Any {
	if p.Addr().Is6() {
		return join(etherType(unix.ETH_P_IPV6), within(p, offsetTo6))
	}
	return join(etherType(unix.ETH_P_IP), within(p, offsetTo4))
}

// within matches packets whose network header has an address of p at offset.
func within(p netip.Prefix, offset uint32) []expr.Any {
	bits := p.Addr().BitLen()
	length := uint32(bits / 8)
	return append(loadNetwork(offset, length, 1),
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: length, Mask: net.CIDRMask(p.Bits(), bits), Xor: make([]byte, length)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Addr().AsSlice()})
}

// destination matches packets to a, of a's family.
func destination(a netip.Addr) []expr.Any {
	if a.Is6() {
		return join(overIP(unix.NFPROTO_IPV6), loadNetwork(offsetTo6, 16, 1), equal(a.AsSlice()))
	}
	return join(overIP(unix.NFPROTO_IPV4), loadNetwork(offsetTo4, 4, 1), equal(a.AsSlice()))
}

func dport(port uint16) []expr.Any {
	return join([]expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}}, equal(binaryutil.BigEndian.PutUint16(port)))
}

// icmpKind matches messages of one kind, of ICMP or ICMPv6.
func icmpKind(protocol, kind byte) []expr.Any {
	return join(proto(protocol), []expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 1}}, equal([]byte{kind}))
}

// ctBits matches packets of a connection that has any of the bits.
func ctBits(key expr.CtKey, bits uint32) []expr.Any {
	mask := make([]byte, 4)
	binary.NativeEndian.PutUint32(mask, bits)
	return []expr.Any{
		&expr.Ct{Key: key, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask, Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}

// ctReply matches replies in connections that the other side started.
func ctReply() []expr.Any {
	const reply = 1 // IP_CT_DIR_REPLY of the kernel
	return join([]expr.Any{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: 1}}, equal([]byte{reply}))
}

// ctOriginal matches packets of connections that were opened with data as the value of key.
func ctOriginal(key expr.CtKey, data []byte) []expr.Any {
	return join([]expr.Any{&expr.Ct{Key: key, Register: 1, Direction: 0}}, equal(data)) // 0: IP_CT_DIR_ORIGINAL of the kernel
}

func etherType(t uint16) []expr.Any {
	return join([]expr.Any{&expr.Meta{Key: expr.MetaKeyPROTOCOL, Register: 1}}, equal(binaryutil.BigEndian.PutUint16(t)))
}

// tagged matches frames with a tag of a virtual LAN. The kernel has taken the tag out of a frame that it received, so that the
// protocol is the one behind it, but shows the tag where the frame had it.
func tagged(protocol uint16) []expr.Any {
	return join([]expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseLLHeader, Offset: 12, Len: 2}}, equal(binaryutil.BigEndian.PutUint16(protocol)))
}

// The registers of the keys of our sets: the tap in 1 (16 bytes), the MAC in 2 (6 of 8 bytes), then the address.

func loadTap() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: unix.NFT_REG_1}}
}

func loadEther() []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: unix.NFT_REG_2, Base: expr.PayloadBaseLLHeader, Offset: 6, Len: 6}}
}

func loadNetwork(offset, length, register uint32) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length}}
}

func lookupGuest() []expr.Any {
	return []expr.Any{&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: setGuests, SetID: setGuestsID}}
}

package bridge

import (
	"fmt"
	"net/netip"

	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/ipam"
)

// meeting is how packets get from one guest of the bridge to another. A program that redirects connections on the host, as the
// proxy of Services does, must see both of their directions. So must rules that filter them.
type meeting int

const (
	direct   meeting = iota // frames go from port to port
	apart                   // not at all
	routed                  // through the host: the ports are isolated, and the host answers ARP for the whole subnet
	filtered                // from port to port, and the kernel shows them to the rules for routed packets (br_netfilter)
)

// filteredKey is the setting of the namespace that shows bridged packets to the rules for routed ones. With it the kernel bridges
// a packet of a guest that was redirected to another port, which isolated ports forbid. Without the module there is no key.
const filteredKey = "bridge/bridge-nf-call-iptables"

// meeting decides how guests meet. The owner of an adopted bridge has decided, and without the guard there are no rules.
func (c Config) meeting() meeting {
	switch {
	case c.Isolation:
		return apart
	case c.Switched || c.Adopt || c.Unguarded:
		return direct
	}
	if on, _ := host.Sysctl(filteredKey); on == "1" { // "" without the module
		return filtered
	}
	return routed
}

// between checks frames from port to port. Where policies are enforced, a guest gets only IP that is addressed to it, in a frame
// to it, because the rules for routed packets find its policies by that address, and the sender's by the sender's address. A
// guest may have more addresses than it was given: link-local ones, or those of its own containers. So broadcasts, multicast
// and IPv6 between link-local addresses go to the host only, as on a routed bridge.
func (r rules) between() [][]expr.Any {
	out := [][]expr.Any{echo()}
	if r.polices(true) != nil {
		return out
	}
	guest := func(set string, id, offset, length uint32) []expr.Any {
		return join(receiver(), loadNetwork(offset, length, unix.NFT_REG32_06), []expr.Any{&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: set, SetID: id}})
	}
	out = append(out,
		join(r.tap(expr.MetaKeyIIFNAME, expr.CmpOpNeq), r.tap(expr.MetaKeyOIFNAME, expr.CmpOpNeq), accept()),
		join(tagged(unix.ETH_P_8021Q), drop()), // from ports that are not taps
		join(tagged(unix.ETH_P_8021AD), drop()),
		join(etherType(unix.ETH_P_IP), guest(setGuests, setGuestsID, offsetTo4, 4), accept()),
		join(etherType(unix.ETH_P_ARP), accept()),
	)
	if r.prefix6.IsValid() {
		linkLocal := netip.MustParsePrefix("fe80::/10")
		out = append(out,
			join(neighbours(), accept()),
			join(etherType(unix.ETH_P_IPV6), source(linkLocal), drop()),
			join(to(linkLocal), drop()),
			join(etherType(unix.ETH_P_IPV6), guest(setGuests6, setGuests6ID, offsetTo6, 16), accept()),
		)
	}
	return append(out,
		join(r.tap(expr.MetaKeyOIFNAME, expr.CmpOpEq), drop()),
		join(group(), drop()), // to ports that are not taps
		join(to(netip.MustParsePrefix("224.0.0.0/3")), drop()),
		join(to(netip.PrefixFrom(lastOf(r.prefix), 32)), drop()),
		join(to(netip.MustParsePrefix("ff00::/8")), drop()),
	)
}

// tap matches frames whose link, by key, is one of our taps, or is none.
func (r rules) tap(key expr.MetaKey, op expr.CmpOp) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, &expr.Cmp{Op: op, Register: 1, Data: []byte(r.tapPrefix)}}
}

// receiver loads the first two parts of the key of a set: the link and the hardware address that a frame goes to.
func receiver() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: unix.NFT_REG_1},
		&expr.Payload{DestRegister: unix.NFT_REG_2, Base: expr.PayloadBaseLLHeader, Offset: 0, Len: 6},
	}
}

// group matches frames to a group of machines.
func group() []expr.Any {
	return join([]expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseLLHeader, Offset: 0, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{1}, Xor: []byte{0}},
	}, equal([]byte{1}))
}

// echo drops what a hairpin port would return to the guest that sent it to a group of machines. A guest that sees its own
// messages may believe that another machine has its address.
func echo() []expr.Any {
	back := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: unix.NFT_REG_1}, loadEther()[0],
		&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: setSenders, SetID: setSendersID},
	}
	return join(group(), back, drop())
}

// ensureRouted makes the host answer ARP for all of the subnet, or only for itself. The kernel delays such answers by default,
// for networks where another machine may answer too.
func (n *Network) ensureRouted(m meeting) error {
	answers := "0"
	if m == routed {
		answers = "1"
	}
	for _, s := range [][2]string{
		{"ipv4/neigh/" + n.cfg.Bridge + "/proxy_delay", "0"},
		{"ipv4/conf/" + n.cfg.Bridge + "/send_redirects", "0"},
		{"ipv4/conf/" + n.cfg.Bridge + "/proxy_arp_pvlan", answers},
	} {
		if err := host.SetSysctl(s[0], s[1]); err != nil {
			return err
		}
	}
	return nil
}

// freshTap plugs the tap of a guest that does not run.
func (n *Network) freshTap(lv *live, l ipam.Lease, bridge int) error {
	if err := n.plugTap(l.Tap, l, bridge, lv.mtu); err != nil || n.cfg.Adopt {
		return err
	}
	return setPort(l.Tap, lv.rules.meeting)
}

// keptTap plugs the tap of a guest that may run. If the guest was not routed before, it knows the hardware addresses of other
// guests, and loses them for a while once it is. That is less harm than a policy without effect, also on guests that start
// later, because a port that is not isolated reaches those that are. Without policies the guest is routed from its next start.
func (n *Network) keptTap(lv *live, l ipam.Lease, bridge int, policed bool) error {
	if err := n.plugTap(l.Tap, l, bridge, lv.mtu); err != nil || n.cfg.Adopt || lv.rules.meeting == routed && !policed {
		return err
	}
	return setPort(l.Tap, lv.rules.meeting)
}

// setPort sets what the bridge does at a tap. An isolated port reaches no other isolated one. A hairpin port also gets frames of
// its own guest: packets that were redirected to their sender. It uses the name of the tap, which saves a look-up of its index.
func setPort(name string, m meeting) error {
	flag := func(on bool) []byte {
		if on {
			return []byte{1}
		}
		return []byte{0}
	}
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK)
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_SLAVE_KIND, nl.NonZeroTerminated("bridge"))
	port := info.AddRtAttr(nl.IFLA_INFO_SLAVE_DATA, nil)
	port.AddRtAttr(nl.IFLA_BRPORT_ISOLATED, flag(m == apart || m == routed))
	port.AddRtAttr(nl.IFLA_BRPORT_MODE, flag(m == filtered))
	req.AddData(info)
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("set the bridge port of tap %s: %w", name, err)
	}
	return nil
}

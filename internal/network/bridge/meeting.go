package bridge

import (
	"fmt"

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

// keptTap plugs the tap of a guest that may run. If the guest was not routed before, it is from its next start: it knows the
// hardware addresses of other guests, and would lose them for a while.
func (n *Network) keptTap(lv *live, l ipam.Lease, bridge int) error {
	if err := n.plugTap(l.Tap, l, bridge, lv.mtu); err != nil || n.cfg.Adopt || lv.rules.meeting == routed {
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

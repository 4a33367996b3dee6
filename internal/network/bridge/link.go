package bridge

import (
	"bytes"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/ipam"
	"cocoonstack.io/cocoon/internal/vm"
)

const aliasMark = "cocoon:" // prefix of the alias of every link of any instance

// bridgeAlias is the mark of owner's bridge.
func bridgeAlias(owner string) string { return aliasMark + owner + " bridge" }

// tapAlias is the mark of owner's tap. It names the interface, so that the kernel keeps the lease.
func tapAlias(owner string, l ipam.Lease) string {
	policed := ""
	if l.Policed {
		policed = " policed=1"
	}
	return fmt.Sprintf("%s%s tap vm=%s nic=%d mac=%s ip=%s%s name=%s", aliasMark, owner, l.ID, l.Index, l.MAC, l.IP, policed, l.VM)
}

// parseTapAlias is the inverse of tapAlias. It reports whether alias marks a tap of owner.
func parseTapAlias(owner, alias string) (ipam.Lease, bool) {
	rest, ok := strings.CutPrefix(alias, aliasMark+owner+" tap ")
	if !ok {
		return ipam.Lease{}, false
	}
	var l ipam.Lease
	for _, field := range strings.Fields(rest) {
		k, v, _ := strings.Cut(field, "=")
		switch k {
		case "vm":
			l.ID = vm.ID(v)
		case "nic":
			l.Index, _ = strconv.Atoi(v)
		case "mac":
			l.MAC = v
		case "ip":
			l.IP, _ = netip.ParseAddr(v)
		case "policed":
			l.Policed = v == "1"
		case "name":
			l.VM = v
		}
	}
	return l, true
}

// tapPrefix is the start of the name of every tap of owner.
func tapPrefix(owner string) string { return "ct" + letters(3, "owner", owner) }

// tapName returns the name with number salt for the tap of an interface: 15 characters, the maximum for a link name.
func tapName(owner string, id vm.ID, index, salt int) string {
	return tapPrefix(owner) + letters(10, "tap", owner, string(id), strconv.Itoa(index), strconv.Itoa(salt))
}

// letters returns a hash of parts as n lower-case letters and digits, 5 bits each.
func letters(n int, parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:n]
}

// ownBridge reports whether l is the bridge of n. One that has our MAC but no alias yet was created just before a crash.
func (n *Network) ownBridge(l netlink.Link) bool {
	alias := l.Attrs().Alias
	return l.Type() == "bridge" &&
		(alias == bridgeAlias(n.cfg.owner()) || alias == "" && bytes.Equal(l.Attrs().HardwareAddr, n.mac))
}

// ensureBridge creates the bridge with our address and brings it up. created says that it did not exist before.
func (n *Network) ensureBridge(lv *live) (created bool, err error) {
	if n.cfg.Adopt {
		return false, nil
	}
	br, err := host.FindLink(n.cfg.Bridge)
	if err != nil {
		return false, err
	}
	if br == nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.HardwareAddr, attrs.MTU = n.cfg.Bridge, n.mac, lv.mtu
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
			if errors.Is(err, unix.EOPNOTSUPP) {
				return false, errdefs.Preconditionf("this kernel has no bridges; load the module with `modprobe bridge`")
			}
			return false, fmt.Errorf("make bridge %s: %w", n.cfg.Bridge, err)
		}
		created = true
		if br, err = netlink.LinkByName(n.cfg.Bridge); err != nil {
			return created, fmt.Errorf("look for bridge %s: %w", n.cfg.Bridge, err)
		}
	}
	if err := netlink.LinkSetAlias(br, bridgeAlias(n.cfg.owner())); err != nil {
		return created, fmt.Errorf("mark bridge %s: %w", n.cfg.Bridge, err)
	}
	if err := n.ensureIPv6(br, lv.prefix6); err != nil {
		return created, err
	}
	if err := netlink.LinkSetMTU(br, lv.mtu); err != nil {
		return created, fmt.Errorf("set MTU %d of bridge %s: %w", lv.mtu, n.cfg.Bridge, err)
	}
	if err := setAddress(br, netip.PrefixFrom(lv.gateway, lv.prefix.Bits())); err != nil {
		return created, err
	}
	if err := n.ensureRouted(lv.rules.meeting); err != nil {
		return created, err
	}
	if err := netlink.LinkSetUp(br); err != nil {
		return created, fmt.Errorf("bring up bridge %s: %w", n.cfg.Bridge, err)
	}
	return created, nil
}

// setAddress makes want the only IPv4 address of l.
func setAddress(l netlink.Link, want netip.Prefix) error {
	have, err := netlink.AddrList(l, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", l.Attrs().Name, err)
	}
	for _, a := range have {
		if a.IPNet.String() != want.String() {
			if err := netlink.AddrDel(l, &a); err != nil {
				return fmt.Errorf("remove address %s from %s: %w", a.IPNet, l.Attrs().Name, err)
			}
		}
	}
	ipnet := &net.IPNet{IP: want.Addr().AsSlice(), Mask: net.CIDRMask(want.Bits(), 32)}
	if err := netlink.AddrReplace(l, &netlink.Addr{IPNet: ipnet}); err != nil {
		return fmt.Errorf("give %s the address %s: %w", l.Attrs().Name, want, err)
	}
	return nil
}

// makeTap creates a persistent tap and puts it on the bridge.
func (n *Network) makeTap(lv *live, l ipam.Lease, bridge int) error {
	return host.MakeTap(l.Tap, func() error {
		// A port of a bridge does not need IPv6, and with a thousand taps the kernel scans the routes of all of them whenever
		// one is added or removed. If the host does not allow this, it only has more work.
		_ = host.QuietIPv6(l.Tap)
		return n.freshTap(lv, l, bridge)
	})
}

// plugTap marks a tap, puts it on the bridge and brings it up, in one request. It may be repeated.
func (n *Network) plugTap(name string, l ipam.Lease, bridge, mtu int) error {
	req := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Flags, msg.Change = unix.IFF_UP, unix.IFF_UP
	req.AddData(msg)
	req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)))
	req.AddData(nl.NewRtAttr(unix.IFLA_IFALIAS, []byte(tapAlias(n.cfg.owner(), l))))
	req.AddData(nl.NewRtAttr(unix.IFLA_MTU, nl.Uint32Attr(uint32(mtu))))
	if n.cfg.Adopt {
		// A bridge without its own MAC takes the lowest MAC of its ports. A lower one would change the bridge's MAC, which its
		// neighbours know. Ours are higher than those of other hypervisors (fe and the rest of the guest's MAC).
		mac, err := net.ParseMAC(l.MAC)
		if err != nil {
			return fmt.Errorf("tap %s: %w", name, err)
		}
		req.AddData(nl.NewRtAttr(unix.IFLA_ADDRESS, append([]byte{0xfe, 0xff}, mac[2:]...)))
	}
	req.AddData(nl.NewRtAttr(unix.IFLA_MASTER, nl.Uint32Attr(uint32(bridge))))
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("put tap %s on bridge %s: %w", name, n.cfg.Bridge, err)
	}
	return nil
}

// turns lets only one caller at a time create or remove links of a network. The kernel has one lock for all links, so waiting
// here loses nothing. A sysctl write that finds that lock taken retries again and again, which took longer than the rest of
// creating a tap. The caller whose turn it is removes all the queued links.
type turns struct {
	mu sync.Mutex

	queue   sync.Mutex
	removed []*removal // queued for removal
}

type removal struct {
	link netlink.Link
	err  error // valid once the caller of remove has had its turn
}

// make calls fn, which creates or changes a link.
func (t *turns) make(fn func() error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fn()
}

// remove removes a link. It is no error if the link is already gone.
func (t *turns) remove(l netlink.Link) error {
	r := &removal{link: l}
	t.queue.Lock()
	t.removed = append(t.removed, r)
	t.queue.Unlock()

	t.mu.Lock()
	defer t.mu.Unlock()
	t.queue.Lock()
	todo := t.removed // empty if another caller removed ours too
	t.removed = nil
	t.queue.Unlock()
	var links []netlink.Link
	for _, other := range todo {
		links = append(links, other.link)
	}
	for i, err := range host.RemoveLinks(links) {
		todo[i].err = err
	}
	return r.err
}

package bridge

import (
	"net"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/mdlayher/ndp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

const testSubnet6 = "fd00:88:7::/64"

func start6(t *testing.T, cfg Config) *Network {
	t.Helper()
	netns.Require(t)
	need.Tun(t)
	cfg.Subnet, cfg.Subnet6 = testSubnet, testSubnet6
	before := snapshot(t)
	t.Cleanup(func() {
		if after := snapshot(t); !slices.Equal(after, before) {
			t.Errorf("%v became %v", before, after)
		}
	})
	return start(t, cfg)
}

// addresses6 returns the guest's IPv6 addresses. all includes those for which duplicate detection still runs.
func (g guest) addresses6(all bool) (out []netip.Addr) {
	g.t.Helper()
	g.do(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		list, err := netlink.AddrList(eth0, netlink.FAMILY_V6)
		for _, a := range list {
			if addr, ok := netip.AddrFromSlice(a.IP); ok && (all || a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0) {
				out = append(out, addr)
			}
		}
		return err
	})
	return out
}

// joined waits until the guest has made the address that its NIC names.
func (g guest) joined() guest {
	g.t.Helper()
	want := netip.MustParseAddr(g.nic.IPv6)
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); <-time.After(20 * time.Millisecond) {
		if slices.Contains(g.addresses6(false), want) {
			return g
		}
	}
	g.t.Fatalf("the guest has %v, not %s", g.addresses6(true), want)
	return g
}

func twoGuests(t *testing.T, n *Network) (a, b guest) {
	t.Helper()
	a, b = newGuest(t, n, "a"), newGuest(t, n, "b")
	return a.joined(), b.joined()
}

func (g guest) add6(cidr string) {
	g.t.Helper()
	g.do(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		_, ipnet, err := net.ParseCIDR(cidr)
		if err != nil {
			return err
		}
		ipnet.IP = netip.MustParsePrefix(cidr).Addr().AsSlice()
		return netlink.AddrReplace(eth0, &netlink.Addr{IPNet: ipnet, Flags: unix.IFA_F_NODAD})
	})
}

func TestIPv6(t *testing.T) {
	const gateway = "fd00:88:7::1"
	n := start6(t, Config{NAT: true, MTU: 1400, DNS: []string{gateway}})
	a, b := twoGuests(t, n)
	if !a.pings(gateway, patience) {
		t.Error("the router does not answer")
	}
	if !a.pings(b.nic.IPv6, patience) {
		t.Error("guests do not reach each other")
	}
	closed, _ := listen(t, "", net.JoinHostPort(gateway, "0"))
	if a.dials(closed, impatience) {
		t.Error("a guest reached a TCP port of the host")
	}
	dns, _ := listen(t, "", net.JoinHostPort(gateway, "53"))
	if !a.dials(dns, patience) {
		t.Error("a guest does not reach the configured DNS server")
	}
	served, _ := listen(t, a.ns, net.JoinHostPort(a.nic.IPv6, "0"))
	if !dial(t, served, patience) {
		t.Error("the host does not reach its guest")
	}
	far := outside(t)
	up6(t, "", "uplink", "2001:db8::1/64")
	up6(t, far, "eth0", "2001:db8::2/64")
	service, peers := listen(t, far, "[2001:db8::2]:0")
	if !a.dials(service, patience) {
		t.Fatal("a guest does not get out")
	}
	if peer := <-peers; peer != "2001:db8::1" {
		t.Errorf("outside it is seen as %s", peer)
	}
}

func up6(t *testing.T, ns, link, cidr string) {
	t.Helper()
	add := func() error {
		l, err := netlink.LinkByName(link)
		if err != nil {
			return err
		}
		p := netip.MustParsePrefix(cidr)
		return netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 128)}, Flags: unix.IFA_F_NODAD})
	}
	if ns != "" {
		netns.Do(t, ns, add)
	} else if err := add(); err != nil {
		t.Fatal(err)
	}
}

// Ports that return frames to their guest must not return what finds out whether an address is taken.
func TestIPv6Filtered(t *testing.T) {
	netns.Require(t)
	showBridged(t)
	a, b := twoGuests(t, start6(t, Config{NAT: true}))
	if !a.pings(b.nic.IPv6, patience) {
		t.Error("guests do not reach each other")
	}
}

func TestIPv6Isolation(t *testing.T) {
	n := start6(t, Config{NAT: true, Isolation: true})
	a, b := twoGuests(t, n)
	if !a.pings("fd00:88:7::1", patience) {
		t.Fatal("the router does not answer")
	}
	if a.pings(b.nic.IPv6, impatience) {
		t.Error("isolated guests reach each other")
	}
}

func TestIPv6SpoofingEndsAtTheTap(t *testing.T) {
	rogue := netip.MustParsePrefix("fd00:bad::/64")
	n := start6(t, Config{NAT: true})
	a, b := twoGuests(t, n)
	if !a.pings(b.nic.IPv6, patience) {
		t.Fatal("honest guests do not reach each other")
	}
	a.playsRouter(rogue)
	if !b.pings("fd00:88:7::1", patience) {
		t.Error("a guest took the router's address away from another")
	}
	if slices.ContainsFunc(b.addresses6(true), rogue.Contains) {
		t.Error("a guest plays the router for another")
	}
	a.add6("fd00:88:7::77/64")
	a.do(func() error { // the kernel would prefer the older address as source
		_, dst, err := net.ParseCIDR("fd00:88:7::1/128")
		if err != nil {
			return err
		}
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.RouteReplace(&netlink.Route{LinkIndex: eth0.Attrs().Index, Dst: dst, Src: net.ParseIP("fd00:88:7::77")})
	})
	if a.pings("fd00:88:7::1", impatience) {
		t.Error("a guest speaks under an address that is not its own")
	}
}

// Without the guard the same guest deceives its neighbour: so the messages in the test above would work.
func TestIPv6UnguardedIsFooled(t *testing.T) {
	rogue := netip.MustParsePrefix("fd00:bad::/64")
	n := start6(t, Config{Unguarded: true})
	a, b := twoGuests(t, n)
	a.playsRouter(rogue)
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); <-time.After(20 * time.Millisecond) {
		if slices.ContainsFunc(b.addresses6(true), rogue.Contains) {
			return
		}
	}
	t.Error("the advertisement of another guest has no effect: the test of the guard proves nothing")
}

// playsRouter advertises a prefix to all, and claims the router's address.
func (g guest) playsRouter(prefix netip.Prefix) {
	g.t.Helper()
	mac, err := net.ParseMAC(g.nic.MAC)
	if err != nil {
		g.t.Fatal(err)
	}
	g.do(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		index := eth0.Attrs().Index
		c, _, err := ndp.Listen(&net.Interface{Index: index, Name: strconv.Itoa(index), HardwareAddr: mac}, ndp.LinkLocal)
		if err != nil {
			return err
		}
		defer c.Close()
		for _, m := range []ndp.Message{
			&ndp.RouterAdvertisement{RouterLifetime: time.Hour, Options: []ndp.Option{&ndp.PrefixInformation{
				PrefixLength: 64, OnLink: true, AutonomousAddressConfiguration: true, ValidLifetime: time.Hour, PreferredLifetime: time.Hour, Prefix: prefix.Addr(),
			}}},
			&ndp.NeighborAdvertisement{Override: true, TargetAddress: netip.MustParseAddr("fd00:88:7::1"), Options: []ndp.Option{
				&ndp.LinkLayerAddress{Direction: ndp.Target, Addr: mac},
			}},
		} {
			if err := c.WriteTo(m, nil, netip.IPv6LinkLocalAllNodes()); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestIPv6Refuses(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	for _, bad := range []string{"fd00::/48", "fd00::1/64", "10.0.0.0/24", "ff02::/64", "fe80::/64", "::/64", "x", "::ffff:10.0.0.0/64"} {
		if _, err := New(Config{StateDir: t.TempDir(), Subnet6: bad}, nil); !errdefs.IsInvalid(err) {
			t.Errorf("subnet6 %q: %v", bad, err)
		}
	}
	for name, cfg := range map[string]Config{
		"no such mode":          {Subnet6: testSubnet6, IPv6Mode: "dhcp"},
		"a mode without prefix": {IPv6Mode: IPv6Stateful},
		"DNS without prefix":    {DNS: []string{"fd00::53"}},
		"DNS with a zone":       {Subnet6: testSubnet6, DNS: []string{"fe80::53%eth0"}},
	} {
		cfg.StateDir = t.TempDir()
		if _, err := New(cfg, nil); !errdefs.IsInvalid(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := New(Config{StateDir: t.TempDir(), Subnet6: testSubnet6, Adopt: true}, nil); !errdefs.IsInvalid(err) {
		t.Errorf("with an adopted bridge: %v", err)
	}
	t.Run("an address in the prefix", func(t *testing.T) {
		addLink(t, "other0", "192.0.2.1/24")
		up6(t, "", "other0", "fd00:88:7::9/128")
		refused(t, Config{Subnet: testSubnet, Subnet6: testSubnet6}, testSubnet6, "fd00:88:7::9", "other0")
	})
	t.Run("a host that listens to a router", func(t *testing.T) {
		l := addLink(t, "other0", "192.0.2.1/24")
		up6(t, "", "other0", "2001:db8::9/64")
		if err := host.SetSysctl("ipv6/conf/other0/accept_ra", "1"); err != nil {
			t.Fatal(err)
		}
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Gw: net.ParseIP("fe80::99"), Protocol: unix.RTPROT_RA, Family: netlink.FAMILY_V6}); err != nil {
			t.Fatal(err)
		}
		refused(t, Config{Subnet: testSubnet, Subnet6: testSubnet6}, "accept_ra=2", "other0")
	})
}

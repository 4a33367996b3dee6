package bridge

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/radv"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

// inside6 attaches a guest that is masqueraded and configures it as its DHCP clients would. It waits for the router.
func inside6(t *testing.T, n *Network, name string, spec vm.NICSpec) guest {
	t.Helper()
	g := within4(t, n, name, spec)
	g.add6("fd10:0:2::2/120")
	g.findsRouter()
	return g
}

func (g guest) findsRouter() {
	g.t.Helper()
	waitFor(g.t, "a router", func() (found bool) {
		g.do(func() error {
			routes, err := netlink.RouteList(nil, netlink.FAMILY_V6)
			found = slices.ContainsFunc(routes, func(r netlink.Route) bool { return r.Gw.Equal(net.ParseIP("fe80::1")) })
			return err
		})
		return found
	})
}

func (g guest) serve6() (outside string, peers <-chan string) {
	g.t.Helper()
	addr, peers := listen(g.t, g.ns, "[fd10:0:2::2]:0")
	return net.JoinHostPort(g.nic.IPv6, portText(addr)), peers
}

func TestMasqueradedGuest6(t *testing.T) {
	t.Run("slaac", func(t *testing.T) { masqueradedGuest6(t, Config{NAT: true}) })
	t.Run("stateful", func(t *testing.T) { masqueradedGuest6(t, Config{NAT: true, IPv6Mode: IPv6Stateful}) })
}

func masqueradedGuest6(t *testing.T, cfg Config) {
	netns.Require(t)
	need.Tun(t)
	far := outside(t)
	n := start6(t, cfg)
	up6(t, "", "uplink", "2001:db8::1/64")
	up6(t, far, "eth0", "2001:db8::2/64")
	g, twin, plain := inside6(t, n, "a", vm.NICSpec{}), inside6(t, n, "twin", vm.NICSpec{}), configured(t, n, "plain")
	if cfg.IPv6Mode == IPv6Stateful {
		plain.add6(plain.nic.IPv6 + "/128")
		plain.findsRouter()
	} else {
		plain.joined()
	}
	t.Run("nic", func(t *testing.T) {
		guest := g.nic.Guest()
		if d := diff.Of([]string{"fd10:0:2::2/120"}, guest.Addresses); d != "" || guest.IPv6 != "fd10:0:2::2" || !netip.MustParsePrefix(testSubnet6).Contains(netip.MustParseAddr(g.nic.IPv6)) {
			t.Errorf("%+v %s", g.nic, d)
		}
		for _, a := range g.addresses6(true) {
			if netip.MustParsePrefix(testSubnet6).Contains(a) {
				t.Errorf("the guest has made the address %s", a)
			}
		}
	})
	t.Run("dhcp", func(t *testing.T) {
		m := g.says6(radv.Address(radv.LinkLocal, macOf(t, g.nic)), message6(t, g.nic, dhcpv6.MessageTypeSolicit).ToBytes(), patience)
		if m == nil || leased6(m) != "fd10:0:2::2" {
			t.Errorf("answered: %v", m)
		}
	})
	t.Run("out", func(t *testing.T) {
		if !g.pings("fd10:0:2::1", patience) {
			t.Error("the router does not answer")
		}
		service, peers := listen(t, far, "[2001:db8::2]:0")
		g.want("beyond the host", service, true)
		if peer := <-peers; peer != "2001:db8::1" {
			t.Errorf("outside it is seen as %s", peer)
		}
		if g.pings("fd10:0:2::77", impatience) {
			t.Error("somebody else answers in its network")
		}
	})
	t.Run("in", func(t *testing.T) {
		at, peers := g.serve6()
		if !dial(t, at, patience) {
			t.Fatal("the host does not reach it")
		}
		<-peers
		plain.want("another guest", at, true)
		if peer := <-peers; peer != plain.nic.IPv6 {
			t.Errorf("it sees another guest as %s", peer)
		}
		twin.want("another masqueraded guest", at, true)
		if peer := <-peers; peer != twin.nic.IPv6 {
			t.Errorf("it sees another masqueraded guest as %s", peer)
		}
		g.want("itself, outside", at, true)
		if !plain.pings(g.nic.IPv6, patience) {
			t.Error("it does not answer a ping")
		}
	})
	t.Run("errors", func(t *testing.T) {
		g.do(func() error { return refusedBy(t, "[2001:db8::2]:9") })
		if err := refusedBy(t, net.JoinHostPort(g.nic.IPv6, "9")); err != nil {
			t.Error("the host:", err)
		}
	})
	g.exchanges(plain, g.nic.IPv6, "fd10:0:2::2", plain.nic.IPv6)
	t.Run("spoofing", func(t *testing.T) {
		seen, _ := listen(t, plain.ns, net.JoinHostPort(plain.nic.IPv6, "0"))
		for _, from := range []string{g.nic.IPv6, "fd10:0:2::9", plain.nic.IPv6, "2001:db8::7"} {
			g.add6(from + "/128")
			g.do(func() error {
				d := net.Dialer{Timeout: impatience, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
				if c, err := d.DialContext(t.Context(), "tcp", seen); err == nil {
					c.Close()
					t.Errorf("it reaches another guest as %s", from)
				}
				return nil
			})
			g.drop6(from)
		}
		g.want("with its own address", seen, true)
	})
}

func (g guest) drop6(addr string) {
	g.t.Helper()
	g.do(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.AddrDel(eth0, &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(addr), Mask: net.CIDRMask(128, 128)}})
	})
}

func TestMasqueradePortsAndPolicies6(t *testing.T) {
	n := start6(t, Config{NAT: true})
	plain := configured(t, n, "plain").joined()
	g := inside6(t, n, "a", vm.NICSpec{Masquerade: allowing(8080), Policed: true})
	for _, port := range []string{"8080", "9090"} {
		listen(t, g.ns, net.JoinHostPort("fd10:0:2::2", port))
	}
	plain.want("closed", net.JoinHostPort(g.nic.IPv6, "8080"), false)
	police(t, n, network.Policies{Guests: []network.Guest{{ID: g.id}}})
	for port, ok := range map[string]bool{"8080": true, "9090": false} {
		plain.want("port "+port, net.JoinHostPort(g.nic.IPv6, port), ok)
		if got := dial(t, net.JoinHostPort(g.nic.IPv6, port), patience); got != ok {
			t.Errorf("the host reaches port %s: %v", port, got)
		}
	}
}

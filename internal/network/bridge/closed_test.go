package bridge

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

// The cloud's side of the link, in addition to 198.51.100.2: its metadata service, a network that the operator closes, and an
// open one.
const (
	farMeta    = "169.254.169.254"
	farOwn     = "10.99.0.1"
	farPublic  = "203.0.113.9"
	farMeta6   = "fd00:ec2::254"
	farOwn6    = "fd99::1"
	farPublic6 = "2001:db8:9::1"
	hostUplink = "198.51.100.1"
)

// cloud creates an outside network that has those addresses, and a route back for each family.
func cloud(t *testing.T) (ns string) {
	t.Helper()
	ns = outside(t)
	up6(t, "", "uplink", "2001:db8::1/64")
	route := func(dst, via string) {
		l, err := netlink.LinkByName("uplink")
		if err != nil {
			t.Fatal(err)
		}
		_, to, _ := net.ParseCIDR(dst)
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: to, Gw: net.ParseIP(via)}); err != nil {
			t.Fatalf("route to %s: %v", dst, err)
		}
	}
	netns.Do(t, ns, func() error {
		l, err := netlink.LinkByName("eth0")
		for _, a := range []string{farMeta, farOwn, farPublic} {
			if err == nil {
				err = netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(a).To4(), Mask: net.CIDRMask(32, 32)}})
			}
		}
		return err
	})
	for _, a := range []string{"2001:db8::2/64", farMeta6 + "/128", farOwn6 + "/128", farPublic6 + "/128"} {
		up6(t, ns, "eth0", a)
	}
	for _, a := range []string{farMeta, farOwn, farPublic} {
		route(a+"/32", "198.51.100.2")
	}
	for _, a := range []string{farMeta6, farOwn6, farPublic6} {
		route(a+"/128", "2001:db8::2")
	}
	return ns
}

// serves listens on port 80 of each address, in the namespace ("" is the host), and checks that the host itself can connect.
func serves(t *testing.T, ns string, addrs ...string) {
	t.Helper()
	for _, a := range addrs {
		at, _ := listen(t, ns, net.JoinHostPort(a, "80"))
		if !dial(t, at, patience) {
			t.Fatalf("the host itself does not reach %s: the test proves nothing", at)
		}
	}
}

// reaches checks to which addresses the guest can connect.
func (g guest) reaches(port string, want map[string]bool) {
	g.t.Helper()
	for addr, ok := range want {
		within := impatience
		if ok {
			within = patience
		}
		if got := g.dials(net.JoinHostPort(addr, port), within); got != ok {
			g.t.Errorf("%s port %s is reached: %v, want %v", addr, port, got, ok)
		}
	}
}

func TestClosed(t *testing.T) {
	all := []string{farMeta, farOwn, farPublic, farMeta6, farOwn6, farPublic6}
	for name, tt := range map[string]struct {
		closed, open []string
		want         map[string]bool
	}{
		"default": {nil, nil, map[string]bool{
			farPublic: true, farOwn: true, farMeta: false, hostUplink: false,
			farPublic6: true, farOwn6: true, farMeta6: false, "2001:db8::1": false,
		}},
		"more": {[]string{"10.0.0.0/8", "fd99::/16"}, nil, map[string]bool{
			farPublic: true, farOwn: false, farMeta: false, hostUplink: false,
			farPublic6: true, farOwn6: false, farMeta6: false, "2001:db8::1": false,
		}},
		"opened": {[]string{"10.0.0.0/8", "fd99::/16"}, []string{farOwn, farMeta, farMeta6, farOwn6, hostUplink, "2001:db8::/64"}, map[string]bool{
			farPublic: true, farOwn: true, farMeta: true, hostUplink: true,
			farPublic6: true, farOwn6: true, farMeta6: true, "2001:db8::1": true,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			n := start6(t, Config{NAT: true, DNS: []string{}, Closed: tt.closed, Open: tt.open})
			serves(t, cloud(t), all...)
			serves(t, "", hostUplink, "2001:db8::1")
			g := newGuest(t, n, "web").joined()
			g.configure(g.nic.IP)
			g.reaches("80", tt.want)
		})
	}
}

// The guest reaches its name server even in a closed network, but nothing else there.
func TestResolverInAClosedNetwork(t *testing.T) {
	n := start6(t, Config{NAT: true, DNS: []string{farMeta, farMeta6}})
	far := cloud(t)
	serves(t, far, farMeta, farMeta6)
	g := newGuest(t, n, "web").joined()
	g.configure(g.nic.IP)
	for _, a := range []string{farMeta, farMeta6} {
		listen(t, far, net.JoinHostPort(a, "53"))
	}
	g.reaches("53", map[string]bool{farMeta: true, farMeta6: true})
	g.reaches("80", map[string]bool{farMeta: false, farMeta6: false})
}

// A host in a closed network may connect to guests, over the route of a network without NAT, and gets answers.
func TestClosedNetworksAreAnswered(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, DNS: []string{}, Closed: []string{"198.51.100.0/24"}})
	far := outside(t)
	netns.Do(t, far, func() error {
		_, subnet, _ := net.ParseCIDR(testSubnet)
		return netlink.RouteAdd(&netlink.Route{Dst: subnet, Gw: net.ParseIP(hostUplink)})
	})
	g := newGuest(t, n, "web")
	g.configure(g.nic.IP)
	served, _ := listen(t, g.ns, net.JoinHostPort(g.nic.IP, "0"))
	netns.Do(t, far, func() error {
		if !dial(t, served, patience) {
			t.Error("a closed network does not reach a guest")
		}
		return nil
	})
	service, _ := listen(t, far, "198.51.100.2:0")
	if g.dials(service, impatience) {
		t.Error("a guest reaches a closed network")
	}
}

// The owner of an adopted bridge may have the router on it, so that frames never pass this host's forwarding.
func TestClosedOnAnAdoptedBridge(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	const shown = "bridge/bridge-nf-call-iptables" // otherwise inet tables see bridged frames too, if the module is loaded
	if err := host.SetSysctl(shown, "0"); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = host.SetSysctl(shown, "1") })
	br := addLink(t, "lan0", "10.88.7.3/24")
	router := netns.New(t)
	addPort(t, br, router, "10.88.7.77/24")
	var services []string
	netns.Do(t, router, func() error {
		l, err := netlink.LinkByName("eth0")
		for _, a := range []string{farMeta, farOwn, farPublic} {
			if err == nil {
				err = netlink.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(a).To4(), Mask: net.CIDRMask(32, 32)}})
			}
		}
		return err
	})
	for _, a := range []string{farMeta, farOwn, farPublic, "10.88.7.77"} {
		listen(t, router, net.JoinHostPort(a, "80"))
		services = append(services, a)
	}
	n := build(t, Config{Adopt: true, Bridge: "lan0", StateDir: t.TempDir(), DNS: []string{}, Closed: []string{"10.0.0.0/8"}})
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Teardown(context.WithoutCancel(t.Context())); err != nil {
			t.Error("teardown:", err)
		}
	})
	g := newGuest(t, n, "web")
	g.configure(g.nic.IP)
	g.do(func() error { // as DHCP would set it, if the router were the gateway
		for _, a := range services[:3] {
			_, to, _ := net.ParseCIDR(a + "/32")
			if err := netlink.RouteReplace(&netlink.Route{Dst: to, Gw: net.ParseIP("10.88.7.77")}); err != nil {
				return err
			}
		}
		return nil
	})
	g.reaches("80", map[string]bool{farMeta: false, farOwn: false, farPublic: true, "10.88.7.77": true})
}

func TestClosedIsChecked(t *testing.T) {
	for _, cfg := range []Config{
		{Closed: []string{"10.0.0.1/8"}}, {Closed: []string{"ten"}}, {Open: []string{""}}, {Open: []string{"fe80::1%eth0"}}, {Open: []string{"::ffff:1.2.3.4"}},
	} {
		cfg.StateDir = t.TempDir()
		if _, err := New(cfg, nil); !errdefs.IsInvalid(err) {
			t.Errorf("%v: %v", slices.Concat(cfg.Closed, cfg.Open), err)
		}
	}
}

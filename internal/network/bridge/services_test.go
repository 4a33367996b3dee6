package bridge

import (
	"context"
	"net"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
)

// proxied does what a service proxy does on a node: connections to from go to one of its endpoints. Who is redirected to
// itself is seen as the host.
func proxied(t *testing.T, from, to string) {
	t.Helper()
	nft := need.Tool(t, "nft")
	ip, port, _ := net.SplitHostPort(from)
	table := "proxy-" + strings.NewReplacer(".", "-", ":", "-").Replace(from)
	end, _, _ := net.SplitHostPort(to)
	script := `table ip ` + table + ` {
		chain service {
			ip daddr ` + ip + ` tcp dport ` + port + ` dnat to ` + to + `
		}
		chain prerouting {
			type nat hook prerouting priority dstnat
			jump service
		}
		chain output {
			type nat hook output priority -100
			jump service
		}
		chain postrouting {
			type nat hook postrouting priority srcnat
			ip saddr ` + end + ` ip daddr ` + end + ` masquerade
		}
	}`
	run := func(args ...string) {
		cmd := exec.CommandContext(context.WithoutCancel(t.Context()), nft, args...)
		cmd.Stdin = strings.NewReader(script)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("nft %v: %v: %s", args, err, out)
		}
	}
	run("-f", "-")
	t.Cleanup(func() { run("delete", "table", "ip", table) })
}

// showBridged makes the kernel show bridged packets to the rules for routed ones, until the test ends.
func showBridged(t *testing.T) {
	t.Helper()
	if err := host.SetSysctl(filteredKey, "1"); err != nil {
		need.Missing(t, err.Error())
	}
	t.Cleanup(func() {
		if err := host.SetSysctl(filteredKey, "0"); err != nil {
			t.Error(err)
		}
	})
}

func configured(t *testing.T, n *Network, name string) guest {
	t.Helper()
	g := newGuest(t, n, name)
	g.configure(g.nic.IP)
	return g
}

// A Service that redirects a guest to another one on the same bridge: the answer must come back through the host.
func TestServices(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	const service = "10.96.0.7:80"
	works := func(t *testing.T) {
		n := start(t, Config{Subnet: testSubnet, NAT: true})
		a, b := configured(t, n, "a"), configured(t, n, "b")
		served, peers := listen(t, b.ns, net.JoinHostPort(b.nic.IP, "0"))
		proxied(t, service, served)
		if !a.dials(service, patience) {
			t.Fatal("a guest does not reach another one by a Service")
		}
		if peer := <-peers; peer != a.nic.IP {
			t.Errorf("it is seen there as %s", peer)
		}
		if !a.dials(served, patience) {
			t.Fatal("a guest does not reach another one directly")
		}
		if peer := <-peers; peer != a.nic.IP {
			t.Errorf("it is seen there as %s", peer)
		}
		if !b.dials(service, patience) {
			t.Error("a guest does not reach itself by its Service")
		}
		_ = outside(t)
		_, all, _ := net.ParseCIDR("10.96.0.0/16")
		if err := netlink.RouteAdd(&netlink.Route{Dst: all, Gw: net.ParseIP("198.51.100.2")}); err != nil { // in place of a default route
			t.Fatal(err)
		}
		if !dial(t, service, patience) {
			t.Error("the host does not reach a guest by a Service")
		}
	}
	t.Run("routed", works)
	t.Run("filtered", func(t *testing.T) {
		showBridged(t)
		works(t)
	})
	t.Run("switched", func(t *testing.T) {
		n := start(t, Config{Subnet: testSubnet, NAT: true, Switched: true})
		a, b := configured(t, n, "a"), configured(t, n, "b")
		served, _ := listen(t, b.ns, net.JoinHostPort(b.nic.IP, "0"))
		proxied(t, service, served)
		if !a.dials(served, patience) {
			t.Fatal("a guest does not reach another one directly")
		}
		if a.dials(service, impatience) {
			t.Error("the answer came through the host: the test proves nothing")
		}
	})
	t.Run("isolated", func(t *testing.T) {
		n := start(t, Config{Subnet: testSubnet, NAT: true, Isolation: true})
		a, b := configured(t, n, "a"), configured(t, n, "b")
		served, _ := listen(t, b.ns, net.JoinHostPort(b.nic.IP, "0"))
		proxied(t, service, served)
		if a.dials(service, impatience) {
			t.Error("a Service joins isolated guests")
		}
	})
}

// Guests reach a port of the host by a Service that the configuration names, and in no other way.
func TestServicesOfTheHost(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true, Services: []string{"10.96.0.1:443"}})
	g := configured(t, n, "web")
	served, peers := listen(t, "", "10.88.7.1:0")
	proxied(t, "10.96.0.1:443", served)
	proxied(t, "10.96.0.1:80", served)
	proxied(t, "10.96.0.9:443", served)
	if !g.dials("10.96.0.1:443", patience) {
		t.Fatal("a guest does not reach the host by the Service")
	}
	if peer := <-peers; peer != g.nic.IP {
		t.Errorf("it is seen there as %s", peer)
	}
	for _, other := range []string{served, "10.96.0.1:80", "10.96.0.9:443"} {
		if g.dials(other, impatience) {
			t.Errorf("a guest reaches the host by %s", other)
		}
	}
}

// Guests on bridges of one cluster reach each other with their own addresses, those of other bridges do not.
func TestPeers(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	up := func(name, subnet string, peers ...string) *Network {
		n := build(t, Config{Name: name, Bridge: "br-" + name, Subnet: subnet, NAT: true, Peers: peers, StateDir: t.TempDir()})
		if err := n.Setup(t.Context()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := n.Teardown(context.WithoutCancel(t.Context())); err != nil {
				t.Error("teardown:", err)
			}
		})
		return n
	}
	t.Cleanup(func() { assertClean(t) })
	one := configured(t, up("one", "10.88.7.0/24", "br-two"), "a")
	two := configured(t, up("two", "10.88.8.0/24", "br-one"), "b")
	other := configured(t, up("other", "10.88.9.0/24"), "c")
	served, peers := listen(t, two.ns, net.JoinHostPort(two.nic.IP, "0"))
	if !one.dials(served, patience) {
		t.Fatal("a guest does not reach one on another bridge of the cluster")
	}
	if peer := <-peers; peer != one.nic.IP {
		t.Errorf("it is seen there as %s", peer)
	}
	if other.dials(served, impatience) {
		t.Error("a guest of another network reaches it too")
	}
	proxied(t, "10.96.0.7:80", served)
	if !one.dials("10.96.0.7:80", patience) {
		t.Fatal("a guest does not reach one on another bridge by a Service")
	}
	if peer := <-peers; peer != one.nic.IP {
		t.Errorf("it is seen there as %s", peer)
	}
}

// hurries makes the kernel of a guest notice soon that another machine no longer has the hardware address that it had.
func (g guest) hurries() {
	g.t.Helper()
	g.do(func() error {
		for key, value := range map[string]string{"base_reachable_time_ms": "100", "delay_first_probe_time": "1", "retrans_time_ms": "100"} {
			if err := host.SetSysctl("ipv4/neigh/eth0/"+key, value); err != nil {
				return err
			}
		}
		return nil
	})
}

// A running guest is routed like a new one, because policies are enforced. It knows the hardware addresses of others, which it
// loses for a while.
func TestSwitchedBecomesRouted(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	cfg := Config{Subnet: testSubnet, NAT: true, StateDir: t.TempDir(), Switched: true}
	before := build(t, cfg)
	if err := before.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	a, b := configured(t, before, "a"), configured(t, before, "b")
	for _, g := range []guest{a, b} {
		g.hurries()
	}
	if !a.pings(b.nic.IP, patience) {
		t.Fatal("guests do not reach each other")
	}
	serves, _ := listen(t, b.ns, net.JoinHostPort(b.nic.IP, "0"))
	isolated := func(g guest) bool {
		t.Helper()
		l, err := netlink.LinkByName(g.nic.Tap)
		if err != nil {
			t.Fatal(err)
		}
		p, err := netlink.LinkGetProtinfo(l)
		if err != nil {
			t.Fatal(err)
		}
		return p.Isolated
	}
	cfg.Switched = false
	after := build(t, cfg)
	if err := after.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	c := configured(t, after, "c")
	if !isolated(a) || !isolated(c) {
		t.Errorf("isolated: old %v, new %v", isolated(a), isolated(c))
	}
	if !a.pings(b.nic.IP, patience) || !a.pings(c.nic.IP, patience) || !c.pings(a.nic.IP, patience) {
		t.Error("guests do not reach each other any more")
	}
	police(t, after, network.Policies{Guests: []network.Guest{{ID: b.id, Ingress: []int{0}}}, Ingress: []network.Policy{{Name: "deny"}}})
	a.want("a policy of a guest that ran before", serves, false)
	police(t, after, network.Policies{})
	cfg.Switched = true
	again := start(t, cfg)
	d := configured(t, again, "d")
	if isolated(c) || isolated(d) {
		t.Errorf("isolated: old %v, new %v", isolated(c), isolated(d))
	}
	for _, g := range []guest{a, d} {
		if !c.pings(g.nic.IP, patience) {
			t.Errorf("c does not reach %s", g.nic.IP)
		}
	}
}

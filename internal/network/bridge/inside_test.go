package bridge

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

var masqueraded = vm.Masquerade{CIDR: vm.MasqueradeCIDR, CIDR6: vm.MasqueradeCIDR6}

// within4 attaches a guest that is masqueraded and configures it as its DHCP client would.
func within4(t *testing.T, n *Network, name string, spec vm.NICSpec) guest {
	t.Helper()
	if !spec.Masquerade.Asked() {
		spec.Masquerade = masqueraded
	}
	g := newGuestOf(t, n, vm.NewID(), name, spec)
	g.nic.Gateway = g.nic.Inside.Gateway
	g.nic.Prefix = g.nic.Inside.Prefix
	g.configure(g.nic.Inside.IP)
	return g
}

// serve listens in the guest at its address inside, and returns the address outside.
func (g guest) serve() (outside string, peers <-chan string) {
	g.t.Helper()
	addr, peers := listen(g.t, g.ns, net.JoinHostPort(g.nic.Inside.IP, "0"))
	_, port, _ := net.SplitHostPort(addr)
	return net.JoinHostPort(g.nic.IP, port), peers
}

func allowing(ports ...uint16) vm.Masquerade {
	m := masqueraded
	for _, p := range ports {
		m.Ports = append(m.Ports, vm.PortRange{Protocol: vm.TCP, First: p, Last: p})
	}
	return m
}

func TestMasqueradedGuest(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	t.Run("routed", func(t *testing.T) { masqueradedGuest(t, false) })
	t.Run("filtered", func(t *testing.T) {
		showBridged(t)
		masqueradedGuest(t, true)
	})
}

func masqueradedGuest(t *testing.T, filtered bool) {
	beyond := outside(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true, DNS: []string{"9.9.9.9"}, MTU: 1400})
	g, twin, plain := within4(t, n, "a", vm.NICSpec{}), within4(t, n, "twin", vm.NICSpec{}), configured(t, n, "plain")
	want := vm.Inside{IP: "10.0.2.2", Prefix: 24, Gateway: "10.0.2.1"}
	if d := diff.Of(want, g.nic.Inside); d != "" {
		t.Fatal(d)
	}
	t.Run("dhcp", func(t *testing.T) {
		for name, change := range map[string]dhcpv4.Modifier{"unicast": dhcpv4.WithBroadcast(false), "broadcast": dhcpv4.WithBroadcast(true)} {
			ack := g.request(t, change).ACK
			ones, _ := ack.SubnetMask().Size()
			if ack.YourIPAddr.String() != "10.0.2.2" || ones != 24 || ack.Router()[0].String() != "10.0.2.1" || ack.DNS()[0].String() != "9.9.9.9" || len(ack.ClasslessStaticRoute()) != 0 {
				t.Errorf("%s: leased %s", name, ack.Summary())
			}
		}
	})
	t.Run("out", func(t *testing.T) {
		if !g.pings("10.0.2.1", patience) {
			t.Error("the gateway does not answer")
		}
		service, peers := listen(t, beyond, "198.51.100.2:0")
		g.want("beyond the host", service, true)
		if peer := <-peers; peer != "198.51.100.1" {
			t.Errorf("outside it is seen as %s", peer)
		}
		if g.pings("10.0.2.77", impatience) {
			t.Error("somebody else answers in its network")
		}
	})
	t.Run("in", func(t *testing.T) {
		at, peers := g.serve()
		if !dial(t, at, patience) {
			t.Fatal("the host does not reach it")
		}
		<-peers
		plain.want("another guest", at, true)
		if peer := <-peers; peer != plain.nic.IP {
			t.Errorf("it sees another guest as %s", peer)
		}
		twin.want("another masqueraded guest", at, true)
		if peer := <-peers; peer != twin.nic.IP {
			t.Errorf("it sees another masqueraded guest as %s", peer)
		}
		g.want("itself, outside", at, true)
		if !plain.pings(g.nic.IP, patience) {
			t.Error("it does not answer a ping")
		}
	})
	t.Run("between", func(t *testing.T) {
		at, peers := listen(t, plain.ns, net.JoinHostPort(plain.nic.IP, "0"))
		g.want("another guest", at, true)
		if peer := <-peers; peer != g.nic.IP {
			t.Errorf("another guest sees it as %s", peer)
		}
		if dial(t, net.JoinHostPort("10.0.2.2", portText(at)), impatience) {
			t.Error("an address inside is reached from outside")
		}
	})
	t.Run("errors", func(t *testing.T) { // the guest is told that nobody serves the port, which it can match only to its own address
		g.do(func() error { return refusedBy(t, net.JoinHostPort("198.51.100.2", "9")) })
		if err := refusedBy(t, net.JoinHostPort(g.nic.IP, "9")); err != nil {
			t.Error("the host:", err)
		}
	})
	if !filtered { // the kernel loses fragments from port to port there, with and without a translation
		g.exchanges(plain, g.nic.IP, "10.0.2.2", plain.nic.IP)
	}
	t.Run("spoofing", func(t *testing.T) {
		seen, peers := listen(t, plain.ns, net.JoinHostPort(plain.nic.IP, "0"))
		for _, from := range []string{g.nic.IP, "10.0.2.9", plain.nic.IP, "192.0.2.7"} {
			g.do(func() error {
				eth0, err := netlink.LinkByName("eth0")
				if err != nil {
					return err
				}
				spoofed := &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(from).To4(), Mask: net.CIDRMask(32, 32)}}
				if err := netlink.AddrAdd(eth0, spoofed); err != nil {
					return err
				}
				defer func() { _ = netlink.AddrDel(eth0, spoofed) }()
				d := net.Dialer{Timeout: impatience, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
				if c, err := d.DialContext(t.Context(), "tcp", seen); err == nil {
					c.Close()
					t.Errorf("it reaches another guest as %s", from)
				}
				return nil
			})
		}
		select {
		case peer := <-peers:
			t.Errorf("%s connected", peer)
		default:
		}
		g.want("with its own address", seen, true)
	})
}

// exchanges sends a datagram that does not fit into a frame to another guest, and gets it back. Both know the guest by other addresses.
func (g guest) exchanges(with guest, outer, inner, other string) {
	g.t.Helper()
	var server, client net.PacketConn
	with.do(func() (err error) {
		server, err = (&net.ListenConfig{}).ListenPacket(g.t.Context(), "udp", net.JoinHostPort(other, "0"))
		return err
	})
	defer server.Close()
	g.do(func() (err error) {
		client, err = (&net.ListenConfig{}).ListenPacket(g.t.Context(), "udp", net.JoinHostPort(inner, "0"))
		return err
	})
	defer client.Close()
	long, buf := bytes.Repeat([]byte("fragments"), 500), make([]byte, 1<<13)
	for _, c := range []net.PacketConn{server, client} {
		if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
			g.t.Fatal(err)
		}
	}
	if _, err := client.WriteTo(long, server.LocalAddr()); err != nil {
		g.t.Fatal(err)
	}
	n, from, err := server.ReadFrom(buf)
	if host, _, _ := net.SplitHostPort(fmt.Sprint(from)); err != nil || host != outer || !bytes.Equal(buf[:n], long) {
		g.t.Fatalf("%d bytes from %v, %v", n, from, err)
	}
	if _, err := server.WriteTo(long, from); err != nil {
		g.t.Fatal(err)
	}
	if n, from, err = client.ReadFrom(buf); err != nil || from.String() != server.LocalAddr().String() || !bytes.Equal(buf[:n], long) {
		g.t.Fatalf("%d bytes from %v, %v", n, from, err)
	}
}

func portText(addr string) string {
	_, port, _ := net.SplitHostPort(addr)
	return port
}

// refusedBy sends a datagram to a port that nobody serves, and waits for the answer that says so.
func refusedBy(t *testing.T, addr string) error {
	t.Helper()
	c, err := (&net.Dialer{}).DialContext(t.Context(), "udp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Write([]byte("?")); err != nil {
		return err
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	_, err = c.Read(make([]byte, 1))
	if err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("%s: %v", addr, err)
	}
	return nil
}

func TestMasqueradePorts(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	beyond := outside(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	plain := configured(t, n, "plain")
	open, shut := uint16(8080), uint16(9090)
	publish := []vm.PortMapping{{Protocol: vm.TCP, HostPort: 7070, GuestPort: open}, {Protocol: vm.TCP, HostPort: 7071, GuestPort: shut}}
	g := within4(t, n, "a", vm.NICSpec{Masquerade: allowing(open), Ports: publish})
	for _, port := range []string{"8080", "9090"} {
		listen(t, g.ns, net.JoinHostPort(g.nic.Inside.IP, port))
	}
	check := func(t *testing.T) {
		t.Helper()
		for port, ok := range map[string]bool{"8080": true, "9090": false} {
			plain.want("a guest", net.JoinHostPort(g.nic.IP, port), ok)
			if got := dial(t, net.JoinHostPort(g.nic.IP, port), patience); got != ok {
				t.Errorf("the host reaches port %s: %v", port, got)
			}
		}
		if !plain.pings(g.nic.IP, patience) {
			t.Error("a ping gets no answer")
		}
		service, _ := listen(t, beyond, "198.51.100.2:0")
		g.want("its own connection", service, true)
	}
	check(t)
	for port, ok := range map[string]bool{"7070": true, "7071": false} {
		if got := guestDials(t, beyond, "198.51.100.1:"+port); got != ok {
			t.Errorf("port %s of the host leads to it: %v", port, got)
		}
	}

	// The ports change with the next start, and go with the guest.
	if _, err := n.Attach(t.Context(), g.id, "a", 0, vm.NICSpec{Masquerade: allowing(open, shut)}); err != nil {
		t.Fatal(err)
	}
	plain.want("a port that is allowed now", net.JoinHostPort(g.nic.IP, "9090"), true)
	if nic, err := n.Attach(t.Context(), g.id, "a", 0, vm.NICSpec{}); err != nil || nic.Inside != (vm.Inside{}) {
		t.Fatalf("%+v, %v", nic, err)
	}
	g.nic.Gateway, g.nic.Prefix = "10.88.7.1", 24
	g.configure(g.nic.IP)
	at, _ := listen(t, g.ns, net.JoinHostPort(g.nic.IP, "0"))
	plain.want("the address itself", at, true)
}

func guestDials(t *testing.T, ns, addr string) (ok bool) {
	t.Helper()
	netns.Do(t, ns, func() error {
		ok = dial(t, addr, patience)
		return nil
	})
	return ok
}

func TestMasqueradeAndPolicies(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	g, friend, other := within4(t, n, "a", vm.NICSpec{Policed: true}), within4(t, n, "friend", vm.NICSpec{}), configured(t, n, "other")
	at, _ := g.serve()
	friendAt, _ := friend.serve()
	friend.want("closed", at, false)
	g.want("closed", friendAt, false)
	police(t, n, network.Policies{
		Guests:  []network.Guest{{ID: g.id, Ingress: []int{0}}},
		Ingress: []network.Policy{{Name: "friend", Rules: []network.Rule{{Peers: only(friend.nic.IP), AllPorts: true}}}},
	})
	friend.want("the peer", at, true)
	other.want("another", at, false)
	g.want("the other direction", friendAt, true)
}

// A restart of the daemon changes nothing for masqueraded guests, and what a killed one left is removed.
func TestMasqueradeSurvivesARestart(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	cfg := Config{Subnet: testSubnet, NAT: true, StateDir: t.TempDir()}
	before := build(t, cfg)
	if err := before.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	plain := configured(t, before, "plain")
	g, gone := within4(t, before, "a", vm.NICSpec{Masquerade: allowing(8080)}), within4(t, before, "gone", vm.NICSpec{Masquerade: allowing(1)})
	for _, port := range []string{"8080", "9090"} {
		listen(t, g.ns, net.JoinHostPort(g.nic.Inside.IP, port))
	}
	check := func(t *testing.T) {
		t.Helper()
		plain.want("the port", net.JoinHostPort(g.nic.IP, "8080"), true)
		plain.want("another port", net.JoinHostPort(g.nic.IP, "9090"), false)
	}
	check(t)
	tap, err := netlink.LinkByName(gone.nic.Tap) // its daemon was killed before it removed the rules
	if err == nil {
		err = netlink.LinkDel(tap)
	}
	if err != nil {
		t.Fatal(err)
	}
	n := start(t, cfg)
	check(t)
	if _, there := n.inside.at(gone.nic.Tap); there {
		t.Error("rules of a guest without a tap stayed")
	}
	if ack := g.request(t).ACK; ack.YourIPAddr.String() != "10.0.2.2" || ack.Router()[0].String() != "10.0.2.1" {
		t.Errorf("leased %s", ack.Summary())
	}
	// The engine attaches a VM again when it starts.
	nic, err := n.Attach(t.Context(), g.id, "a", 0, vm.NICSpec{Masquerade: allowing(8080)})
	if d := diff.Of(vm.Inside{IP: "10.0.2.2", Prefix: 24, Gateway: "10.0.2.1"}, nic.Inside); err != nil || d != "" {
		t.Fatal(err, d)
	}
	check(t)

	// Somebody removes all rules: a masqueraded guest that is attached anew has its own again.
	if out, err := exec.CommandContext(t.Context(), need.Tool(t, "nft"), "flush", "ruleset").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	plain.want("its rules are lost", net.JoinHostPort(g.nic.IP, "8080"), false)
	if _, err := n.Attach(t.Context(), g.id, "a", 0, vm.NICSpec{Masquerade: allowing(8080)}); err != nil {
		t.Fatal(err)
	}
	check(t)
}

// Another guest that gets the address of one whose tap was removed behind our back has none of its rules.
func TestMasqueradeIsNotInherited(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	plain := configured(t, n, "plain")
	g := within4(t, n, "a", vm.NICSpec{Masquerade: allowing(1)})
	if err := n.Detach(t.Context(), g.nic); err != nil {
		t.Fatal(err)
	}
	if err := n.Release(t.Context(), g.nic); err != nil {
		t.Fatal(err)
	}
	next := configured(t, n, "a")
	if next.nic.IP != g.nic.IP {
		t.Fatalf("%s, not %s", next.nic.IP, g.nic.IP)
	}
	at, _ := listen(t, next.ns, net.JoinHostPort(next.nic.IP, "0"))
	plain.want("the next guest", at, true)
}

func TestMasqueradeRefused(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	for name, cfg := range map[string]Config{
		"unguarded": {Subnet: testSubnet, Unguarded: true},
		"switched":  {Subnet: testSubnet, Switched: true},
	} {
		t.Run(name, func(t *testing.T) {
			n := start(t, cfg)
			_, err := n.Attach(t.Context(), vm.NewID(), "a", 0, vm.NICSpec{Masquerade: masqueraded})
			if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "masqueraded") {
				t.Errorf("%v", err)
			}
			if leased, _ := n.Addresses(); leased != 0 {
				t.Errorf("%d addresses are leased", leased)
			}
		})
	}
}

func FuzzInsider(f *testing.F) {
	f.Add("02:00:00:00:00:01 10.88.0.5 fd00::5 10.0.2.2/24 fd10:0:2::2/120 3")
	f.Add("02:00:00:00:00:01 10.88.0.5 - 10.0.2.2/24 fd10:0:2::2/120 0")
	f.Fuzz(func(t *testing.T, text string) {
		g, ok := parseInsider("tap", text)
		if !ok {
			return
		}
		again, ok := parseInsider("tap", g.text())
		if d := diff.Of(g.text(), again.text()); !ok || d != "" {
			t.Errorf("%q: %v %s", text, ok, d)
		}
	})
}

func TestInsiderText(t *testing.T) {
	lowest, highest := netip.MustParseAddr("255.255.255.255"), netip.MustParseAddr("fd12:3456:789a:bcde:f012:3456:789a:bcde")
	in := vm.Inside{IP: "192.168.255.254", Prefix: 30, Gateway: "192.168.255.253", IPv6: highest.String(), Prefix6: 126, Gateway6: highest.String()}
	g := insider{tap: "tap", mac: net.HardwareAddr{2, 0, 0, 0, 0, 1}, outer: lowest, outer6: highest, inside: in, ports: slices.Repeat([]network.Port{{}}, 256)}
	if n := len(g.text()); n > 253 {
		t.Errorf("%d bytes do not fit into a comment", n)
	}
	for _, outer6 := range []netip.Addr{{}, highest} {
		g.outer6 = outer6
		g.inside = masqueraded.Inside()
		if back, ok := parseInsider("tap", g.text()); !ok || back.outer6 != outer6 || back.inside != g.inside || len(back.ports) != len(g.ports) {
			t.Errorf("%q came back as %+v (%v)", g.text(), back, ok)
		}
	}
}

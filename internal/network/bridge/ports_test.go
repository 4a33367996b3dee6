package bridge

import (
	"net"
	"net/netip"
	"strconv"
	"testing"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

// published starts a guest whose port is open at the host.
func published(t *testing.T, n *Network, name string, p vm.PortMapping) (g guest, peers <-chan string) {
	t.Helper()
	g = newGuest(t, n, name, p)
	g.configure(g.nic.IP)
	_, peers = listen(t, g.ns, net.JoinHostPort(g.nic.IP, strconv.Itoa(int(p.GuestPort))))
	return g, peers
}

func TestPorts(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	const gateway = "10.88.7.1"
	works := func(t *testing.T) {
		cfg := Config{Subnet: testSubnet, NAT: true, StateDir: t.TempDir()}
		n := start(t, cfg)
		out := outside(t)
		a, peers := published(t, n, "a", vm.PortMapping{Protocol: vm.TCP, HostPort: 8080, GuestPort: 80})
		b := configured(t, n, "b")
		everywhere := []string{"198.51.100.1:8080", gateway + ":8080"}
		for _, at := range everywhere {
			if !dial(t, at, patience) {
				t.Errorf("the host does not reach %s", at)
			} else {
				<-peers
			}
		}
		if !b.dials(gateway+":8080", patience) {
			t.Error("another guest does not reach the port")
		} else if peer := <-peers; peer != b.nic.IP {
			t.Errorf("it is seen there as %s", peer)
		}
		if !a.dials(gateway+":8080", patience) {
			t.Error("the guest does not reach itself by the port")
		} else {
			<-peers
		}
		netns.Do(t, out, func() error {
			if !dial(t, "198.51.100.1:8080", patience) {
				t.Error("another machine does not reach the port")
			} else if peer := <-peers; peer != "198.51.100.2" {
				t.Errorf("it is seen there as %s", peer)
			}
			return nil
		})
		if dial(t, "127.0.0.1:8080", impatience) {
			t.Error("the port is open at loopback")
		}
		if b.dials(gateway+":8081", impatience) {
			t.Error("another port of the host is open")
		}
	}
	t.Run("routed", works)
	t.Run("filtered", func(t *testing.T) {
		showBridged(t)
		works(t)
	})
	t.Run("one address", func(t *testing.T) {
		n := start(t, Config{Subnet: testSubnet, NAT: true})
		_ = outside(t)
		_, peers := published(t, n, "a", vm.PortMapping{Protocol: vm.TCP, HostIP: "198.51.100.1", HostPort: 8080, GuestPort: 80})
		if !dial(t, "198.51.100.1:8080", patience) {
			t.Error("the port is closed")
		} else {
			<-peers
		}
		if dial(t, gateway+":8080", impatience) {
			t.Error("the port is open at another address")
		}
	})
}

// Ports of another guest and of programs of the host stay theirs.
func TestPortsTaken(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	served, _ := listen(t, "", "10.88.7.1:0")
	_, port, _ := net.SplitHostPort(served)
	busy, _ := strconv.ParseUint(port, 10, 16)
	first := vm.PortMapping{Protocol: vm.TCP, HostPort: 8080, GuestPort: 80}
	g, _ := published(t, n, "first", first)
	for name, p := range map[string]vm.PortMapping{
		"the same":     first,
		"at one":       {Protocol: vm.TCP, HostIP: "10.88.7.1", HostPort: 8080, GuestPort: 81},
		"of a program": {Protocol: vm.TCP, HostPort: uint16(busy), GuestPort: 80},
	} {
		if _, err := n.Attach(t.Context(), vm.NewID(), "second", 0, vm.NICSpec{Ports: []vm.PortMapping{p}}); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if leased, _ := n.Addresses(); leased != 1 {
		t.Errorf("%d addresses are leased after the refusals", leased)
	}
	if _, err := n.Attach(t.Context(), vm.NewID(), "udp", 0, vm.NICSpec{Ports: []vm.PortMapping{{Protocol: vm.UDP, HostPort: 8080, GuestPort: 80}}}); err != nil {
		t.Errorf("another protocol: %v", err)
	}
	if err := n.Detach(t.Context(), g.nic); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Attach(t.Context(), vm.NewID(), "third", 0, vm.NICSpec{Ports: []vm.PortMapping{first}}); err != nil {
		t.Errorf("after the first guest has gone: %v", err)
	}
}

// A port on which another program redirects connections stays its own, as a NodePort of a Service, on which nobody listens.
func TestPortsOfServices(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	out := outside(t)
	b := configured(t, n, "b")
	served, peers := listen(t, b.ns, net.JoinHostPort(b.nic.IP, "0"))
	for _, at := range []string{"10.88.7.1:30080", "198.51.100.1:30080"} {
		proxied(t, at, served)
	}
	a, others := published(t, n, "a", vm.PortMapping{Protocol: vm.TCP, HostPort: 30080, GuestPort: 80})
	for from, dials := range map[string]func() bool{
		"the host":  func() bool { return dial(t, "10.88.7.1:30080", patience) },
		"the guest": func() bool { return a.dials("10.88.7.1:30080", patience) },
		"another machine": func() (ok bool) {
			netns.Do(t, out, func() error { ok = dial(t, "198.51.100.1:30080", patience); return nil })
			return ok
		},
	} {
		if !dials() {
			t.Errorf("the port is closed to %s", from)
			continue
		}
		select {
		case <-peers:
		case <-others:
			t.Errorf("the guest that took the port of a Service gets the connection of %s", from)
		}
	}
}

// Ports stay open while the daemon restarts. Those of guests without a tap are closed when it is back.
func TestPortsSurvive(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	cfg := Config{Subnet: testSubnet, NAT: true, StateDir: t.TempDir()}
	before := build(t, cfg)
	if err := before.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, peers := published(t, before, "a", vm.PortMapping{Protocol: vm.TCP, HostPort: 8080, GuestPort: 80})
	gone := vm.PortMapping{Protocol: vm.TCP, HostIP: "10.88.7.1", HostPort: 9090, GuestPort: 80}
	if err := before.ports.forward(t.Context(), netip.MustParseAddr("10.88.7.200"), []vm.PortMapping{gone}); err != nil {
		t.Fatal(err)
	}
	after := start(t, cfg)
	if !dial(t, "10.88.7.1:8080", patience) {
		t.Fatal("the port is closed after a restart")
	}
	<-peers
	if _, err := after.Attach(t.Context(), vm.NewID(), "b", 0, vm.NICSpec{Ports: []vm.PortMapping{{Protocol: vm.TCP, HostPort: 8080, GuestPort: 80}}}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("the port of another guest: %v", err)
	}
	if _, err := after.Attach(t.Context(), vm.NewID(), "c", 0, vm.NICSpec{Ports: []vm.PortMapping{gone}}); err != nil {
		t.Errorf("the port of a guest that is gone: %v", err)
	}
}

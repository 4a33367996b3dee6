package bridge

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

// chat opens a UDP port in the namespace at ns, exchanges messages with a guest at the address, and returns what sends one more.
func chat(t *testing.T, ns string, with guest, port uint16, at string) (again func(message string)) {
	t.Helper()
	heard := with.hears("udp", port)
	var c *net.UDPConn
	netns.Do(t, ns, func() (err error) {
		c, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(at)))
		return err
	})
	t.Cleanup(func() { c.Close() })
	again = func(message string) {
		t.Helper()
		if _, err := c.Write([]byte(message)); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
	}
	buf := make([]byte, 1500)
	waitFor(t, "both have heard each other", func() bool {
		again("hello")
		_ = heard.SetReadDeadline(time.Now().Add(impatience))
		_, from, err := heard.ReadFromUDPAddrPort(buf)
		if err != nil {
			return false
		}
		if _, err := heard.WriteToUDPAddrPort([]byte("hello"), from); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(impatience))
		_, err = c.Read(buf)
		return err == nil
	})
	heard.Close()
	return again
}

// fromHost sends the last word to a UDP port of a guest.
func fromHost(t *testing.T, to string) {
	t.Helper()
	c, err := net.Dial("udp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte(lastWord)); err != nil {
		t.Fatal(err)
	}
}

// A guest that gets the address of an earlier one gets nothing that belongs to connections of that one.
func TestConnectionsEndWithTheirGuest(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	const port = "6000"
	for _, v6 := range []bool{false, true} {
		for name, leave := range map[string]func(t *testing.T, n *Network, g guest) *Network{
			"detached": func(t *testing.T, n *Network, g guest) *Network {
				if err := errors.Join(n.Detach(t.Context(), g.nic), n.Release(t.Context(), g.nic)); err != nil {
					t.Fatal(err)
				}
				return n
			},
			"swept": func(t *testing.T, n *Network, g guest) *Network {
				if removed, _, err := n.Sweep(t.Context(), nil, func(id vm.ID) bool { return id == g.id }); err != nil || len(removed) != 1 {
					t.Fatalf("%v, %v", removed, err)
				}
				return n
			},
			"crashed": func(t *testing.T, n *Network, g guest) *Network { // between the removal of the tap and the rest
				l, err := netlink.LinkByName(g.nic.Tap)
				if err == nil {
					err = host.RemoveLink(l)
				}
				if err != nil {
					t.Fatal(err)
				}
				again := build(t, n.cfg)
				if err := again.Setup(t.Context()); err != nil {
					t.Fatal(err)
				}
				return again
			},
		} {
			if v6 {
				name += " with IPv6"
			}
			t.Run(name, func(t *testing.T) {
				n := start6(t, Config{NAT: true})
				address := func(g guest) string {
					if v6 {
						return net.JoinHostPort(g.nic.IPv6, port)
					}
					return net.JoinHostPort(g.nic.IP, port)
				}
				other := configured(t, n, "other").joined()
				early := policed(t, n, "a").joined()
				police(t, n, network.Policies{Guests: []network.Guest{{ID: early.id}}})
				again := chat(t, other.ns, early, 6000, address(early))
				n = leave(t, n, early)
				late := policed(t, n, "a").joined()
				if address(late) != address(early) {
					t.Fatalf("it has %s, not %s", address(late), address(early))
				}
				kind := "udp4"
				if v6 {
					kind = "udp6"
				}
				heard := late.hears(kind, 6000)
				again("hello")
				if !other.pings(other.nic.Gateway, patience) { // then the message has left its tap
					t.Fatal("the host does not answer")
				}
				if got := until(t, heard, func() { fromHost(t, address(late)) }); len(got) > 0 {
					t.Errorf("a closed guest hears %q", got)
				}
			})
		}
	}
}

// Connections of other guests are not touched.
func TestConnectionsOfOthersStay(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	a, b, gone := policed(t, n, "a"), policed(t, n, "b"), policed(t, n, "gone")
	police(t, n, network.Policies{Guests: []network.Guest{{ID: a.id}, {ID: b.id}, {ID: gone.id}}})
	ended, alive := gone.converse(b), a.converse(b)
	deny := []network.Policy{{Name: "deny"}}
	police(t, n, network.Policies{Guests: []network.Guest{{ID: a.id}, {ID: b.id, Ingress: []int{0}}, {ID: gone.id}}, Ingress: deny})
	if err := errors.Join(ended(), alive()); err != nil {
		t.Fatal(err)
	}
	if err := n.Detach(t.Context(), gone.nic); err != nil {
		t.Fatal(err)
	}
	if err := alive(); err != nil {
		t.Error("the connection of other guests:", err)
	}
	known, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range known {
		if ip := net.ParseIP(gone.nic.IP); ip.Equal(f.Forward.SrcIP) || ip.Equal(f.Forward.DstIP) {
			t.Errorf("still known: %s", f)
		}
	}
	if err := build(t, Config{Subnet: testSubnet, NAT: true, StateDir: n.cfg.StateDir}).Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := alive(); err != nil {
		t.Error("after a restart of the daemon:", err)
	}
}

// Who has used a port of the host does not reach the guest when the port no longer leads there.
func TestPortsCloseForAll(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	out := outside(t)
	port := func(p uint16) vm.NICSpec {
		return vm.NICSpec{Ports: []vm.PortMapping{{Protocol: vm.UDP, HostPort: p, GuestPort: 80}}}
	}
	g := newGuestOf(t, n, vm.NewID(), "a", port(8080))
	g.configure(g.nic.IP)
	again := chat(t, out, g, 80, "198.51.100.1:8080")
	if _, err := n.Attach(t.Context(), g.id, "a", 0, port(9090)); err != nil {
		t.Fatal(err)
	}
	heard := g.hears("udp4", 80)
	again("hello")
	if got := until(t, heard, func() { fromHost(t, net.JoinHostPort(g.nic.IP, "80")) }); len(got) > 0 {
		t.Errorf("by a closed port it hears %q", got)
	}
	heard.Close()
	chat(t, out, g, 80, "198.51.100.1:9090")
}

// BenchmarkForget forgets the connections of one guest while the kernel knows 10,000 of others.
func BenchmarkForget(b *testing.B) {
	netns.Require(b)
	ip := func(n uint32) net.IP { return binary.BigEndian.AppendUint32(nil, n) }
	for i := range uint32(10_000) {
		there, back := ip(10<<24+i), ip(11<<24+i)
		f := &netlink.ConntrackFlow{
			FamilyType: unix.AF_INET, TimeOut: 600,
			Forward: netlink.IPTuple{SrcIP: there, DstIP: back, SrcPort: 1000, DstPort: 80, Protocol: unix.IPPROTO_UDP},
			Reverse: netlink.IPTuple{SrcIP: back, DstIP: there, SrcPort: 80, DstPort: 1000, Protocol: unix.IPPROTO_UDP},
		}
		if err := netlink.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, f); err != nil {
			b.Fatal(err)
		}
	}
	var f flows
	for b.Loop() {
		if err := f.forget(netip.MustParseAddr("10.88.7.9"), netip.MustParseAddr("fd00::9")); err != nil {
			b.Fatal(err)
		}
	}
}

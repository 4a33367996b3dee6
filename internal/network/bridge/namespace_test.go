package bridge

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/network"
	"cocoonstack.io/cocoon/internal/network/host"
	"cocoonstack.io/cocoon/internal/network/networktest"
	"cocoonstack.io/cocoon/internal/testkit/need"
	"cocoonstack.io/cocoon/internal/testkit/netns"
	"cocoonstack.io/cocoon/internal/vm"
)

// contained attaches a namespace to the network. Unlike a guest with a tap, it needs no configuration of its own.
func contained(t *testing.T, n *Network, id vm.ID, name string, spec vm.NICSpec) guest {
	t.Helper()
	g := guest{t: t, ns: netns.New(t), id: id}
	g.attach(n, name, spec)
	return g
}

func (g *guest) attach(n *Network, name string, spec vm.NICSpec) {
	g.t.Helper()
	nic, err := n.AttachNamespace(g.t.Context(), g.id, name, 0, spec, g.ns)
	if err != nil {
		g.t.Fatal(err)
	}
	g.nic = nic
}

// rooms is a network that attaches the namespaces of containers in place of taps.
type rooms struct {
	*Network
	t   testing.TB
	dir string
}

// roomsMade are the namespaces of the interfaces in a folder: those of a network that restarts stay.
var roomsMade sync.Map

func (r rooms) Attach(ctx context.Context, id vm.ID, name string, index int, spec vm.NICSpec) (vm.NIC, error) {
	key := fmt.Sprint(r.dir, id)
	made, there := roomsMade.Load(key)
	if !there {
		made, _ = roomsMade.LoadOrStore(key, netns.New(r.t))
	}
	return r.AttachNamespace(ctx, id, name, index, spec, made.(string))
}

func TestContractOfNamespaces(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	networktest.Run(t, func(t testing.TB, dir, subnet string) network.Network {
		return rooms{build(t, Config{NAT: true, StateDir: dir, Subnet: subnet, NetNS: namespaceOf(t, dir)}), t, dir}
	})
}

// Containers and a guest with a tap meet as the network says, and the container needs nothing but its namespace.
func TestNamespaces(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	meet := func(t *testing.T, cfg Config, together bool) {
		cfg.Subnet, cfg.NAT, cfg.MTU, cfg.DNS = testSubnet, true, 1400, []string{"9.9.9.9"}
		out := outside(t)
		n := start(t, cfg)
		a, b := contained(t, n, vm.NewID(), "a", vm.NICSpec{}), contained(t, n, vm.NewID(), "b", vm.NICSpec{})
		g := configured(t, n, "vm")
		for _, from := range []guest{a, b, g} {
			for _, to := range []guest{a, b, g} {
				within := patience
				if !together {
					within = impatience
				}
				if from.id != to.id && from.pings(to.nic.IP, within) != together {
					t.Errorf("%s reaches %s: %v", from.nic.IP, to.nic.IP, !together)
				}
			}
		}
		if together { // with the large packets and open checksums that a pair of links passes on
			for _, x := range [][2]guest{{a, g}, {g, a}, {a, b}} {
				x[0].sends(x[1], 4<<20)
			}
		}
		beyond, peers := listen(t, out, "198.51.100.2:0")
		if !a.dials(beyond, patience) {
			t.Error("a container does not reach other networks")
		} else if peer := <-peers; peer != "198.51.100.1" {
			t.Errorf("it is seen as %s", peer)
		}
		own, _ := listen(t, "", "10.88.7.1:0")
		a.want("a port of the host", own, false)
		local, _ := listen(t, a.ns, "127.0.0.1:0")
		a.want("its loopback", local, true)
		a.do(func() error {
			l, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			if at := l.Attrs(); at.MTU != 1400 || at.HardwareAddr.String() != a.nic.MAC || a.nic.MTU != 1400 {
				t.Errorf("MTU %d, MAC %s; the NIC is %+v", at.MTU, at.HardwareAddr, a.nic)
			}
			return nil
		})
	}
	t.Run("routed", func(t *testing.T) { meet(t, Config{}, true) })
	t.Run("filtered", func(t *testing.T) { showBridged(t); meet(t, Config{}, true) })
	t.Run("switched", func(t *testing.T) { meet(t, Config{Switched: true}, true) })
	t.Run("apart", func(t *testing.T) { meet(t, Config{Isolation: true}, false) })
}

func TestNamespaces6(t *testing.T) {
	out := outside(t)
	up6(t, "", "uplink", "2001:db8::1/64")
	up6(t, out, "eth0", "2001:db8::2/64")
	for name, cfg := range map[string]Config{"slaac": {}, "stateful": {IPv6Mode: IPv6Stateful}, "switched": {Switched: true}} {
		t.Run(name, func(t *testing.T) {
			cfg.NAT = true
			n := start6(t, cfg)
			a, b := contained(t, n, vm.NewID(), "a", vm.NICSpec{}), contained(t, n, vm.NewID(), "b", vm.NICSpec{})
			if got := a.addresses6(false); len(got) != 2 || !slices.Contains(got, netip.MustParseAddr(a.nic.IPv6)) {
				t.Fatalf("it has %v at once, want %s and a link-local one", got, a.nic.IPv6)
			}
			g := newGuest(t, n, "vm")
			if cfg.IPv6Mode == IPv6Stateful {
				g.add6(g.nic.IPv6 + "/128")
			}
			g.joined()
			for _, to := range []string{b.nic.IPv6, g.nic.IPv6, "fd00:88:7::1", "2001:db8::2"} {
				if !a.pings(to, patience) {
					t.Errorf("it does not reach %s", to)
				}
			}
			if !g.pings(a.nic.IPv6, patience) {
				t.Error("a guest does not reach it")
			}
			a.do(func() error {
				l, err := netlink.LinkByName("eth0")
				if err != nil {
					return err
				}
				return setAddresses6(l, linkLocal(l.Attrs().HardwareAddr), netip.MustParsePrefix("fd00:88:7::666/64"))
			})
			if a.pings("fd00:88:7::1", impatience) {
				t.Error("it speaks with another address")
			}
		})
	}
}

// A container can use only its own hardware address and address.
func TestNamespacesAreChecked(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	a, b := contained(t, n, vm.NewID(), "a", vm.NICSpec{}), contained(t, n, vm.NewID(), "b", vm.NICSpec{})
	if !a.pings(b.nic.IP, patience) {
		t.Fatal("they do not meet")
	}
	a.configure("10.88.7.200")
	if a.pings("10.88.7.1", impatience) || a.pings(b.nic.IP, impatience) {
		t.Error("it speaks with another address")
	}
	a.configure(a.nic.IP)
	a.do(func() error { return a.setMAC("02:11:22:33:44:55") })
	if a.pings("10.88.7.1", impatience) {
		t.Error("it speaks with another hardware address")
	}
	a.attach(n, "a", vm.NICSpec{})
	if !a.pings(b.nic.IP, patience) {
		t.Error("attached again, it is not as it was")
	}
}

func TestNamespacesArePoliced(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	a, b := contained(t, n, vm.NewID(), "a", policedSpec), contained(t, n, vm.NewID(), "b", policedSpec)
	g := policed(t, n, "vm")
	serves, _ := listen(t, a.ns, net.JoinHostPort(a.nic.IP, "0"))
	b.want("closed", serves, false)
	only := network.Policy{Name: "b", Rules: []network.Rule{{AllPorts: true, Peers: []network.Range{network.RangeOf(netip.PrefixFrom(netip.MustParseAddr(b.nic.IP), 32))}}}}
	police(t, n, network.Policies{Guests: []network.Guest{{ID: a.id, Ingress: []int{0}}, {ID: b.id}, {ID: g.id}}, Ingress: []network.Policy{only}})
	b.want("allowed", serves, true)
	g.want("not allowed", serves, false)
}

// Ports of the host lead to a container until it is detached, also if its namespace is gone by then.
func TestNamespacesHavePorts(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	_ = outside(t)
	spec := vm.NICSpec{Ports: []vm.PortMapping{{Protocol: vm.TCP, HostPort: 8080, GuestPort: 80}}}
	for _, gone := range []bool{false, true} {
		a, b := contained(t, n, vm.NewID(), "a", spec), contained(t, n, vm.NewID(), "b", vm.NICSpec{})
		_, peers := listen(t, a.ns, net.JoinHostPort(a.nic.IP, "80"))
		if !dial(t, "198.51.100.1:8080", patience) || !b.dials("10.88.7.1:8080", patience) {
			t.Fatal("the port is closed")
		}
		<-peers
		if _, err := n.AttachNamespace(t.Context(), vm.NewID(), "c", 0, spec, netns.New(t)); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("the port of another container: %v", err)
		}
		if gone {
			a.do(func() error { // as the kernel does when the namespace ends
				l, err := netlink.LinkByName("eth0")
				if err == nil {
					err = netlink.LinkDel(l)
				}
				return err
			})
		}
		for range 2 {
			if err := n.Detach(t.Context(), a.nic); err != nil {
				t.Fatal(err)
			}
		}
		if dial(t, "198.51.100.1:8080", impatience) {
			t.Error("the port is open after the container was detached")
		}
		if open := n.ports.open; len(open) > 0 {
			t.Errorf("ports %v are left", open)
		}
		for _, g := range []guest{a, b} {
			if err := n.Detach(t.Context(), g.nic); err != nil {
				t.Fatal(err)
			}
			if err := n.Release(t.Context(), g.nic); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// The next container with an address is reached at once, whatever hardware address the last one had.
func TestNamespacesAreReachedAtOnce(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: "10.88.7.0/30", NAT: true})
	for i := range 3 {
		g := contained(t, n, vm.NewID(), fmt.Sprint("c", i), vm.NICSpec{})
		at, _ := listen(t, g.ns, net.JoinHostPort(g.nic.IP, "0"))
		if !dial(t, at, patience) {
			t.Errorf("container %d is not reached", i)
		}
		br, err := netlink.LinkByName(n.Bridge())
		if err != nil {
			t.Fatal(err)
		}
		known, err := netlink.NeighList(br.Attrs().Index, netlink.FAMILY_V4)
		known = slices.DeleteFunc(known, func(k netlink.Neigh) bool { return k.IP.String() != g.nic.IP })
		if err != nil || len(known) != 1 || known[0].HardwareAddr.String() != g.nic.MAC {
			t.Errorf("the host has the neighbours %v (%v), want %s", known, err, g.nic.MAC)
		}
		if err := n.Detach(t.Context(), g.nic); err != nil {
			t.Fatal(err)
		}
		if err := n.Release(t.Context(), g.nic); err != nil {
			t.Fatal(err)
		}
	}
}

func TestMasqueradedNamespace(t *testing.T) {
	n := start6(t, Config{NAT: true})
	_ = outside(t)
	a := contained(t, n, vm.NewID(), "a", vm.NICSpec{Masquerade: masqueraded})
	b := contained(t, n, vm.NewID(), "b", vm.NICSpec{})
	for _, to := range []string{b.nic.IP, b.nic.IPv6, "198.51.100.2"} {
		if !a.pings(to, patience) {
			t.Errorf("it does not reach %s", to)
		}
	}
	for _, to := range []string{a.nic.IP, a.nic.IPv6} {
		if !b.pings(to, patience) {
			t.Errorf("%s is not reached", to)
		}
	}
	for _, in := range []struct{ inner, outer string }{{a.nic.Inside.IP, a.nic.IP}, {a.nic.Inside.IPv6, a.nic.IPv6}} {
		at, _ := listen(t, a.ns, net.JoinHostPort(in.inner, "0"))
		_, port, _ := net.SplitHostPort(at)
		b.want("its address", net.JoinHostPort(in.outer, port), true)
	}
	serves, _ := listen(t, b.ns, net.JoinHostPort(b.nic.IP, "0"))
	a.want("another container", serves, true)
	if got := a.addresses6(false); !slices.Contains(got, netip.MustParseAddr(a.nic.Inside.IPv6)) {
		t.Errorf("it has %v, want %s", got, a.nic.Inside.IPv6)
	}
}

// On an adopted bridge, too, and its hardware address stays.
func TestNamespaceOnAnAdoptedBridge(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	addLink(t, "lan0", "10.88.7.3/24")
	was := func() string {
		l, err := netlink.LinkByName("lan0")
		if err != nil {
			t.Fatal(err)
		}
		return l.Attrs().HardwareAddr.String()
	}
	n := build(t, Config{Adopt: true, Bridge: "lan0", DNS: []string{}, StateDir: t.TempDir()})
	if err := n.Setup(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Teardown(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	first := contained(t, n, vm.NewID(), "a", vm.NICSpec{})
	before := was()
	second := contained(t, n, vm.NewID(), "b", vm.NICSpec{})
	for _, to := range []string{"10.88.7.3", second.nic.IP} {
		if !first.pings(to, patience) {
			t.Errorf("it does not reach %s", to)
		}
	}
	if now := was(); now != before {
		t.Errorf("the bridge has %s, before %s", now, before)
	}
	first.configure("10.88.7.200")
	if first.pings("10.88.7.3", impatience) {
		t.Error("it speaks with another address")
	}
	for _, g := range []guest{first, second} {
		if err := n.Detach(t.Context(), g.nic); err != nil {
			t.Fatal(err)
		}
	}
}

// A second interface has a name of its own, and the first keeps the default route.
func TestNamespaceOfTwoNetworks(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true, Routes: []Route{{To: "203.0.113.0/24", Via: "10.88.7.9"}}})
	a := contained(t, n, vm.NewID(), "a", vm.NICSpec{})
	second, err := n.AttachNamespace(t.Context(), a.id, "a", 1, vm.NICSpec{}, a.ns)
	if err != nil {
		t.Fatal(err)
	}
	a.do(func() error {
		if _, err := netlink.LinkByName("eth1"); err != nil {
			return err
		}
		for to, via := range map[string]string{"198.51.100.9": "10.88.7.1", "203.0.113.5": "10.88.7.9"} {
			got, err := netlink.RouteGet(net.ParseIP(to))
			if err != nil {
				return err
			}
			if got[0].Src.String() != a.nic.IP || got[0].Gw.String() != via {
				t.Errorf("to %s: %v; the second interface has %s", to, got[0], second.IP)
			}
		}
		return nil
	})
}

// What the namespace is, and what is there already, is checked before anything is made.
func TestNamespacesRefused(t *testing.T) {
	netns.Require(t)
	need.Tun(t)
	n := start(t, Config{Subnet: testSubnet, NAT: true})
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	taken := netns.New(t)
	netns.Do(t, taken, func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "eth0"
		return netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs})
	})
	for at, want := range map[string]errdefs.Class{
		filepath.Join(t.TempDir(), "none"): errdefs.FailedPrecondition, file: errdefs.FailedPrecondition,
		"/proc/self/ns/mnt": errdefs.FailedPrecondition, "/proc/thread-self/ns/net": errdefs.InvalidArgument, taken: errdefs.FailedPrecondition,
	} {
		if _, err := n.AttachNamespace(t.Context(), vm.NewID(), "a", 0, vm.NICSpec{}, at); !errdefs.Is(err, want) {
			t.Errorf("%s: %v", at, err)
		}
	}
	if leased, _ := n.Addresses(); leased != 0 {
		t.Errorf("%d addresses are leased after the refusals", leased)
	}
	g := newGuest(t, n, "vm")
	if _, err := n.AttachNamespace(t.Context(), g.id, "vm", 0, vm.NICSpec{}, netns.New(t)); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("the interface of a VM: %v", err)
	}
	c := contained(t, n, vm.NewID(), "c", vm.NICSpec{})
	if _, err := n.Attach(t.Context(), c.id, "c", 0, vm.NICSpec{}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("the interface of a container: %v", err)
	}
	for _, l := range links(t) {
		if l.Type() == typeVeth && l.Attrs().Name != c.nic.Tap {
			t.Errorf("link %s is left", l.Attrs().Name)
		}
	}
}

// sends sends that many bytes to another guest by TCP.
func (g guest) sends(to guest, size int64) {
	g.t.Helper()
	var l net.Listener
	to.do(func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(g.t.Context(), "tcp", net.JoinHostPort(to.nic.IP, "0"))
		return err
	})
	defer l.Close()
	got := make(chan int64, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			got <- -1
			return
		}
		defer c.Close()
		n, _ := io.Copy(io.Discard, c)
		got <- n
	}()
	g.do(func() error {
		c, err := (&net.Dialer{Timeout: patience}).DialContext(g.t.Context(), "tcp", l.Addr().String())
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = io.CopyN(c, rand.Reader, size)
		return err
	})
	if n := <-got; n != size {
		g.t.Errorf("of %d bytes from %s, %s gets %d", size, g.nic.IP, to.nic.IP, n)
	}
}

func links(t *testing.T) []netlink.Link {
	t.Helper()
	all, err := host.ListLinks()
	if err != nil {
		t.Fatal(err)
	}
	return all
}
